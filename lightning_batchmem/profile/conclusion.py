"""One line about what limits a run, from what was measured."""

from __future__ import annotations

# A device with this utilization hardly has anything to wait for.
_BUSY_PERCENT = 90.0
# Beyond half of the time nothing else matters as much. The alert about waiting has the same share.
_MOSTLY_WAITING_SHARE = 0.5
# A search stays below 0.95 of what a device can provide.
_MOSTLY_FULL_SHARE = 0.9


def conclusion(
    *,
    data_wait_share: float | None,
    held_bytes: int | None,
    limit_bytes: int | None,
    busy_percent: float | None,
) -> str:
    """Return what limits a run, and what helps; empty where the numbers do not decide.

    Args:
        data_wait_share: share of the wall time before the batch arrived, 0 to 1.
        held_bytes: the most that the process held.
        limit_bytes: the most that it may hold.
        busy_percent: mean utilization of the device, 0 to 100.
    """
    # A busy device works while the process waits for data, and more memory would not make it
    # faster.
    if busy_percent is not None and busy_percent >= _BUSY_PERCENT:
        return (
            f"Limited by compute: the device was {busy_percent:.0f}% busy."
            " A lower precision, torch.compile or a faster device help."
        )
    if data_wait_share is not None and data_wait_share > _MOSTLY_WAITING_SHARE:
        return (
            f"Limited by data: {data_wait_share:.0%} of the time passed before the batch arrived."
            " More loader workers (num_workers) or cheaper samples help."
        )
    if held_bytes is None or limit_bytes is None or held_bytes < _MOSTLY_FULL_SHARE * limit_bytes:
        return ""
    return (
        f"Limited by memory: {held_bytes / limit_bytes:.0%} of the limit. A lower precision,"
        " activation checkpointing or sharding make room for larger batches."
    )
