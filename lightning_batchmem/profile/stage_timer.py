"""Wall time of the steps of a stage."""

from __future__ import annotations

import time


class StageTimer:
    """Wall time of each step of a stage since the end of the previous step.

    The part before the batch arrived is measured too.
    """

    # A test may set another clock.
    now = staticmethod(time.perf_counter)

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.steps = 0
        # The device set this mark at the end of the last step.
        self.mark: object = None
        self.restart()

    def restart(self) -> None:
        """Begin the first step, or the first one after a time that belongs to no step."""
        self._since = self._wait_since = self._paused = self.now()
        self._is_wait_known = True
        self._wait_seconds: float | None = None

    def pause(self) -> None:
        """Leave out the time until :meth:`resume`."""
        self._paused = self.now()

    def resume(self) -> None:
        gap = self.now() - self._paused
        self._since += gap
        self._wait_since += gap

    def forget_wait(self) -> None:
        """Make the wait of the next step unknown."""
        self._is_wait_known = False

    def start(self) -> bool:
        """Note that the batch arrived; return whether the wait for it is known.

        If the wait is not known, the step starts now.
        """
        now = self.now()
        if self._is_wait_known:
            self._wait_seconds = now - self._wait_since
            return True
        self._wait_seconds = None
        self._since = now
        return False

    def stop(self) -> tuple[float, float | None]:
        """End the step; return its seconds, and the seconds of them before the batch arrived."""
        now = self.now()
        seconds = now - self._since
        self._since = now
        self._is_wait_known = True
        self.steps += 1
        return seconds, self._wait_seconds

    def begin_wait(self) -> None:
        """Start the wait for the next batch: the callback's own work has ended."""
        self._wait_since = self.now()
