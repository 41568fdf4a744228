"""The steps between two logs, and totals over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_batchmem.profile.step import DeviceReading, Step


@dataclass(slots=True)
class Rate:
    """An amount, and the wall seconds of the steps that have it."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self.amount += amount
        self.seconds += seconds

    def per_second(self, factor: float = 1.0) -> float | None:
        """Return ``factor`` times the amount per second; None if no step has it."""
        return factor * self.amount / self.seconds if self.seconds else None


class Totals:
    """Totals over steps, constant in size. What no step has is missing."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.graph_steps = 0
        # The step with the highest peak.
        self.highest: Step | None = None
        self.peak_bytes: int | None = None
        self.reserved_bytes: int | None = None
        # The last batch of an epoch often has fewer samples than a full one.
        self.batch_size: int | None = None
        self.phase_peak_bytes: dict[str, int] = {}
        self.samples = Rate()
        self.items = Rate()
        self.waits = Rate()
        self.busy = Rate()

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step."""
        return self.seconds / self.steps

    def add(self, steps: Sequence[Step], reading: DeviceReading) -> None:
        """Add the steps of an interval, and the reading at its end."""
        for step in steps:
            self._add_step(step)
        if reading.utilization is not None:
            # A utilization counts with the time of its interval.
            seconds = sum([step.seconds for step in steps])
            self.busy.add(reading.utilization[1] * seconds, seconds)

    def _add_step(self, step: Step) -> None:
        # Each step comes here twice, so this has few calls.
        seconds = step.seconds
        size = step.batch_size
        peak_bytes = step.peak_bytes
        reserved_bytes = step.peak_reserved_bytes
        self.steps += 1
        self.seconds += seconds
        if step.wait_seconds is not None:
            self.waits.add(step.wait_seconds, seconds)
        if size is not None and not step.is_slowed:
            self.samples.add(size, seconds)
        if step.items is not None and not step.is_slowed:
            self.items.add(step.items, seconds)
        if step.has_graphs:
            self.graph_steps += 1
        if peak_bytes is not None and peak_bytes > (self.peak_bytes or -1):
            self.highest = step
            self.peak_bytes = peak_bytes
        if reserved_bytes is not None and reserved_bytes > (self.reserved_bytes or -1):
            self.reserved_bytes = reserved_bytes
        if size is not None and size > (self.batch_size or -1):
            self.batch_size = size
        for phase, phase_bytes in step.phase_peak_bytes.items():
            if phase_bytes > self.phase_peak_bytes.get(phase, -1):
                self.phase_peak_bytes[phase] = phase_bytes


class Interval:
    """The steps since the last log, and a reading of the device at their end.

    This is what a sink takes.

    Args:
        steps: the steps, at least one, and all of one stage.
        reading: the reading of the device.
        logging_step: the loggers get the metrics under this number.
    """

    def __init__(self, steps: list[Step], reading: DeviceReading, logging_step: int) -> None:
        self.stage = steps[0].stage
        self.steps = steps
        self.reading = reading
        self.logging_step = logging_step
        self.totals = Totals()
        self.totals.add(steps, reading)
