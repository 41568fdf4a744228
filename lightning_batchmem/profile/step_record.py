"""The record of one step, the timer of the steps, and totals over steps and of ranks."""

from __future__ import annotations

import time
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
    # The wall time begins at the end of the previous step and excludes evaluation.
    seconds: float
    # This part of the wall time passed before the batch arrived.
    wait_seconds: float | None
    stage: str = "train"
    items: float | None = None
    # The device set these marks at the step's start and end. They are None if wall time is exact.
    marks: tuple[object, object] | None = None
    # This process held so many bytes at the start of the step.
    start_bytes: int | None = None
    # This is true if the memory breakdown describes the step.
    is_steady: bool = False
    # The device took this time between the marks. It is None until it is known.
    device_seconds: float | None = None
    limit_bytes: int | None = None
    # The pair is the name of the metric, and per cent since the previous reading.
    utilization: tuple[str, float] | None = None


class DeviceReading(NamedTuple):
    """Readings of the device when a stage is logged."""

    limit_bytes: int | None = None
    utilization: tuple[str, float] | None = None
    alloc_retries: int | None = None


class StageTimer:
    """Wall time of each step of a stage since the end of the previous step.

    The part before the batch arrived is measured too.
    """

    def __init__(self, stage: str, steps: int = 0) -> None:
        self.stage = stage
        self.steps = steps
        # The device set this mark at the end of the last step.
        self.mark: object = None
        self.restart()

    def restart(self) -> None:
        self._since = self._wait_since = self._paused = time.perf_counter()
        self._is_wait_known = True
        self._wait_seconds: float | None = None

    def pause(self) -> None:
        self._paused = time.perf_counter()

    def resume(self) -> None:
        gap = time.perf_counter() - self._paused
        self._since += gap
        self._wait_since += gap

    def forget_wait(self) -> None:
        """Make the wait of the next step unknown: no hook marks the end of writing a checkpoint."""
        self._is_wait_known = False

    def start(self) -> bool:
        """Note that the batch arrived; return whether the wait for it is known.

        If the wait is not known, the step starts now.
        """
        now = time.perf_counter()
        self._wait_seconds = now - self._wait_since if self._is_wait_known else None
        if not self._is_wait_known:
            self._since = now
        return self._is_wait_known

    def stop(self) -> tuple[float, float | None]:
        """End the step; return its seconds, and the seconds of them before the batch arrived."""
        now = time.perf_counter()
        seconds = now - self._since
        self._since = now
        self._is_wait_known = True
        self.steps += 1
        return seconds, self._wait_seconds

    def leave(self) -> None:
        """Start the wait for the next batch: the callback's own work has ended."""
        self._wait_since = time.perf_counter()
