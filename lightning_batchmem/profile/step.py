"""Steps of a run, and totals over them."""

from __future__ import annotations

from collections.abc import Sequence
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


class Times:
    """Totals of the time of steps, constant in size.

    Args:
        steps: the steps.
        busy_percent: the utilization of the device in them; None if it is unknown.
    """

    def __init__(self, steps: Sequence[Step] = (), busy_percent: float | None = None) -> None:
        self.steps = len(steps)
        self.seconds = 0.0
        samples = seconds_of_samples = 0.0
        items = seconds_of_items = 0.0
        wait = seconds_of_wait = 0.0
        for step in steps:
            seconds = step.seconds
            self.seconds += seconds
            if step.wait_seconds is not None:
                wait += step.wait_seconds
                seconds_of_wait += seconds
            if step.batch_size is not None:
                samples += step.batch_size
                seconds_of_samples += seconds
            if step.items is not None:
                items += step.items
                seconds_of_items += seconds
        # Each amount, and the wall seconds of the steps in which it is known.
        self._amounts = {
            "samples": (samples, seconds_of_samples),
            "items": (items, seconds_of_items),
            # The seconds before the batch arrived.
            "wait": (wait, seconds_of_wait),
            # Per cent times seconds.
            "busy": (0.0, 0.0),
        }
        if busy_percent is not None:
            self._amounts["busy"] = (busy_percent * self.seconds, self.seconds)

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step."""
        return self.seconds / self.steps

    def per_second(self, name: str, factor: float = 1.0) -> float | None:
        """Return ``factor`` times this amount of a second; None if no step has it."""
        amount, seconds = self._amounts[name]
        return factor * amount / seconds if seconds else None

    def add(self, other: Times) -> None:
        """Add the times of later steps."""
        self.steps += other.steps
        self.seconds += other.seconds
        for name, (amount, seconds) in other._amounts.items():
            before = self._amounts[name]
            self._amounts[name] = (before[0] + amount, before[1] + seconds)


class Totals:
    """Totals over steps of one stage, which may follow each other between two readings of a device.

    Args:
        each: the steps. Those of :meth:`add` are not kept, so that a run takes constant memory.
        reading: the reading of the device after the last step; empty if it was not read.
    """

    def __init__(self, each: Sequence[Step] = (), reading: DeviceReading = UNREAD) -> None:
        self.each = each
        self.reading = reading
        self.steps = len(each)
        # Some steps take longer for a reason of their own. Means are without these, unless there
        # are no others.
        steady = [step for step in each if not (step.is_slowed or step.is_first)]
        self.is_steady = bool(steady)
        self.times = Times(steady or each, reading.busy_percent)
        self.first_seconds = 0.0
        self.graph_steps = 0
        # The step with the highest peak.
        self.highest: Step | None = None
        self.peak_reserved_bytes: int | None = None
        # The last batch of an epoch often has fewer samples than a full one.
        self.batch_size: int | None = None
        for step in each:
            # A step that replays CUDA graphs has a reserved peak only.
            self.graph_steps += step.peak_bytes is None and step.peak_reserved_bytes is not None
            self._add_largest(step, step)

    @property
    def stage(self) -> str:
        return self.each[0].stage

    @property
    def steady(self) -> Times:
        """The times of steady steps; empty without any."""
        return self.times if self.is_steady else Times()

    @property
    def peak_bytes(self) -> int | None:
        return None if self.highest is None else self.highest.peak_bytes

    def add(self, later: Totals) -> None:
        """Add the totals of later steps."""
        if not self.steps:
            self.first_seconds = later.each[0].seconds
        self.steps += later.steps
        if later.is_steady and not self.is_steady:
            self.is_steady = True
            self.times = Times()
        if later.is_steady == self.is_steady:
            self.times.add(later.times)
        self.graph_steps += later.graph_steps
        self._add_largest(later, later.highest)

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
