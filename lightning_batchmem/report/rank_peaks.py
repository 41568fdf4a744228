"""The peaks and speeds of all ranks, for the MemoryProfiler."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchmetrics import CatMetric

from lightning_batchmem.plan.records import MIB


@dataclass(frozen=True)
class RankPeaks:
    """The peaks and speeds of all ranks over the same steps.

    Args:
        peak_bytes: highest allocated bytes of each rank, in the order of the ranks.
        samples_per_second: what each rank did by itself; ``None`` where its batches did not tell.
    """

    peak_bytes: tuple[int, ...]
    samples_per_second: tuple[float | None, ...]

    @property
    def highest_rank(self) -> int:
        """The rank with the highest peak."""
        return self.peak_bytes.index(max(self.peak_bytes))

    def metrics(self, *, has_peak: bool = True) -> dict[str, float]:
        """What the loggers get: the highest and the lowest peak in MiB, whose the highest is, the summed throughput.

        Args:
            has_peak: ``False`` where the bytes are only the highest seen at the marks: no "peak" in the names then.
        """
        peak = "peak_" if has_peak else ""
        found = {
            f"ranks/highest_{peak}allocated_mib": max(self.peak_bytes) / MIB,
            f"ranks/lowest_{peak}allocated_mib": min(self.peak_bytes) / MIB,
            "ranks/highest_rank": float(self.highest_rank),
        }
        speeds = [speed for speed in self.samples_per_second if speed is not None]
        if len(speeds) == len(self.samples_per_second):
            found["ranks/samples_per_s"] = sum(speeds)
        return found


def join_ranks(peak_bytes: int, samples_per_second: float | None, device: torch.device) -> RankPeaks:
    """Gather peak and speed of all ranks; every rank has to call it, and each gets the same answer.

    Args:
        peak_bytes: of this rank.
        samples_per_second: of this rank; ``None`` when it is not known.
        device: where the process group exchanges tensors.
    """
    # float32 would round bytes beyond 16 MiB; to(device) sets it back to that (torchmetrics 1.9), so it comes first
    metric = CatMetric().to(device).set_dtype(torch.float64)
    unknown = -1.0
    own = [peak_bytes, unknown if samples_per_second is None else samples_per_second]
    metric.update(torch.tensor(own, dtype=torch.float64, device=device))
    pairs = torch.as_tensor(metric.compute()).reshape(-1, 2).tolist()
    return RankPeaks(
        tuple(int(peak) for peak, _ in pairs),
        tuple(None if speed == unknown else speed for _, speed in pairs),
    )
