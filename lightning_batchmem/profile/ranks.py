"""The totals of all ranks, exchanged on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import distributed

from lightning_batchmem.plan.records import MIB


class RankTotals(NamedTuple):
    """What a rank has measured in its training; None is unknown."""

    peak_bytes: int | None
    samples_per_second: float | None


class HostGroup:
    """All ranks, in a group that exchanges values on the host: nothing waits for a device.

    Every rank must make it, and call its methods equally often.
    """

    def __init__(self) -> None:
        has_ranks = distributed.is_available() and distributed.is_initialized()
        self._size = distributed.get_world_size() if has_ranks else 1
        # The last step of an epoch whose ranks have not exchanged their totals yet.
        self.epoch_end_step: int | None = None
        # None is the default group.
        self._group: Any = None
        if has_ranks and distributed.get_backend() != "gloo":
            self._group = distributed.new_group(backend="gloo")

    def end_epoch(self, last_step: int) -> None:
        """Note that the next exchange is for the epoch with this last step."""
        self.epoch_end_step = last_step

    def exchange(self, totals: RankTotals) -> list[RankTotals]:
        """Return the totals of all ranks, in their order."""
        self.epoch_end_step = None
        if self._size == 1:
            return [totals]
        ranks: list[Any] = [None] * self._size
        distributed.all_gather_object(ranks, totals, group=self._group)
        return ranks


def rank_metrics(ranks: Sequence[RankTotals]) -> dict[str, float]:
    """Return the highest and lowest peak in MiB, the highest one's rank, and summed throughput.

    A value that is unknown on one rank is left out.
    """
    metrics = {}
    peaks = [rank.peak_bytes for rank in ranks if rank.peak_bytes is not None]
    if len(peaks) == len(ranks):
        metrics = {
            "ranks/highest_peak_mib": max(peaks) / MIB,
            "ranks/lowest_peak_mib": min(peaks) / MIB,
            "ranks/highest_rank": float(peaks.index(max(peaks))),
        }
    speeds = [rank.samples_per_second for rank in ranks if rank.samples_per_second is not None]
    if len(speeds) == len(ranks):
        metrics["ranks/samples_per_s"] = sum(speeds)
    return metrics
