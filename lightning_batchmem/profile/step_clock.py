"""Wall time of the steps of a stage."""

from __future__ import annotations

import time


class StepClock:
    """Wall time of each step, from the request of its batch to that of the next batch.

    Lightning waits for the device after a step, to show and to log its metrics. This is a part of
    the step, and no wait for data.
    """

    # A test may set another clock.
    now = staticmethod(time.perf_counter)

    def __init__(self, stage: str) -> None:
        self.stage = stage
        # The steps that have begun, and the number of the first one.
        self.steps = 0
        self.first_number = 0
        self.in_step = False
        self._begin = 0.0
        self._end = 0.0
        # The end of the time, which is after the end of the step.
        self._has_end = True
        self._requested: float | None = None
        self._wait_seconds: float | None = None

    @property
    def number(self) -> int:
        """Number of the last step."""
        return self.first_number + self.steps - 1

    def request(self) -> None:
        """Note the request of a batch, which ends the step before."""
        # A training step that fetches its batches itself does so within the step.
        if not self.in_step:
            self._requested = self.now()
            self.end()

    def forget(self) -> None:
        """Forget a step that has begun without an end, and the request for its batch."""
        if self.in_step:
            self.steps -= 1
        self.in_step = False
        self._requested = None

    def end(self) -> None:
        """End the time of the step, unless it has ended."""
        if not self._has_end:
            self._end = self.now()
            self._has_end = True

    def seconds(self) -> tuple[float, float | None]:
        """Return the seconds of the last step, and those before its batch arrived."""
        self.end()
        return self._end - self._begin, self._wait_seconds

    def start(self, arrived: float) -> None:
        """Begin a step, whose batch has arrived at this time."""
        self.steps += 1
        self.in_step = True
        self._begin = arrived if self._requested is None else self._requested
        self._wait_seconds = None if self._requested is None else arrived - self._requested
        self._requested = None
        self._has_end = False

    def leave_out(self, seconds: float) -> None:
        """Leave out a part of the step that has begun."""
        self._begin += seconds
