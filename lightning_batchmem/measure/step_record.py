"""The record of one step, and the timer of the steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

from lightning_batchmem.measure.phases import StepPeaks


@dataclass(slots=True)
class StepRecord:
    """The measurements of one step. The fields from ``start_bytes`` on are read in some steps only.

    Args:
        number: index of the batch, from 0: in the training over all epochs, or in one evaluation over all its loaders.
        batch_size: samples on this rank; None if the batch does not show it.
        peaks: peaks in bytes; without phases if the device has no peak counter.
        seconds: wall time since the end of the previous step, without evaluation.
        wait_seconds: part of it before the batch arrived; None if unknown.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        items: the user's count for this batch (tokens, for example) on this rank.
        marks: points in the device's work at the end of the previous step and of this one; None if wall time is exact.
        device_seconds: the device's time between the marks, once it is known.
        start_bytes: bytes of this process at the start of the step.
        limit_bytes: bytes that this process may hold.
        utilization: metric name and per cent since the previous reading.
    """

    number: int
    batch_size: int | None
    peaks: StepPeaks
    seconds: float
    wait_seconds: float | None
    stage: str = "train"
    items: float | None = None
    marks: tuple[object, object] | None = None
    device_seconds: float | None = None
    start_bytes: int | None = None
    limit_bytes: int | None = None
    utilization: tuple[str, float] | None = None


class DeviceReading(NamedTuple):
    """Readings of the device when a stage is logged."""

    limit_bytes: int | None = None
    utilization: tuple[str, float] | None = None
    alloc_retries: int | None = None


class StepTimer:
    """Wall time of each step since the end of the previous one, and the part before its batch arrived.

    The wait is unknown after a checkpoint, because no hook marks the end of writing it. The next step then starts
    when its batch arrives.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start the next step now."""
        self._since = self._wait_since = self._paused = time.perf_counter()
        self._is_wait_known = True
        self._wait_seconds: float | None = None

    def pause(self) -> None:
        """Exclude the time until :meth:`resume`."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Continue after :meth:`pause`."""
        gap = time.perf_counter() - self._paused
        self._since += gap
        self._wait_since += gap

    def forget_wait(self) -> None:
        """Make the wait of the next step unknown."""
        self._is_wait_known = False

    def start(self) -> bool:
        """Note that the batch arrived; return whether the wait for it is known. If not, the step starts now."""
        now = time.perf_counter()
        self._wait_seconds = now - self._wait_since if self._is_wait_known else None
        if not self._is_wait_known:
            self._since = now
        return self._is_wait_known

    def stop(self) -> tuple[float, float | None]:
        """End the step; return its seconds, and the seconds of them before the batch arrived."""
        now = time.perf_counter()
        seconds, self._since, self._is_wait_known = now - self._since, now, True
        return seconds, self._wait_seconds

    def leave(self) -> None:
        """Start the wait for the next batch: the callback's own work has ended."""
        self._wait_since = time.perf_counter()
