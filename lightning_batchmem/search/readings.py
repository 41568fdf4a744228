"""What the steps of a trial used, as data, and the numbers of the trial that follow from it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_batchmem.devices.peaks import StepPeaks

DIFFERING_SHARE = 0.1
"""Peaks differ if one is higher by more than this share. Less is noise of the allocator."""

# Rises that differ by at most this share are nearly the same.
_SAME_SHARE = 0.1


class CallReading(NamedTuple):
    """What one call of :meth:`.Steps.run` used, and whether an optimizer stepped in it."""

    peaks: StepPeaks
    # What the process held at most; None where live bytes were counted in a dispatch mode, which
    # takes memory itself.
    held_bytes: int | None
    seconds: float
    has_stepped: bool


class StepReading(NamedTuple):
    """What one full step used."""

    # Whether it is a training step, or in an evaluation a step of this evaluation.
    is_primary: bool
    # Samples in the batch of each call.
    batch_size: int
    # The calls that ended without an error.
    calls: tuple[CallReading, ...]
    # Whether all calls of the step ended.
    is_complete: bool
    # Whether its peaks are peaks of the trial.
    has_peaks: bool
    # Whether its times are times of the trial.
    has_times: bool
    # Whether such a step came before it, with the states of all optimizers.
    is_repeated: bool
    # How often the allocator released its cache in it.
    allocator_retries: int
    # Failed allocations that the step itself caught.
    caught_errors: int
    # Live bytes at its end; None where they cannot be counted.
    end_bytes: int | None = None


class CallSeconds(NamedTuple):
    """Seconds of the timed calls."""

    # The calls in which an optimizer stepped.
    stepping: list[float]
    others: list[float]

    @property
    def all(self) -> list[float]:
        """The seconds of all timed calls."""
        return self.stepping + self.others

    def of_optimizer_step(self, accumulate_grad_batches: int) -> float | None:
        """The median time of a full step of this many calls; None if no call was timed.

        The shortest time would favour small sizes. They have many quick steps, and one of them fits
        between two turns of another process, and a long step is always interrupted.
        """
        if not self.all:
            return None
        typical = statistics.median(self.others or self.stepping)
        optimizer_seconds = 0.0
        if self.stepping:
            # An optimizer steps in the last of the calls only.
            optimizer_seconds = max(0.0, statistics.median(self.stepping) - typical)
        return accumulate_grad_batches * typical + optimizer_seconds


def call_seconds(readings: Iterable[StepReading]) -> CallSeconds:
    """Return the seconds of the calls whose times count."""
    steps = [step for step in readings if step.has_times and step.is_complete]
    timed = [call for step in steps for call in step.calls]
    return CallSeconds(
        [call.seconds for call in timed if call.has_stepped],
        [call.seconds for call in timed if not call.has_stepped],
    )


def phase_peak_bytes(readings: Iterable[StepReading]) -> dict[str, int]:
    """Return the highest live bytes of each phase, in the steps whose peaks count."""
    highest: dict[str, int] = {}
    for step in readings:
        if not (step.has_peaks and step.is_complete):
            continue
        for call in step.calls:
            for phase, peak_bytes in call.peaks.phase_peak_bytes.items():
                highest[phase] = max(highest.get(phase, 0), peak_bytes)
    return highest


def step_peaks(readings: Iterable[StepReading]) -> list[int]:
    """Return the highest bytes of each complete step.

    The micro batches of a step differ in any case: only the later ones have gradients.
    """
    return [max(call.peaks.peak_bytes for call in one.calls) for one in readings if one.is_complete]


def differing_peaks(readings: Iterable[StepReading]) -> tuple[int, ...]:
    """Return the highest and the lowest peak of the timed steps, which have equal batches.

    Nothing is returned where they are about equal.
    """
    peaks = step_peaks(step for step in readings if step.has_times) or [0]
    highest_bytes, lowest_bytes = max(peaks), min(peaks)
    if highest_bytes <= (1 + DIFFERING_SHARE) * lowest_bytes:
        return ()
    return highest_bytes, lowest_bytes


def held_peak_bytes(readings: Iterable[StepReading]) -> int | None:
    """Return the most bytes that the process held, in warm-up too; None if they are unknown."""
    held = (call.held_bytes for step in readings for call in step.calls)
    return max((count_bytes for count_bytes in held if count_bytes is not None), default=None)


def num_full_steps(readings: Iterable[StepReading]) -> int:
    """Return how many full training steps, or steps of an evaluation by itself, were run."""
    return sum(step.is_primary and step.is_complete for step in readings)


def num_retries(readings: Iterable[StepReading]) -> int:
    """Return how often the allocator released its cache in steps that repeat.

    At the first step of another size a training may retry once an epoch, which costs next to
    nothing. A retry in steps that repeat comes again, and costs a synchronization each time.
    """
    return sum(step.allocator_retries for step in readings if step.is_repeated)


def num_caught_errors(readings: Iterable[StepReading]) -> int:
    """Return how many failed allocations were caught in steps that repeat.

    cuDNN catches some errors itself and takes a slower algorithm, which it then keeps.
    """
    return sum(step.caught_errors for step in readings if step.is_repeated)


def has_risen(readings: Sequence[StepReading]) -> bool:
    """Return whether each of these steps has ended with more live bytes than the one before."""
    ends = [one.end_bytes for one in readings if one.end_bytes is not None]
    return len(ends) > 1 and all(later > earlier for earlier, later in pairwise(ends))


def growth_bytes(readings: Sequence[StepReading]) -> int:
    """Return what each of these equal steps adds to the live bytes; 0 if not nearly the same."""
    ends = [one.end_bytes for one in readings if one.end_bytes is not None]
    rises = [later - earlier for earlier, later in pairwise(ends)]
    if len(rises) < 2 or min(rises) <= 0 or max(rises) > (1 + _SAME_SHARE) * min(rises):
        return 0
    return int(statistics.median(rises))
