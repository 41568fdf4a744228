"""Totals over steps, and the metrics of these; totals of all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from lightning.pytorch.strategies import Strategy

from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.step_record import StepRecord


@dataclass(slots=True)
class StepTotals:
    """Totals over steps, constant in size: maxima of bytes, sums of samples and seconds."""

    steps: int = 0
    peak_bytes: int | None = None
    peak_step: int = 0
    peak_batch_size: int | None = None
    phase_peak_bytes: dict[str, int] = field(default_factory=dict)
    peak_reserved_bytes: int | None = None
    batch_size: int | None = None
    # All fields from here on are sums.
    seconds: float = 0.0
    samples: int = 0
    sized_seconds: float = 0.0
    items: float = 0.0
    counted_seconds: float = 0.0
    wait_seconds: float = 0.0
    waited_seconds: float = 0.0
    device_seconds: float = 0.0
    device_steps: int = 0

    def add(self, step: StepRecord) -> None:
        self.steps += 1
        self._raise_peaks(
            step.number,
            step.batch_size,
            step.peaks.phase_peak_bytes,
            step.peaks.peak_reserved_bytes,
        )
        seconds = step.seconds
        self.seconds += seconds
        self.batch_size = step.batch_size
        if step.batch_size is not None:
            self.samples += step.batch_size
            self.sized_seconds += seconds
        if step.items is not None:
            self.items += step.items
            self.counted_seconds += seconds
        if step.wait_seconds is not None:
            self.wait_seconds += step.wait_seconds
            self.waited_seconds += seconds

    def merge(self, later: StepTotals) -> None:
        if later.steps:
            self._raise_peaks(
                later.peak_step,
                later.peak_batch_size,
                later.phase_peak_bytes,
                later.peak_reserved_bytes,
            )
            self.batch_size = later.batch_size
        self.steps += later.steps
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(later, name))

    def _raise_peaks(
        self, number: int, size: int | None, phases: dict[str, int], reserved_bytes: int | None
    ) -> None:
        for phase, peak_bytes in phases.items():
            if peak_bytes > self.phase_peak_bytes.get(phase, -1):
                self.phase_peak_bytes[phase] = peak_bytes
                if self.peak_bytes is None or peak_bytes > self.peak_bytes:
                    self.peak_bytes = peak_bytes
                    self.peak_step = number
                    self.peak_batch_size = size
        if reserved_bytes is not None and reserved_bytes > (self.peak_reserved_bytes or -1):
            self.peak_reserved_bytes = reserved_bytes

    @property
    def step_seconds(self) -> float:
        """Mean time of a step: the device's if known, else wall time."""
        if self.device_steps:
            return self.device_seconds / self.device_steps
        return self.seconds / self.steps

    def samples_per_second(self, world_size: int) -> float | None:
        """Throughput over the steps of known size, if all ranks have batches of this size."""
        return world_size * self.samples / self.sized_seconds if self.sized_seconds else None

    def items_per_second(self, world_size: int) -> float | None:
        """Items of all ranks per second; None if nothing is counted."""
        return world_size * self.items / self.counted_seconds if self.counted_seconds else None

    @property
    def data_wait_share(self) -> float | None:
        """Share of wall time before the batch arrived, 0 to 1, over the steps with a known wait."""
        return self.wait_seconds / self.waited_seconds if self.waited_seconds else None

    def metrics(self, *, limit_bytes: int | None, world_size: int) -> dict[str, float]:
        """Return the metrics of these steps in MiB, ms and per cent, without the unknown ones."""
        reserved_mib = None
        if self.peak_reserved_bytes is not None:
            reserved_mib = self.peak_reserved_bytes / MIB
        data_wait_percent = None
        if self.data_wait_share is not None:
            data_wait_percent = 100.0 * self.data_wait_share
        found: dict[str, float | None] = {
            "memory/peak_allocated_mib": None if self.peak_bytes is None else self.peak_bytes / MIB,
            "memory/peak_reserved_mib": reserved_mib,
            "memory/limit_mib": None if limit_bytes is None else limit_bytes / MIB,
            "throughput/samples_per_s": self.samples_per_second(world_size),
            "throughput/items_per_s": self.items_per_second(world_size),
            "throughput/step_ms": 1e3 * self.step_seconds,
            "throughput/data_wait_pct": data_wait_percent,
            "batch/size": self.batch_size,
        }
        return {key: float(value) for key, value in found.items() if value is not None}


_SUMS = StepTotals.__slots__[StepTotals.__slots__.index("seconds") :]


def gather_ranks(totals: StepTotals, strategy: Strategy) -> tuple[list[float], list[float]]:
    """Exchange peak bytes and throughput of all ranks; every rank must do so. NaN is unknown."""
    readings = (totals.peak_bytes, totals.samples_per_second(1))
    own = [math.nan if value is None else value for value in readings]
    # The type float32 would round bytes above 16 MiB.
    pairs = strategy.all_gather(torch.tensor(own, dtype=torch.float64, device=strategy.root_device))
    peaks, speeds = pairs.reshape(-1, 2).T.tolist()
    return peaks, speeds


def rank_metrics(peaks: list[float], speeds: list[float]) -> dict[str, float]:
    """Return the highest and lowest peak in MiB, the highest one's rank, and summed throughput."""
    found = {
        "ranks/highest_peak_allocated_mib": max(peaks) / MIB,
        "ranks/lowest_peak_allocated_mib": min(peaks) / MIB,
        "ranks/highest_rank": float(peaks.index(max(peaks))),
    }
    found = {} if any(map(math.isnan, peaks)) else found
    return found if any(map(math.isnan, speeds)) else found | {"ranks/samples_per_s": sum(speeds)}
