"""Rows on their way to the CSV: on a device that is not waited for, the time of a step is known some steps later."""

from __future__ import annotations

from collections import deque

from lightning_batchmem.devices.cuda import CudaTimer
from lightning_batchmem.measure.step_record import StepRecord
from lightning_batchmem.report.step_csv import BatchCsv


class RowQueue:
    """Writes steps in their order, each as soon as the device has told its time.

    Args:
        timer: of the device; ``None`` where the wall time of a step is its own.
        csv: where the rows go; ``None``: nowhere.
        world_size: the number of ranks.
    """

    def __init__(self, timer: CudaTimer | None, csv: BatchCsv | None, world_size: int) -> None:
        self._timer, self._csv, self._world_size = timer, csv, world_size
        self._waiting: deque[tuple[StepRecord, object, object]] = deque()

    def add(self, step: StepRecord, since: object, until: object) -> None:
        """Take in a step, and the device's marks before and after it."""
        self._waiting.append((step, since, until))

    def write(self, *, final: bool = False) -> list[StepRecord]:
        """Write what can be written, and hand it to the operating system.

        Args:
            final: whether nothing comes after it: what the device has not told by now stays the wall's.

        Returns:
            The steps that were written, with what the device says of their time.
        """
        written: list[StepRecord] = []
        while self._waiting:
            step, since, until = self._waiting[0]
            if self._timer is not None and since is not None and until is not None:
                seconds = self._timer.seconds_between(since, until)
                if seconds is None and not final:
                    break
                step = step._replace(device_seconds=seconds)
            self._waiting.popleft()
            written.append(step)
            if self._csv is not None:
                self._csv.write(step, world_size=self._world_size)
        if self._csv is not None:
            self._csv.flush()
        return written
