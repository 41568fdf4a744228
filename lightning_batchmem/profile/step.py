"""The records that everything about a run is made from: a step, and a reading of the device."""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """One step on this rank, complete at its end. What was not read is None."""

    # The batch has this number, from 0: in the training over all epochs, or in one evaluation over
    # all its loaders.
    number: int
    stage: str
    batch_size: int | None
    # The wall time begins with the request of the batch. It ends with that of the next one, or when
    # an evaluation or a checkpoint begins. A device may work while the host goes on, so that on it
    # only the sum over an interval is a time of steps.
    seconds: float
    # This part of the wall time passed before the batch arrived.
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
    # The pair is the name of the metric, and per cent since the previous reading.
    utilization: tuple[str, float] | None = None
    # These are the retries of the allocator since the run began.
    alloc_retries: int | None = None
