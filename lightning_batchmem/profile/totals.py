"""The steps between two logs, and totals over steps."""

from __future__ import annotations

from lightning_batchmem.profile.step import DeviceReading, Step


class Totals:
    """Totals over steps, constant in size. What no step has is missing."""

    def __init__(self) -> None:
        # The step with the highest peak.
        self.highest: Step | None = None
        # The keys are phases, "peak", "reserved" and "batch_size", and the values the highest of
        # all steps. The last batch of an epoch often has fewer samples than a full one.
        self.maxima: dict[str, int] = {}
        # Each sum comes with the wall seconds of the steps that count in it.
        self.sums: dict[str, tuple[float, float]] = {}

    @property
    def seconds(self) -> float:
        return self.sums["steps"][1]

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step."""
        steps, seconds = self.sums["steps"]
        return seconds / steps

    def total(self, name: str) -> int:
        """Return a sum that counts steps or batches; 0 if no step counts in it."""
        return int(self.sums[name][0]) if name in self.sums else 0

    def rate(self, name: str, factor: float = 1.0) -> float | None:
        """Return ``factor`` times a sum per second; None if no step counts in it."""
        amount, seconds = self.sums.get(name, (0.0, 0.0))
        return factor * amount / seconds if seconds else None

    def add_step(self, step: Step) -> None:
        seconds = step.seconds
        self.count("steps", 1, seconds)
        if step.has_graphs:
            self.count("graph_steps", 1, seconds)
        self.count("oom_splits", step.oom_splits, seconds)
        self.count("wait_seconds", step.wait_seconds, seconds)
        if not step.is_slowed:
            self.count("samples", step.batch_size, seconds)
            self.count("items", step.items, seconds)
        if step.peak_bytes is not None and step.peak_bytes > self.maxima.get("peak", -1):
            self.highest = step
        self._raise("peak", step.peak_bytes)
        self._raise("reserved", step.peak_reserved_bytes)
        self._raise("batch_size", step.batch_size)
        for phase, phase_bytes in step.phase_peak_bytes.items():
            self._raise(phase, phase_bytes)

    def add(self, other: Totals) -> None:
        """Add the totals of later steps."""
        if other.maxima.get("peak", -1) > self.maxima.get("peak", -1):
            self.highest = other.highest
        for name, value in other.maxima.items():
            self._raise(name, value)
        for name, (amount, seconds) in other.sums.items():
            self.count(name, amount, seconds)

    def count(self, name: str, amount: float | None, seconds: float) -> None:
        """Add an amount, unless it is None, of steps with so many wall seconds."""
        if amount is not None:
            amount_before, seconds_before = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (amount_before + amount, seconds_before + seconds)

    def _raise(self, name: str, value: int | None) -> None:
        if value is not None and value > self.maxima.get(name, -1):
            self.maxima[name] = value


class Interval:
    """The steps of one stage since the last log, and a reading of the device at their end.

    This is what a sink takes.

    Args:
        stage: the stage of the steps.
        steps: the steps, at least one.
        reading: the reading of the device.
        logging_step: the loggers get the metrics under this number.
    """

    def __init__(
        self, stage: str, steps: list[Step], reading: DeviceReading, logging_step: int
    ) -> None:
        self.stage = stage
        self.steps = steps
        self.reading = reading
        self.logging_step = logging_step
        self.totals = Totals()
        for step in steps:
            self.totals.add_step(step)
        if reading.utilization is not None:
            # A utilization counts with the time of its interval.
            seconds = self.totals.seconds
            self.totals.count("busy", reading.utilization[1] * seconds, seconds)
