"""The steps of a run, timed, and tallied into the metrics of an interval."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_batchmem.measure.phases import StepPeaks
from lightning_batchmem.plan.records import MIB


class StepRecord(NamedTuple):
    """One step, as it was measured.

    Args:
        number: which batch it was, from 0: of the training over all epochs, or of one evaluation over all its loaders.
        batch_size: samples in it, on this rank; ``None`` when the batch does not tell.
        peaks: its peaks, in bytes.
        seconds: wall time since the end of the step before it, evaluation left out.
        wait_seconds: how much of that passed before the step got its batch; ``None`` when it is not known.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        items: what the user counts in the batch (tokens, say), on this rank; ``None`` when nothing is counted.
        limit_bytes: what this process might hold, where it was asked at this step.
        utilization: key and percent, where they were asked at this step.
        device_seconds: the device's own time since the end of the step before it; ``None`` where the wall's is exact,
            or the device has not told.
    """

    number: int
    batch_size: int | None
    peaks: StepPeaks
    seconds: float
    wait_seconds: float | None
    stage: str = "train"
    items: float | None = None
    limit_bytes: int | None = None
    utilization: tuple[str, float] | None = None
    device_seconds: float | None = None


class StepTimer:
    """Wall time of each step, from the end of the one before it, and how much of that the step waited for its batch.

    What a callback does after its step has ended is no wait for data: :meth:`leave` says when that is over. After a
    checkpoint the wait is not known (Lightning says when a checkpoint is made, not when it is written), and the next
    step begins when it gets its batch.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Let the next step begin now, whatever happened since the last one."""
        self._since = self._wait_since = self._paused = time.perf_counter()
        self._wait_known = True
        self._wait_seconds: float | None = None

    def pause(self) -> None:
        """Stop: what follows is not training."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Run on."""
        gap = time.perf_counter() - self._paused
        self._since += gap
        self._wait_since += gap

    def forget_wait(self) -> None:
        """Something else than the loader may take time until the next batch."""
        self._wait_known = False

    def start(self) -> bool:
        """The batch is there.

        Returns:
            Whether the wait for it is known; if not, the step begins now.
        """
        now = time.perf_counter()
        self._wait_seconds = now - self._wait_since if self._wait_known else None
        if not self._wait_known:
            self._since = now
        return self._wait_known

    def stop(self) -> tuple[float, float | None]:
        """The step has ended.

        Returns:
            Seconds since the step before it ended, and the seconds of them before the batch was there, if known.
        """
        now = time.perf_counter()
        seconds, self._since, self._wait_known = now - self._since, now, True
        return seconds, self._wait_seconds

    def leave(self) -> None:
        """The wait for the next batch begins."""
        self._wait_since = time.perf_counter()


@dataclass(slots=True)
class StepTotals:
    """Running totals over steps, constant in size: maxima of bytes, sums of samples and seconds."""

    steps: int = 0
    peak_bytes: int = -1
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
        """Take in one step."""
        self.steps += 1
        self._raise_peaks(step.number, step.batch_size, step.peaks.phase_peak_bytes, step.peaks.peak_reserved_bytes)
        self.seconds += step.seconds
        self.batch_size = step.batch_size
        if step.batch_size is not None:
            self.samples += step.batch_size
            self.sized_seconds += step.seconds
        if step.items is not None:
            self.items += step.items
            self.counted_seconds += step.seconds
        if step.wait_seconds is not None:
            self.wait_seconds += step.wait_seconds
            self.waited_seconds += step.seconds

    def add_device_time(self, seconds: float) -> None:
        """Take in what the device itself says of the time of one step; it says so later."""
        self.device_seconds += seconds
        self.device_steps += 1

    def merge(self, later: StepTotals) -> None:
        """Take in what ``later`` has counted."""
        if later.steps:
            self.steps += later.steps
            self._raise_peaks(later.peak_step, later.peak_batch_size, later.phase_peak_bytes, later.peak_reserved_bytes)
            self.batch_size = later.batch_size
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(later, name))

    @property
    def step_seconds(self) -> float:
        """Mean time of a step: the device's own where it tells, else the wall's."""
        return self.device_seconds / self.device_steps if self.device_steps else self.seconds / self.steps

    def samples_per_second(self, world_size: int) -> float | None:
        """Throughput over the steps whose size is known, as if all ranks had batches like this one's."""
        return world_size * self.samples / self.sized_seconds if self.sized_seconds else None

    def items_per_second(self, world_size: int) -> float | None:
        """The same for what the user counts; ``None`` where nothing is counted."""
        return world_size * self.items / self.counted_seconds if self.counted_seconds else None

    @property
    def data_wait_share(self) -> float | None:
        """Share of the wall time before the batch was there, over the steps in which that is known; 0 to 1."""
        return self.wait_seconds / self.waited_seconds if self.waited_seconds else None

    def metrics(self, *, limit_bytes: int, world_size: int, has_peak: bool = True) -> dict[str, float]:
        """What the loggers get for the steps so far, in MiB, ms and percent; what is not known is left out.

        Args:
            limit_bytes: what this process may hold.
            world_size: the number of ranks.
            has_peak: ``False`` where the bytes are only the highest seen at the marks: no "peak" in the names then.
        """
        peak = "peak_" if has_peak else ""
        found: dict[str, float | None] = {
            f"memory/{peak}allocated_mib": self.peak_bytes / MIB,
            f"memory/{peak}reserved_mib": None if self.peak_reserved_bytes is None else self.peak_reserved_bytes / MIB,
            "memory/limit_mib": limit_bytes / MIB,
            "throughput/samples_per_s": self.samples_per_second(world_size),
            "throughput/items_per_s": self.items_per_second(world_size),
            "throughput/step_ms": 1e3 * self.step_seconds,
            "throughput/data_wait_pct": None if self.data_wait_share is None else 100.0 * self.data_wait_share,
            "batch/size": self.batch_size,
        }
        return {key: float(value) for key, value in found.items() if value is not None}

    def _raise_peaks(self, number: int, size: int | None, phases: dict[str, int], reserved: int | None) -> None:
        for phase, peak in phases.items():
            if peak > self.phase_peak_bytes.get(phase, -1):
                self.phase_peak_bytes[phase] = peak
                if peak > self.peak_bytes:
                    self.peak_bytes, self.peak_step, self.peak_batch_size = peak, number, size
        if reserved is not None and reserved > (self.peak_reserved_bytes or -1):
            self.peak_reserved_bytes = reserved


# what is added up when two tallies are merged; the rest are maxima, or the last of their kind
_SUMS = (
    "seconds",
    "samples",
    "sized_seconds",
    "items",
    "counted_seconds",
    "wait_seconds",
    "waited_seconds",
    "device_seconds",
    "device_steps",
)
