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
    """The measurements of one step on this rank.

    The fields from ``start_bytes`` on are read in some steps only.
    """

    # The batch has this number, from 0: in the training over all epochs, or in one evaluation over
    # all its loaders.
    number: int
    batch_size: int | None
    # The peaks have no phases if the device has no peak counter.
    peaks: StepPeaks
    # The wall time begins at the end of the previous step and excludes evaluation.
    seconds: float
    # This part of the wall time passed before the batch arrived.
    wait_seconds: float | None
    stage: str = "train"
    items: float | None = None
    # The device set these marks at the step's start and end. They are None if wall time is exact.
    marks: tuple[object, object] | None = None
    # This process held so many bytes at the start of the step.
    start_bytes: int | None = None
    # This is true if the memory breakdown describes the step.
    is_steady: bool = False
    # The device took this time between the marks. It is None until it is known.
    device_seconds: float | None = None
    limit_bytes: int | None = None
    # The pair is the name of the metric, and per cent since the previous reading.
    utilization: tuple[str, float] | None = None


class DeviceReading(NamedTuple):
    """Readings of the device when a stage is logged."""

    limit_bytes: int | None = None
    utilization: tuple[str, float] | None = None
    alloc_retries: int | None = None


class StageTimer:
    """Wall time of each step of a stage since the end of the previous step.

    The part before the batch arrived is measured too.
    """

    def __init__(self, stage: str, steps: int = 0) -> None:
        self.stage = stage
        self.steps = steps
        # The device set this mark at the end of the last step.
        self.mark: object = None
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
        """Note that the batch arrived; return whether the wait for it is known.

        If the wait is not known, the step starts now.
        """
        now = time.perf_counter()
        self._wait_seconds = now - self._wait_since if self._is_wait_known else None
        if not self._is_wait_known:
            self._since = now
        return self._is_wait_known

    def stop(self) -> tuple[float, float | None]:
        """End the step; return its seconds, and the seconds of them before the batch arrived."""
        now = time.perf_counter()
        seconds = now - self._since
        self._since = now
        self._is_wait_known = True
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
