"""The peaks of all ranks, exchanged on the host at the end of a training."""

from __future__ import annotations

from typing import Any

from torch import distributed


def peaks_of_ranks(peak_bytes: int | None) -> tuple[int, ...]:
    """Return the peaks of all ranks, in their order, without those that are unknown.

    Every rank must call this function. The group is one on the host, so nothing waits for a device.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return ()
    # None is the default group.
    group: Any = None
    if distributed.get_backend() != "gloo":
        group = distributed.new_group(backend="gloo")
    peaks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(peaks, peak_bytes, group=group)
    return tuple(peak for peak in peaks if peak is not None)
