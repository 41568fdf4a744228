"""What the steps of a trial used: peaks, held bytes and times."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_batchmem.devices.peaks import StepPeaks
from lightning_batchmem.plan.records import Outcome
from lightning_batchmem.search.session import Steps


class CallReading(NamedTuple):
    """Peaks and wall time of one call of :meth:`.Steps.run`, and whether an optimizer stepped."""

    peaks: StepPeaks
    seconds: float
    has_stepped: bool


@dataclass
class TrialReadings:
    """What the steps of one trial used. Times and full steps are those of the primary steps."""

    primary: Steps
    # Live bytes of each call whose peaks count.
    step_peaks: list[StepPeaks] = field(default_factory=list)
    # Held bytes of each call, warm-up included.
    held_bytes: list[int] = field(default_factory=list)
    # Held bytes of each steady full step with the longest samples.
    steady_held_bytes: list[int] = field(default_factory=list)
    # The largest tensor of the primary steps, besides those that last, that may lie in the heap.
    heap_block_bytes: int = 0
    # Wall time of each timed call in which an optimizer stepped, and of the other timed calls.
    stepping_seconds: list[float] = field(default_factory=list)
    other_seconds: list[float] = field(default_factory=list)
    full_steps: int = 0
    samples: int = 0
    outcome: Outcome = "out_of_memory"
    # Live bytes that last from one step to the next, without gradients.
    fixed_bytes: int = 0
    # Bytes to keep free for what a few steps cannot measure.
    reserve_bytes: int = 0
    error: str = ""
    # A step that holds more ends the trial.
    most_held_bytes: float = math.inf

    @property
    def seconds(self) -> list[float]:
        """Wall time of each timed call."""
        return self.stepping_seconds + self.other_seconds

    def optimizer_step_seconds(self, accumulate_grad_batches: int) -> float | None:
        """The shortest time of a full step of so many calls; None if no call was timed."""
        if not self.seconds:
            return None
        shortest = min(self.other_seconds or self.stepping_seconds)
        optimizer_seconds = 0.0
        if self.stepping_seconds:
            # An optimizer steps in the last of the calls only.
            optimizer_seconds = max(0.0, min(self.stepping_seconds) - shortest)
        return accumulate_grad_batches * shortest + optimizer_seconds

    def phase_peaks(self) -> dict[str, int]:
        """The highest live bytes of each phase."""
        highest: dict[str, int] = {}
        for step in self.step_peaks:
            for phase, peak_bytes in step.phase_peak_bytes.items():
                highest[phase] = max(highest.get(phase, 0), peak_bytes)
        return highest
