"""Totals over steps, and over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torchmetrics import CatMetric

from lightning_batchmem.measure.step_record import StepRecord
from lightning_batchmem.plan.records import MIB

_UNKNOWN = -1.0  # stands for None in a tensor


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
        """Add one step."""
        self.steps += 1
        self._raise_peaks(step.number, step.batch_size, step.peaks.phase_peak_bytes, step.peaks.peak_reserved_bytes)
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
        """Add the steps of ``later``."""
        if later.steps:
            self._raise_peaks(later.peak_step, later.peak_batch_size, later.phase_peak_bytes, later.peak_reserved_bytes)
            self.batch_size = later.batch_size
        self.steps += later.steps
        self.seconds += later.seconds
        self.samples += later.samples
        self.sized_seconds += later.sized_seconds
        self.items += later.items
        self.counted_seconds += later.counted_seconds
        self.wait_seconds += later.wait_seconds
        self.waited_seconds += later.waited_seconds
        self.device_seconds += later.device_seconds
        self.device_steps += later.device_steps

    def _raise_peaks(self, number: int, size: int | None, phases: dict[str, int], reserved_bytes: int | None) -> None:
        for phase, peak_bytes in phases.items():
            if peak_bytes > self.phase_peak_bytes.get(phase, -1):
                self.phase_peak_bytes[phase] = peak_bytes
                if self.peak_bytes is None or peak_bytes > self.peak_bytes:
                    self.peak_bytes, self.peak_step, self.peak_batch_size = peak_bytes, number, size
        if reserved_bytes is not None and reserved_bytes > (self.peak_reserved_bytes or -1):
            self.peak_reserved_bytes = reserved_bytes

    @property
    def step_seconds(self) -> float:
        """Mean time of a step: the device's if known, else wall time."""
        return self.device_seconds / self.device_steps if self.device_steps else self.seconds / self.steps

    def samples_per_second(self, world_size: int) -> float | None:
        """Throughput over the steps of known size, if all ranks have batches of this size."""
        return world_size * self.samples / self.sized_seconds if self.sized_seconds else None

    def items_per_second(self, world_size: int) -> float | None:
        """Items of all ranks per second; None if nothing is counted."""
        return world_size * self.items / self.counted_seconds if self.counted_seconds else None

    @property
    def data_wait_share(self) -> float | None:
        """Share of wall time before the batch arrived, 0 to 1, over the steps in which it is known."""
        return self.wait_seconds / self.waited_seconds if self.waited_seconds else None

    def metrics(self, *, limit_bytes: int | None, world_size: int) -> dict[str, float]:
        """Return the metrics of these steps in MiB, ms and per cent, without the unknown ones."""
        found: dict[str, float | None] = {
            "memory/peak_allocated_mib": None if self.peak_bytes is None else self.peak_bytes / MIB,
            "memory/peak_reserved_mib": None if self.peak_reserved_bytes is None else self.peak_reserved_bytes / MIB,
            "memory/limit_mib": None if limit_bytes is None else limit_bytes / MIB,
            "throughput/samples_per_s": self.samples_per_second(world_size),
            "throughput/items_per_s": self.items_per_second(world_size),
            "throughput/step_ms": 1e3 * self.step_seconds,
            "throughput/data_wait_pct": None if self.data_wait_share is None else 100.0 * self.data_wait_share,
            "batch/size": self.batch_size,
        }
        return {key: float(value) for key, value in found.items() if value is not None}


@dataclass(frozen=True)
class RankTotals:
    """Peak and throughput of each rank, in rank order; None where unknown."""

    peak_bytes: tuple[int | None, ...]
    samples_per_second: tuple[float | None, ...]

    @classmethod
    def gather(cls, totals: StepTotals, device: torch.device) -> RankTotals:
        """Exchange the totals; every rank must call this."""
        # float32 would round bytes above 16 MiB; to(device) resets the type (torchmetrics 1.9), so it comes first
        metric = CatMetric().to(device).set_dtype(torch.float64)
        own = (totals.peak_bytes, totals.samples_per_second(1))
        values = [_UNKNOWN if value is None else value for value in own]
        metric.update(torch.tensor(values, dtype=torch.float64, device=device))
        pairs = torch.as_tensor(metric.compute()).reshape(-1, 2).tolist()
        return cls(
            tuple(None if peak_bytes == _UNKNOWN else int(peak_bytes) for peak_bytes, _ in pairs),
            tuple(None if speed == _UNKNOWN else speed for _, speed in pairs),
        )

    def metrics(self) -> dict[str, float]:
        """Return the highest and lowest peak in MiB, the rank of the highest, and the summed throughput."""
        found = {}
        peaks = [peak_bytes for peak_bytes in self.peak_bytes if peak_bytes is not None]
        if len(peaks) == len(self.peak_bytes):
            found["ranks/highest_peak_allocated_mib"] = max(peaks) / MIB
            found["ranks/lowest_peak_allocated_mib"] = min(peaks) / MIB
            found["ranks/highest_rank"] = float(peaks.index(max(peaks)))
        speeds = [speed for speed in self.samples_per_second if speed is not None]
        if len(speeds) == len(self.samples_per_second):
            found["ranks/samples_per_s"] = sum(speeds)
        return found
