"""Steps of a run, totals over them, and the intervals in which they are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Step(NamedTuple):
    """One step on this rank, complete at its end. What was not read is None."""

    # The number of the batch, from 0: in the training over all epochs, or in one evaluation over
    # all its loaders.
    number: int
    stage: str
    batch_size: int | None
    # The wall time begins with the request of the batch. It ends with the request of the next one,
    # or when an evaluation or a checkpoint begins. A device may work while the host goes on: there
    # only the sum over many steps is a time of steps.
    seconds: float
    # The part of the wall time before the batch arrived.
    wait_seconds: float | None
    peak_bytes: int | None
    peak_reserved_bytes: int | None = None
    # Bytes that this process held at the end of the step; read in some steps only.
    end_bytes: int | None = None
    items: float | None = None
    # Whether one of the profiler's own measurements slowed this step.
    is_slowed: bool = False
    # Whether the step replays CUDA graphs, so that only the reserved peak is known.
    has_graphs: bool = False


class DeviceReading(NamedTuple):
    """A reading of the device between two steps; what was not read is None."""

    limit_bytes: int | None = None
    # The name of the metric, and per cent since the previous reading.
    utilization: tuple[str, float] | None = None
    # Retries of the allocator since the run began.
    alloc_retries: int | None = None
    # Whether it was read at the end of an interval. Otherwise it is older.
    is_new: bool = True


@dataclass(slots=True)
class Rate:
    """An amount, and the wall seconds of the steps that have it."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, other: Rate) -> None:
        self.amount += other.amount
        self.seconds += other.seconds

    def per_second(self, factor: float = 1.0) -> float | None:
        """Return ``factor`` times the amount of a second; None if no step has an amount."""
        return factor * self.amount / self.seconds if self.seconds else None


@dataclass(slots=True)
class Totals:
    """Totals over steps, constant in size."""

    steps: int = 0
    seconds: float = 0.0
    samples: Rate = field(default_factory=Rate)
    items: Rate = field(default_factory=Rate)
    # The amount is the seconds before the batch arrived.
    wait: Rate = field(default_factory=Rate)
    # The amount is per cent times seconds.
    busy: Rate = field(default_factory=Rate)
    graph_steps: int = 0
    # The step with the highest peak.
    highest: Step | None = None
    reserved_bytes: int | None = None
    # The last batch of an epoch often has fewer samples than a full one.
    batch_size: int | None = None

    @classmethod
    def of(cls, intervals: Sequence[Interval]) -> Totals:
        """Return the totals of intervals; the device was read at the end of the last one."""
        totals = cls()
        for interval in intervals:
            totals.add(interval.totals)
        utilization = intervals[-1].reading.utilization
        if utilization is not None:
            # The utilization counts with the time since the reading before.
            totals.busy = Rate(utilization[1] * totals.seconds, totals.seconds)
        return totals

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step."""
        return self.seconds / self.steps

    @property
    def peak_bytes(self) -> int | None:
        return None if self.highest is None else self.highest.peak_bytes

    def add(self, other: Totals) -> None:
        """Add the totals of later steps."""
        self.steps += other.steps
        self.seconds += other.seconds
        self.samples.add(other.samples)
        self.items.add(other.items)
        self.wait.add(other.wait)
        self.busy.add(other.busy)
        self.graph_steps += other.graph_steps
        self.reserved_bytes = _larger(self.reserved_bytes, other.reserved_bytes)
        self.batch_size = _larger(self.batch_size, other.batch_size)
        if other.highest is not None:
            self._compare_peak(other.highest)

    def add_step(self, step: Step) -> None:
        seconds = step.seconds
        self.steps += 1
        self.seconds += seconds
        if step.wait_seconds is not None:
            self.wait.amount += step.wait_seconds
            self.wait.seconds += seconds
        if not step.is_slowed:
            if step.batch_size is not None:
                self.samples.amount += step.batch_size
                self.samples.seconds += seconds
            if step.items is not None:
                self.items.amount += step.items
                self.items.seconds += seconds
        if step.has_graphs:
            self.graph_steps += 1
        self.reserved_bytes = _larger(self.reserved_bytes, step.peak_reserved_bytes)
        self.batch_size = _larger(self.batch_size, step.batch_size)
        self._compare_peak(step)

    def _compare_peak(self, step: Step) -> None:
        peak_bytes = step.peak_bytes
        if peak_bytes is not None and (self.peak_bytes is None or peak_bytes > self.peak_bytes):
            self.highest = step


class Interval:
    """The steps since the last log, and the last reading of the device.

    Args:
        steps: the steps, at least one, and all of one stage.
        reading: the reading at their end, or an older one.
        logging_step: the step at which the loggers get the metrics.
    """

    def __init__(self, steps: list[Step], reading: DeviceReading, logging_step: int) -> None:
        self.stage = steps[0].stage
        self.steps = steps
        self.reading = reading
        self.logging_step = logging_step
        self.totals = Totals()
        for step in steps:
            self.totals.add_step(step)


class Taker:
    """Takes the steps of a run, and uses them with the next new reading of the device.

    Many steps at a time take less time.
    """

    def __init__(self) -> None:
        self._waiting: list[Interval] = []

    def take(self, interval: Interval) -> None:
        """Take the steps since the last log."""
        self._waiting.append(interval)
        if interval.reading.is_new:
            self.flush()

    def flush(self) -> None:
        """Use all that was taken: a validation begins or ends, or the run."""
        if self._waiting:
            intervals = self._waiting
            # After an error they are not used again.
            self._waiting = []
            self.use(intervals)

    def use(self, intervals: list[Interval]) -> None:
        """Use the intervals since the last call, at least one, and all of one stage."""

    def close(self) -> None:
        """Use the rest, and take no more."""
        self.flush()


class StageTotals(Taker):
    """The totals of each stage of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.by_stage: dict[str, Totals] = {}

    def use(self, intervals: list[Interval]) -> None:
        self.by_stage.setdefault(intervals[0].stage, Totals()).add(Totals.of(intervals))


def _larger(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)
