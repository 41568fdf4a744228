"""Wall time of the steps of a stage."""

from __future__ import annotations

import time


class StepClock:
    """Wall time of each step of a stage, from the end of the previous step to its own end.

    The wait until the batch arrives is a part of it.
    """

    # A test may set another clock.
    now = staticmethod(time.perf_counter)

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.steps = 0
        self.restart()

    def restart(self) -> None:
        """Begin the next step now."""
        self._since = self.now()
        self._wait_since: float | None = self._since
        self._wait_seconds: float | None = None

    def begin_wait(self) -> None:
        """Start the wait for the next batch: the callback's own work has ended."""
        self._wait_since = self.now()

    def forget_wait(self) -> None:
        """Begin the next step when its batch arrives; the wait for it is unknown."""
        self._wait_since = None

    def start(self) -> None:
        """Note that the batch arrived."""
        now = self.now()
        if self._wait_since is None:
            self._wait_seconds = None
            self._since = now
        else:
            self._wait_seconds = now - self._wait_since

    def leave_out(self, seconds: float) -> None:
        """Leave out a part of the step that has begun."""
        self._since += seconds

    def stop(self) -> tuple[float, float | None]:
        """End the step; return its seconds, and the seconds of them before the batch arrived."""
        now = self.now()
        seconds = now - self._since
        self._since = now
        self.steps += 1
        return seconds, self._wait_seconds
