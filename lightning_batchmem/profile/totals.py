"""Totals over steps, and the metrics of these; totals of all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from lightning.pytorch.strategies import Strategy

from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.step_record import StepRecord


@dataclass(slots=True)
class Ratio:
    """A sum, and the sum of what it is divided by; only steps where both are known count."""

    amount: float = 0.0
    per: float = 0.0

    def add(self, amount: float, per: float) -> None:
        self.amount += amount
        self.per += per

    def value(self, factor: float = 1.0) -> float | None:
        """Return ``factor`` times the quotient; None if no step counts."""
        return factor * self.amount / self.per if self.per else None


@dataclass(slots=True)
class StepTotals:
    """Totals over steps, constant in size: maxima of bytes, sums of samples and seconds."""

    steps: int = 0
    seconds: float = 0.0
    # These are the samples of a full batch: the last one of an epoch often has fewer.
    batch_size: int | None = None
    peak_bytes: int | None = None
    peak_step: int = 0
    peak_batch_size: int | None = None
    phase_peak_bytes: dict[str, int] = field(default_factory=dict)
    peak_reserved_bytes: int | None = None
    # Samples and items of this rank are divided by wall seconds.
    samples: Ratio = field(default_factory=Ratio)
    items: Ratio = field(default_factory=Ratio)
    # Seconds before the batch arrived are divided by wall seconds: the quotient is 0 to 1.
    data_wait: Ratio = field(default_factory=Ratio)
    # So many batches ran in parts; None without an OomGuard.
    oom_splits: int | None = None

    def add(self, step: StepRecord) -> None:
        seconds = step.seconds
        self.steps += 1
        self.seconds += seconds
        for phase, peak_bytes in step.peaks.phase_peak_bytes.items():
            if peak_bytes > self.phase_peak_bytes.get(phase, -1):
                self.phase_peak_bytes[phase] = peak_bytes
                if self.peak_bytes is None or peak_bytes > self.peak_bytes:
                    self.peak_bytes = peak_bytes
                    self.peak_step = step.number
                    self.peak_batch_size = step.batch_size
        reserved_bytes = step.peaks.peak_reserved_bytes
        if reserved_bytes is not None:
            self.peak_reserved_bytes = max(self.peak_reserved_bytes or 0, reserved_bytes)
        if step.batch_size is not None:
            self.batch_size = max(self.batch_size or 0, step.batch_size)
        if step.wait_seconds is not None:
            self.data_wait.add(step.wait_seconds, seconds)
        if step.oom_splits is not None:
            self.oom_splits = (self.oom_splits or 0) + step.oom_splits
        if step.is_slowed:
            return
        if step.batch_size is not None:
            self.samples.add(step.batch_size, seconds)
        if step.items is not None:
            self.items.add(step.items, seconds)

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step."""
        return self.seconds / self.steps

    def metrics(
        self, *, limit_bytes: int | None, world_size: int, total_bytes: int | None = None
    ) -> dict[str, float]:
        """Return the metrics of these steps in MiB, ms and per cent, without the unknown ones.

        The throughput is that of all ranks, if they have batches of this rank's size.

        Args:
            limit_bytes: what this process may hold.
            world_size: number of ranks.
            total_bytes: memory of the whole device; None where no allocator reserves a part of it.
        """
        reserved_share = None
        if self.peak_reserved_bytes is not None and total_bytes:
            reserved_share = self.peak_reserved_bytes / total_bytes
        metrics: dict[str, float | None] = {
            "memory/peak_allocated_mib": _mib(self.peak_bytes),
            "memory/peak_reserved_mib": _mib(self.peak_reserved_bytes),
            "memory/reserved_pct": None if reserved_share is None else 100.0 * reserved_share,
            "memory/limit_mib": _mib(limit_bytes),
            "throughput/samples_per_s": self.samples.value(world_size),
            "throughput/items_per_s": self.items.value(world_size),
            "throughput/step_ms": 1e3 * self.step_seconds,
            "throughput/data_wait_pct": self.data_wait.value(100.0),
            "batch/size": self.batch_size,
        }
        return {key: float(value) for key, value in metrics.items() if value is not None}


def _mib(count_bytes: int | None) -> float | None:
    return None if count_bytes is None else count_bytes / MIB


class StageTotals:
    """Totals of a stage: over all steps, and over those since the last log."""

    def __init__(self) -> None:
        self.run = StepTotals()
        self.interval = StepTotals()

    def add(self, step: StepRecord) -> None:
        self.run.add(step)
        self.interval.add(step)

    def end_interval(self) -> StepTotals:
        """Return the totals since the last call."""
        interval = self.interval
        self.interval = StepTotals()
        return interval


def gather_ranks(totals: StepTotals, strategy: Strategy) -> tuple[list[float], list[float]]:
    """Exchange peak bytes and throughput of all ranks; every rank must do so. NaN is unknown."""
    readings = [
        math.nan if value is None else value
        for value in (totals.peak_bytes, totals.samples.value())
    ]
    # The type float32 would round bytes above 16 MiB.
    tensor = torch.tensor(readings, dtype=torch.float64, device=strategy.root_device)
    peaks, speeds = strategy.all_gather(tensor).reshape(-1, 2).T.tolist()
    return peaks, speeds


def rank_metrics(peaks: list[float], speeds: list[float]) -> dict[str, float]:
    """Return the highest and lowest peak in MiB, the highest one's rank, and summed throughput.

    A value that is unknown on one rank is left out.
    """
    metrics = {}
    # The sum is NaN if one of its terms is.
    if not math.isnan(sum(peaks)):
        metrics = {
            "ranks/highest_peak_allocated_mib": max(peaks) / MIB,
            "ranks/lowest_peak_allocated_mib": min(peaks) / MIB,
            "ranks/highest_rank": float(peaks.index(max(peaks))),
        }
    if not math.isnan(sum(speeds)):
        metrics["ranks/samples_per_s"] = sum(speeds)
    return metrics
