"""Steps between two logs or two readings, and totals over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_batchmem.profile.step import DeviceReading, Step


@dataclass
class Totals:
    """Totals over steps, constant in size. A sum that no step has is 0, and its rate is None."""

    steps: int = 0
    seconds: float = 0.0
    # Amounts. Each comes with the wall seconds of the steps that have it.
    samples: int = 0
    samples_seconds: float = 0.0
    items: float = 0.0
    items_seconds: float = 0.0
    wait_seconds: float = 0.0
    waited_seconds: float = 0.0
    # The utilization of each interval counts with its time.
    busy_percent_seconds: float = 0.0
    busy_seconds: float = 0.0
    graph_steps: int = 0
    # The step with the highest peak.
    highest: Step | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    # The last batch of an epoch often has fewer samples than a full one.
    batch_size: int | None = None

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step."""
        return self.seconds / self.steps

    @property
    def samples_per_second(self) -> float | None:
        return ratio(self.samples, self.samples_seconds)

    @property
    def wait_share(self) -> float | None:
        return ratio(self.wait_seconds, self.waited_seconds)

    @property
    def busy_percent(self) -> float | None:
        return ratio(self.busy_percent_seconds, self.busy_seconds)

    def add(self, steps: Sequence[Step], reading: DeviceReading) -> None:
        """Add the steps of an interval, and the reading at its end."""
        seconds_before = self.seconds
        for step in steps:
            self._add_step(step)
        if reading.utilization is not None:
            seconds = self.seconds - seconds_before
            self.busy_percent_seconds += reading.utilization[1] * seconds
            self.busy_seconds += seconds

    def _add_step(self, step: Step) -> None:
        # Each step comes here several times, so nothing is computed that is not needed.
        seconds = step.seconds
        size = step.batch_size
        peak_bytes = step.peak_bytes
        reserved_bytes = step.peak_reserved_bytes
        self.steps += 1
        self.seconds += seconds
        if step.wait_seconds is not None:
            self.wait_seconds += step.wait_seconds
            self.waited_seconds += seconds
        if size is not None and not step.is_slowed:
            self.samples += size
            self.samples_seconds += seconds
        if step.items is not None and not step.is_slowed:
            self.items += step.items
            self.items_seconds += seconds
        if step.has_graphs:
            self.graph_steps += 1
        if peak_bytes is not None and (self.peak_bytes is None or peak_bytes > self.peak_bytes):
            self.highest = step
            self.peak_bytes = peak_bytes
        if reserved_bytes is not None:
            self.reserved_bytes = _larger(reserved_bytes, self.reserved_bytes)
        if size is not None:
            self.batch_size = _larger(size, self.batch_size)


class Interval:
    """Steps after each other, and a reading of the device at their end.

    Args:
        steps: the steps, at least one, and all of one stage.
        reading: the reading of the device, which is empty if it was not read.
    """

    def __init__(self, steps: list[Step], reading: DeviceReading) -> None:
        self.stage = steps[0].stage
        self.steps = steps
        self.reading = reading
        self.totals = Totals()
        self.totals.add(steps, reading)


def _larger(value: int, other: int | None) -> int:
    return value if other is None or value > other else other


def ratio(amount: float | None, whole: float | None, factor: float = 1.0) -> float | None:
    """Return ``factor`` times an amount over a whole; None if one is missing or the whole is 0."""
    return factor * amount / whole if amount is not None and whole else None
