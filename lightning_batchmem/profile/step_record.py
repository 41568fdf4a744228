"""The record of one step, and the readings of the device between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_batchmem.devices.peaks import StepPeaks


@dataclass(slots=True)
class StepRecord:
    """The measurements of one step on this rank.

    The fields from ``start_bytes`` on are read in some steps only.
    """

    # The batch has this number, from 0: in the training over all epochs, or in one evaluation over
    # all its loaders.
    number: int
    batch_size: int | None
    # The peaks have no phases if the device has no peak counter.
    peaks: StepPeaks
    # The wall time begins at the end of the previous step and excludes evaluation. A device may
    # work while the host goes on, so that on it only the sum over an interval is a time of steps.
    seconds: float
    # This part of the wall time passed before the batch arrived.
    wait_seconds: float | None
    stage: str = "train"
    items: float | None = None
    # This process held so many bytes at the start of the step.
    start_bytes: int | None = None
    # This is true if the memory breakdown describes the step.
    is_steady: bool = False
    # This is true if a measurement of the profiler made the step slower, as that of the modules.
    is_slowed: bool = False
    # On a device the steps of an interval have their mean time here. It is None on the host, where
    # the time of each step is exact.
    mean_seconds: float | None = None
    limit_bytes: int | None = None
    # The pair is the name of the metric, and per cent since the previous reading.
    utilization: tuple[str, float] | None = None
    # This is 1 if an OomGuard ran the batch in parts and 0 if not. It is None without an OomGuard.
    oom_splits: int | None = None


class DeviceReading(NamedTuple):
    """Readings of the device between two steps; what was not read is None."""

    limit_bytes: int | None = None
    utilization: tuple[str, float] | None = None
    # These are the retries of the allocator since the run began.
    alloc_retries: int | None = None
