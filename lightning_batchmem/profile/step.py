"""Steps of a run, totals over them, and the intervals that takers get."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    # Bytes that this process held at the start of the step, without its batch; read in some only.
    start_bytes: int | None = None
    items: float | None = None
    # Whether one of the profiler's own measurements slowed this step.
    is_slowed: bool = False
    # Whether it is the first step of the run, or torch.compile compiled something in it.
    is_first: bool = False
    # The highest bytes between this step and the one before it; read in some only.
    before_bytes: int | None = None


class DeviceReading(NamedTuple):
    """A reading of the device between two steps; what was not read is None."""

    limit_bytes: int | None = None
    # The utilization of one of both, since the previous reading.
    gpu_percent: float | None = None
    cpu_percent: float | None = None
    # Retries of the allocator since the run began, and allocations that failed; None before the
    # first one.
    num_alloc_retries: int | None = None
    num_ooms: int | None = None

    @property
    def busy_percent(self) -> float | None:
        return self.cpu_percent if self.gpu_percent is None else self.gpu_percent


UNREAD = DeviceReading()


@dataclass(slots=True)
class Times:
    """Totals of the time of steps, constant in size.

    Each amount has the wall seconds of the steps in which it is known.
    """

    steps: int = 0
    seconds: float = 0.0
    samples: float = 0.0
    seconds_of_samples: float = 0.0
    items: float = 0.0
    seconds_of_items: float = 0.0
    # Seconds before the batch arrived.
    wait: float = 0.0
    seconds_of_wait: float = 0.0
    # Per cent times seconds.
    busy: float = 0.0
    seconds_of_busy: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step."""
        return self.seconds / self.steps

    def per_second(self, name: str, factor: float = 1.0) -> float | None:
        """Return ``factor`` times this amount of a second; None if no step has it."""
        seconds = getattr(self, f"seconds_of_{name}")
        return factor * getattr(self, name) / seconds if seconds else None

    def add(self, other: Times) -> None:
        """Add the times of later steps."""
        self.steps += other.steps
        self.seconds += other.seconds
        self.samples += other.samples
        self.seconds_of_samples += other.seconds_of_samples
        self.items += other.items
        self.seconds_of_items += other.seconds_of_items
        self.wait += other.wait
        self.seconds_of_wait += other.seconds_of_wait
        self.busy += other.busy
        self.seconds_of_busy += other.seconds_of_busy

    def add_step(self, step: Step) -> None:
        seconds = step.seconds
        self.steps += 1
        self.seconds += seconds
        if step.wait_seconds is not None:
            self.wait += step.wait_seconds
            self.seconds_of_wait += seconds
        if step.batch_size is not None and not step.is_slowed:
            self.samples += step.batch_size
            self.seconds_of_samples += seconds
        if step.items is not None and not step.is_slowed:
            self.items += step.items
            self.seconds_of_items += seconds

    def add_busy(self, percent: float) -> None:
        """Add the utilization in the time of these steps."""
        self.busy += percent * self.seconds
        self.seconds_of_busy += self.seconds


@dataclass(slots=True)
class Totals:
    """Totals over steps, constant in size."""

    # The times of most steps, and of those that take longer for a reason of their own.
    steady: Times = field(default_factory=Times)
    slowed: Times = field(default_factory=Times)
    first_seconds: float = 0.0
    graph_steps: int = 0
    # As far as batches show them.
    samples: int = 0
    # The step with the highest peak.
    highest: Step | None = None
    peak_reserved_bytes: int | None = None
    # The last batch of an epoch often has fewer samples than a full one.
    batch_size: int | None = None

    @property
    def steps(self) -> int:
        return self.steady.steps + self.slowed.steps

    @property
    def times(self) -> Times:
        """The times that means are made of."""
        return self.steady if self.steady.steps else self.slowed

    @property
    def peak_bytes(self) -> int | None:
        return None if self.highest is None else self.highest.peak_bytes

    def add(self, other: Totals) -> None:
        """Add the totals of later steps."""
        if not self.steps:
            self.first_seconds = other.first_seconds
        self.steady.add(other.steady)
        self.slowed.add(other.slowed)
        self.graph_steps += other.graph_steps
        self.samples += other.samples
        self._add_largest(other, other.highest)

    def add_steps(self, steps: Sequence[Step]) -> None:
        if not self.steps:
            self.first_seconds = steps[0].seconds
        for step in steps:
            (self.slowed if step.is_slowed or step.is_first else self.steady).add_step(step)
            self.samples += step.batch_size or 0
            # A step that replays CUDA graphs has a reserved peak only.
            self.graph_steps += step.peak_bytes is None and step.peak_reserved_bytes is not None
            self._add_largest(step, step)

    def _add_largest(self, other: Step | Totals, highest: Step | None) -> None:
        peak_bytes = other.peak_bytes
        reserved_bytes = other.peak_reserved_bytes
        batch_size = other.batch_size
        if peak_bytes is not None and (self.highest is None or peak_bytes > (self.peak_bytes or 0)):
            self.highest = highest
        if reserved_bytes is not None and reserved_bytes >= (self.peak_reserved_bytes or 0):
            self.peak_reserved_bytes = reserved_bytes
        if batch_size is not None and batch_size >= (self.batch_size or 0):
            self.batch_size = batch_size


class Interval:
    """Steps after each other, the totals over them, and the device at their end.

    Args:
        steps: the steps, at least one, and all of one stage.
        reading: the reading of the device, as in :meth:`end`.
    """

    def __init__(self, steps: list[Step], reading: DeviceReading = UNREAD) -> None:
        self.stage = steps[0].stage
        self.steps = steps
        self.totals = Totals()
        self.totals.add_steps(steps)
        self.end(reading)

    def extend(self, later: Iterable[Interval]) -> None:
        """Add the steps of the intervals that follow without a reading."""
        for interval in later:
            self.steps += interval.steps
            self.totals.add(interval.totals)

    def end(self, reading: DeviceReading) -> None:
        """Add the reading of the device after the last step; empty if it was not read."""
        self.reading = reading
        percent = reading.busy_percent
        if percent is not None:
            self.totals.steady.add_busy(percent)
            self.totals.slowed.add_busy(percent)
