"""The record of one step, the timer of the steps, and totals over steps and of ranks."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from lightning.pytorch.strategies import Strategy

from lightning_batchmem.measure.peaks import StepPeaks
from lightning_batchmem.plan.records import MIB


@dataclass(slots=True)
class StepRecord:
    """The measurements of one step on this rank. The fields from ``start_bytes`` on are read in some steps only."""

    number: int  # of the batch, from 0: in the training over all epochs, or in one evaluation over all its loaders
    batch_size: int | None
    peaks: StepPeaks  # without phases if the device has no peak counter
    seconds: float  # wall time since the end of the previous step, without evaluation
    wait_seconds: float | None  # part of it before the batch arrived
    stage: str = "train"
    items: float | None = None
    marks: tuple[object, object] | None = None  # of the device, at the step's start and end; None if wall time is exact
    start_bytes: int | None = None  # of this process at the start of the step
    is_steady: bool = False  # whether the breakdown describes it
    device_seconds: float | None = None  # between the marks, once it is known
    limit_bytes: int | None = None
    utilization: tuple[str, float] | None = None  # metric name, and per cent since the previous reading


class DeviceReading(NamedTuple):
    """Readings of the device when a stage is logged."""

    limit_bytes: int | None = None
    utilization: tuple[str, float] | None = None
    alloc_retries: int | None = None


class StageTimer:
    """Wall time of each step of a stage since the end of the previous one, and the part before its batch arrived."""

    def __init__(self, stage: str, steps: int = 0) -> None:
        self.stage, self.steps = stage, steps
        self.mark: object = None  # of the device, at the end of the last step
        self.restart()

    def restart(self) -> None:
        self._since = self._wait_since = self._paused = time.perf_counter()
        self._is_wait_known = True
        self._wait_seconds: float | None = None

    def pause(self) -> None:
        self._paused = time.perf_counter()

    def resume(self) -> None:
        gap = time.perf_counter() - self._paused
        self._since += gap
        self._wait_since += gap

    def forget_wait(self) -> None:
        """Make the wait of the next step unknown: no hook marks the end of writing a checkpoint."""
        self._is_wait_known = False

    def start(self) -> bool:
        """Note that the batch arrived; return whether the wait for it is known. If not, the step starts now."""
        now = time.perf_counter()
        self._wait_seconds = now - self._wait_since if self._is_wait_known else None
        if not self._is_wait_known:
            self._since = now
        return self._is_wait_known

    def stop(self) -> tuple[float, float | None]:
        """End the step; return its seconds, and the seconds of them before the batch arrived."""
        now = time.perf_counter()
        seconds, self._since, self._is_wait_known = now - self._since, now, True
        self.steps += 1
        return seconds, self._wait_seconds

    def leave(self) -> None:
        """Start the wait for the next batch: the callback's own work has ended."""
        self._wait_since = time.perf_counter()


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
    seconds: float = 0.0  # from here on: sums
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
        if later.steps:
            self._raise_peaks(later.peak_step, later.peak_batch_size, later.phase_peak_bytes, later.peak_reserved_bytes)
            self.batch_size = later.batch_size
        self.steps += later.steps
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(later, name))

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


_SUMS = StepTotals.__slots__[StepTotals.__slots__.index("seconds") :]


def gather_ranks(totals: StepTotals, strategy: Strategy) -> tuple[list[float], list[float]]:
    """Exchange peak bytes and throughput of all ranks, which every rank must do; NaN where unknown."""
    own = [math.nan if value is None else value for value in (totals.peak_bytes, totals.samples_per_second(1))]
    # float32 would round bytes above 16 MiB
    pairs = strategy.all_gather(torch.tensor(own, dtype=torch.float64, device=strategy.root_device))
    peaks, speeds = pairs.reshape(-1, 2).T.tolist()
    return peaks, speeds


def rank_metrics(peaks: list[float], speeds: list[float]) -> dict[str, float]:
    """Return the highest and lowest peak in MiB, the rank of the highest, and the summed throughput."""
    found = {
        "ranks/highest_peak_allocated_mib": max(peaks) / MIB,
        "ranks/lowest_peak_allocated_mib": min(peaks) / MIB,
        "ranks/highest_rank": float(peaks.index(max(peaks))),
    }
    found = {} if any(map(math.isnan, peaks)) else found
    return found if any(map(math.isnan, speeds)) else found | {"ranks/samples_per_s": sum(speeds)}
