"""The memory of a step and before it: peaks, and in some steps what is held when it starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lightning_batchmem.devices.base import DeviceMemory, MemoryStats
from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.devices.tensors import bytes_of, tensors_in

PEAK = "The memory of a step"


# A reading takes about 20 µs on CUDA, so it is made where Lightning and other callbacks took much
# longer between two steps.
_LONG_SECONDS = 0.01


@dataclass(frozen=True)
class PeakBetweenSteps:
    """The highest memory between two steps, in a hook or a callback.

    Args:
        peak_bytes: most bytes of tensors (CPU: of the process).
        after_step: the step of the run before it; None before the first one.
        is_after_last: whether no step follows.
    """

    peak_bytes: int
    after_step: int | None
    is_after_last: bool = False

    def __str__(self) -> str:
        if self.after_step is None:
            return "before the first step"
        if self.is_after_last:
            return "after the last step"
        return f"after step {self.after_step} and before the next one"


class StepMemory:
    """Reads the memory of the steps of a run, and between them where that may be worth it.

    Between two steps it is read after a checkpoint, an evaluation and an epoch, where a long time
    passed, and otherwise at some steps, which become rarer.

    Args:
        device_memory: the memory, whose peak begins before the first step; None if it cannot be
            measured.
        device: the device of the steps.
    """

    def __init__(self, device_memory: DeviceMemory | None, device: torch.device) -> None:
        # The highest one so far.
        self.between: PeakBetweenSteps | None = None
        # The peak between the last step and the one before; None where it was not read.
        self.before_bytes: int | None = None
        # What was held at the start of the last step; None where it was not read, or not due.
        self.start_bytes: int | None = None
        self.last_start_bytes = 0
        self._device_memory = device_memory
        self._device = device
        # Those of the last step of the run, and its number.
        self._last_peak_bytes = 0
        self._after_step: int | None = None
        # Whether the peak is that since the end of the last step.
        self._is_watched = True
        # What is held is due at the start of this step of the run, the next time. The first step
        # has no gradients and states yet.
        self._next_reading = 2
        self._is_due = False

    def start(self, batch: object, gap_seconds: float, *, is_of_run: bool) -> None:
        """Begin a step.

        Args:
            batch: its batch.
            gap_seconds: the time since the step before, without the wait for data.
            is_of_run: whether it is no step of a validation within a training.
        """
        self.start_bytes = None
        device_memory = self._device_memory
        if device_memory is None:
            return
        is_due = self._is_due and is_of_run
        if self._is_watched or is_due or gap_seconds > _LONG_SECONDS:
            self.read(batch)
            if is_due:
                self.start_bytes = self.last_start_bytes
                self._is_due = False
        self._is_watched = False
        if value_or_none(PEAK, _has_reset, device_memory) is None:
            self._device_memory = None

    def end(self, steps: int | None, number: int) -> MemoryStats | None:
        """End a step, and return its highest use; None if it is unknown.

        What was read before it is forgotten.

        Args:
            steps: how many steps of the run have begun; None in a validation within a training.
            number: the number of the step.
        """
        self.before_bytes = None
        if steps is not None:
            self._after_step = number
        device_memory = self._device_memory
        peak = None if device_memory is None else value_or_none(PEAK, device_memory.peak)
        if peak is None:
            return None
        self._last_peak_bytes = peak.allocated_bytes
        if steps is not None and steps + 1 >= self._next_reading:
            self._next_reading = next_reading(steps + 1)
            # Another profiler may read the peak of this step after this one, so it stays.
            self._is_due = True
        return peak

    def leave(self) -> None:
        """Read the peak from now on at the start of the next step."""
        if not self._is_watched:
            self.read()
            self._is_watched = self._has_restarted()

    def read(self, batch: object = None) -> None:
        """Read the peak since the end of the last step, and what is held without a batch."""
        device_memory = self._device_memory
        if device_memory is None:
            return
        held = value_or_none(PEAK, held_bytes, device_memory, batch, self._device)
        if held is None:
            return
        peak_bytes, self.last_start_bytes = held
        # Without a restart it is known only where it is above that of the step.
        if self._is_watched or peak_bytes > self._last_peak_bytes:
            self.before_bytes = max(peak_bytes, self.before_bytes or 0)
            if self.between is None or peak_bytes > self.between.peak_bytes:
                self.between = PeakBetweenSteps(peak_bytes, self._after_step)

    def close(self) -> None:
        """Read the peak after the last step of the run."""
        self.read()
        between = self.between
        if between is not None and between.after_step == self._after_step:
            self.between = replace(between, is_after_last=True)

    def _has_restarted(self) -> bool:
        """Begin a new peak, and return whether that is possible."""
        device_memory = self._device_memory
        return device_memory is not None and value_or_none(PEAK, _has_reset, device_memory) is True


class RunPeaks:
    """The highest memory of an epoch and of a run so far, in steps and between them."""

    def __init__(self) -> None:
        self.epoch_bytes = 0
        self.run_bytes = 0
        # Where that was.
        self.place = ""

    def begin_epoch(self) -> None:
        self.epoch_bytes = 0

    def add(self, peak_bytes: int, place: object, number: int | None = None) -> None:
        """Add a peak, in a stage and its step with this number, or in another place."""
        self.epoch_bytes = max(self.epoch_bytes, peak_bytes)
        if peak_bytes > self.run_bytes:
            self.run_bytes = peak_bytes
            self.place = str(place) if number is None else f"in {place} step {number}"


def _has_reset(device_memory: DeviceMemory) -> bool:
    device_memory.reset_peak()
    return True


def held_bytes(device_memory: DeviceMemory, batch: object, device: torch.device) -> tuple[int, int]:
    """Return the peak since its reset, and the bytes that this process holds without a batch."""
    peak_bytes, count_bytes = device_memory.peak_and_private_bytes()
    # On the host a batch may lie in memory that is shared with the workers of its loader.
    if not device_memory.is_host:
        count_bytes -= bytes_of(tensors_in(batch), device)
    return peak_bytes, count_bytes


def next_reading(step: int) -> int:
    """Return the step after ``step`` at whose start the memory in use is read.

    The gap is a 48th of the steps so far. It is one step until step 96, so a leak is found early.
    Later it grows, so each doubling of the steps has 48 * ln(2) = 33 readings, and no work with a
    fixed period falls on all of them.
    """
    return step + max(1, step // 48)
