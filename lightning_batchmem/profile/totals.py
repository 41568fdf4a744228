"""The steps between two logs, and totals over steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from lightning_batchmem.profile.step import DeviceReading, Step


@dataclass(slots=True)
class Ratio:
    """A sum, and the sum of what it is divided by; only steps where both are known count."""

    amount: float = 0.0
    per: float = 0.0

    def add(self, amount: float, per: float) -> None:
        self.amount += amount
        self.per += per

    def value(self, factor: float = 1.0) -> float | None:
        """Return ``factor`` times the quotient; None if no step counts."""
        return factor * self.amount / self.per if self.per else None


@dataclass(slots=True)
class StepTotals:
    """Totals over steps, constant in size: maxima of bytes, sums of samples and seconds."""

    steps: int = 0
    seconds: float = 0.0
    # These are the samples of a full batch: the last one of an epoch often has fewer.
    batch_size: int | None = None
    peak_bytes: int | None = None
    peak_step: int = 0
    peak_batch_size: int | None = None
    steady_peak_bytes: int = 0
    phase_peak_bytes: dict[str, int] = field(default_factory=dict)
    peak_reserved_bytes: int | None = None
    # Samples and items of this rank are divided by wall seconds.
    samples: Ratio = field(default_factory=Ratio)
    items: Ratio = field(default_factory=Ratio)
    # Seconds before the batch arrived are divided by wall seconds: the quotient is 0 to 1.
    data_wait: Ratio = field(default_factory=Ratio)
    # Per cent in which the device was busy are weighted with the seconds of their interval.
    busy: Ratio = field(default_factory=Ratio)
    # So many batches ran in parts; None without an OomGuard.
    oom_splits: int | None = None
    # So many steps replayed CUDA graphs; only their reserved peak is known.
    graph_steps: int = 0

    def add(self, interval: Interval) -> None:
        seconds_before = self.seconds
        for step in interval.steps:
            self._add_step(step)
        utilization = interval.reading.utilization
        if utilization is not None:
            seconds = self.seconds - seconds_before
            self.busy.add(utilization[1] * seconds, seconds)

    def _add_step(self, step: Step) -> None:
        seconds = step.seconds
        self.steps += 1
        self.seconds += seconds
        self.graph_steps += step.has_graphs
        peak_bytes = step.peak_bytes
        if peak_bytes is not None:
            if self.peak_bytes is None or peak_bytes > self.peak_bytes:
                self.peak_bytes = peak_bytes
                self.peak_step = step.number
                self.peak_batch_size = step.batch_size
            if step.is_steady and peak_bytes > self.steady_peak_bytes:
                self.steady_peak_bytes = peak_bytes
        for phase, phase_bytes in step.phase_peak_bytes.items():
            if phase_bytes > self.phase_peak_bytes.get(phase, -1):
                self.phase_peak_bytes[phase] = phase_bytes
        reserved_bytes = step.peak_reserved_bytes
        if reserved_bytes is not None:
            self.peak_reserved_bytes = max(self.peak_reserved_bytes or 0, reserved_bytes)
        if step.batch_size is not None:
            self.batch_size = max(self.batch_size or 0, step.batch_size)
        if step.wait_seconds is not None:
            self.data_wait.add(step.wait_seconds, seconds)
        if step.oom_splits is not None:
            self.oom_splits = (self.oom_splits or 0) + step.oom_splits
        if step.is_slowed:
            return
        if step.batch_size is not None:
            self.samples.add(step.batch_size, seconds)
        if step.items is not None:
            self.items.add(step.items, seconds)

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step."""
        return self.seconds / self.steps


@dataclass(frozen=True)
class Interval:
    """The steps of one stage since the last log, and the reading of the device at their end.

    This is what a sink takes.
    """

    stage: str
    steps: list[Step]
    reading: DeviceReading
    # The loggers get the metrics under this number.
    logging_step: int

    @cached_property
    def totals(self) -> StepTotals:
        """The totals of these steps."""
        totals = StepTotals()
        totals.add(self)
        return totals

    def mean_seconds(self) -> dict[bool, float]:
        """Return the mean seconds of the steps that a measurement slowed down, and of the others.

        The host may begin the next step before a device has ended this one, and waits for the
        device at some steps only. So the time of one step on the host does not show that of the
        device.
        """
        seconds: dict[bool, list[float]] = {}
        for step in self.steps:
            seconds.setdefault(step.is_slowed, []).append(step.seconds)
        return {is_slowed: sum(some) / len(some) for is_slowed, some in seconds.items()}
