"""The memory of steps and between them: peaks, and in some steps what is held when they start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from lightning_batchmem.devices.base import DeviceMemory, MemoryStats
from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.devices.tensors import bytes_of, tensors_in
from lightning_batchmem.plan.records import mib

PEAK = "The memory of a step"

# Readings that differ by less are as good as equal. A gigabyte is added to what is held, so 2 MB
# always are: the allocator may leave 1 MiB unsplit in the block of a larger batch.
_SMALL_SHARE = 0.002


@dataclass(frozen=True)
class PeakBetweenSteps:
    """The highest memory between two steps, in a hook or a callback.

    Args:
        peak_bytes: most bytes of tensors (CPU: of the process).
        after_step: the step of the run before it; None before the first one.
    """

    peak_bytes: int
    after_step: int | None

    def __str__(self) -> str:
        if self.after_step is None:
            return "before the first step"
        return f"after step {self.after_step}"


class GrowthBetweenSteps:
    """How much more is held between steps than in the first steady one, and since when.

    Args:
        held_bytes: what is held then.
        step: the step before the first steady one.
        freed_bytes: returns the bytes of gradients that are freed now, and are held in most steps.
            They count as held.

    Attributes:
        grown_bytes: how much more the last reading had.
        text: a sentence about it; empty for hardly any.
    """

    def __init__(self, held_bytes: int, step: int, freed_bytes: Callable[[], int]) -> None:
        self._freed_bytes = freed_bytes
        self._begin_bytes = held_bytes + freed_bytes()
        # The last step before it has grown.
        self._step = step
        self.add(held_bytes, step)

    def add(self, held_bytes: int, step: int) -> None:
        """Add a reading after a step."""
        self.grown_bytes = held_bytes + self._freed_bytes() - self._begin_bytes
        if self.grown_bytes > _SMALL_SHARE * (self._begin_bytes + 1e9):
            self.text = (
                f" The memory in use has grown by {mib(self.grown_bytes)} after step {self._step}."
            )
        else:
            self._step = step
            self.text = ""


class RunPeaks:
    """The highest memory of an epoch and of a run so far, in steps and between them."""

    def __init__(self) -> None:
        self.epoch_bytes = 0
        self.run_bytes = 0
        # Where that was.
        self.place = ""
        # The highest one between two steps.
        self.between: PeakBetweenSteps | None = None

    def begin_epoch(self) -> None:
        self.epoch_bytes = 0

    def add(self, peak_bytes: int, place: object) -> None:
        """Add a peak, and where it was."""
        self.epoch_bytes = max(self.epoch_bytes, peak_bytes)
        if peak_bytes > self.run_bytes:
            self.run_bytes = peak_bytes
            self.place = str(place)

    def add_between(self, peak: PeakBetweenSteps) -> None:
        """Add a peak between two steps."""
        if self.between is None or peak.peak_bytes > self.between.peak_bytes:
            self.between = peak
        self.add(peak.peak_bytes, peak)


class StepMemory:
    """Reads the memory of the steps of a run, and between them where that may be worth it.

    Between two steps it is read after a checkpoint, an evaluation and an epoch. What is held counts
    before some steps, which become rarer. It is read there only if the peak of a step has changed
    since the last reading: what is held longer raises the peak, and a reading takes about 40 µs on
    CUDA.

    Args:
        device_memory: the memory, whose peak begins before the first step; None if it cannot be
            measured.
        device: the device of the steps.
        reads_each: whether it is read before all steps, since hooks of the user run there.
    """

    def __init__(
        self, device_memory: DeviceMemory | None, device: torch.device, *, reads_each: bool
    ) -> None:
        self.peaks = RunPeaks()
        # Since the first steady step.
        self.growth: GrowthBetweenSteps | None = None
        self._device_memory = device_memory
        self._device = device
        self._reads_each = reads_each
        # That of the last step, and the number of the last one of the run.
        self._peak: MemoryStats | None = None
        self._after_step: int | None = None
        # The peak since the last step; None where it was not read.
        self._before_bytes: int | None = None
        # Whether the peak is that since the end of the last step.
        self._is_watched = True
        # What is held without a batch, and the peak of the step before, at the last reading.
        self._held_bytes = 0
        self._peak_at_reading: MemoryStats | None = None
        # What is held is due at the start of this step of the run, the next time. The first step
        # has no gradients and states yet.
        self._next_reading = 2

    def start(self, batch: object, steps: int) -> tuple[int | None, int | None]:
        """Begin a step.

        Args:
            batch: its batch.
            steps: how many steps of the run have begun; 0 in a validation within a training.

        Returns:
            The peak since the last step, None where it was not read, and what is held without the
            batch, None where it is not due.
        """
        if self._device_memory is None:
            return None, None
        held_bytes = None
        is_due = steps >= self._next_reading
        if self._is_watched or self._reads_each or (is_due and self._peak != self._peak_at_reading):
            self.read(batch)
        elif is_due:
            self._add_growth()
        if is_due:
            self._next_reading = next_reading(steps)
            held_bytes = self._held_bytes
        before_bytes = self._before_bytes
        self._before_bytes = None
        self._is_watched = False
        if value_or_none(PEAK, _has_reset, self._device_memory) is None:
            self._device_memory = None
        return before_bytes, held_bytes

    def note_peak(self) -> None:
        """Note the highest use since the step has begun."""
        device_memory = self._device_memory
        self._peak = None if device_memory is None else value_or_none(PEAK, device_memory.peak)

    def end(self, number: int, *, is_of_run: bool) -> tuple[int | None, int | None]:
        """End a step, and return the allocated and the reserved bytes of its peak, if known.

        Args:
            number: its number.
            is_of_run: False for a validation step within a training.
        """
        if is_of_run:
            self._after_step = number
        # Another profiler may read the peak of this step after this one, so it stays.
        return (None, None) if self._peak is None else self._peak[:2]

    def leave(self) -> None:
        """Read the peak from now on at the start of the next step."""
        if self._device_memory is not None and not self._is_watched:
            self.read()
            self._is_watched = value_or_none(PEAK, _has_reset, self._device_memory) is True

    def read(self, batch: object = None) -> None:
        """Read the peak since the end of the last step, and what is held without a batch."""
        device_memory = self._device_memory
        if device_memory is None:
            return
        readings = value_or_none(PEAK, read_held, device_memory, batch, self._device)
        if readings is None:
            return
        peak_bytes, self._held_bytes = readings
        self._peak_at_reading = self._peak
        self._add_growth()
        # Without a restart it is known only where it is above the peak of the step.
        of_step = self._peak
        if self._is_watched or of_step is None or peak_bytes > of_step.allocated_bytes:
            self._before_bytes = max(peak_bytes, self._before_bytes or 0)
            self.peaks.add_between(PeakBetweenSteps(peak_bytes, self._after_step))

    @property
    def is_exact(self) -> bool:
        """Whether growth is the project's: the host keeps freed memory."""
        return self._device_memory is not None and not self._device_memory.is_host

    def _add_growth(self) -> None:
        if self.growth is not None:
            self.growth.add(self._held_bytes, self._after_step or 0)

    def begin_growth(self, batch: object, freed_bytes: Callable[[], int]) -> None:
        """Count growth from this step on, since gradients and states exist now.

        Args:
            batch: the batch of the step, which has begun.
            freed_bytes: as in :class:`GrowthBetweenSteps`.
        """
        readings = value_or_none(PEAK, read_held, self._device_memory, batch, self._device)
        if readings is not None:
            self.growth = GrowthBetweenSteps(readings[1], self._after_step or 0, freed_bytes)


def _has_reset(device_memory: DeviceMemory) -> bool:
    device_memory.reset_peak()
    return True


def read_held(device_memory: DeviceMemory, batch: object, device: torch.device) -> tuple[int, int]:
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


def peaks_of_ranks(peak_bytes: int | None) -> tuple[int, ...]:
    """Return the peaks of all ranks, in their order, without those that are unknown.

    They are exchanged on the host, so nothing waits for a device. Every rank must call this
    function.
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
