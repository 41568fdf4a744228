"""What limits a run: alerts during it, each at most once, and a conclusion at its end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from lightning_batchmem.plan.records import counted, mib
from lightning_batchmem.profile.step import Step, Times, Totals

if TYPE_CHECKING:
    from lightning_batchmem.profile.summary import RunMemory, RunSpeed

STAGES = {"train": "training", "validate": "validation", "test": "test", "predict": "prediction"}
"""The words for the stages of a run."""

# Each has what happened, and what to do.
_SENTENCES = {
    "leak": (
        "The memory in use at the start of a {stage} step grows by {pace} in 1,000 steps. If"
        " this goes on, it reaches the limit of {limit} at about step {end}. Keep loss.item() or"
        " loss.detach() instead of the loss, and no outputs, list states of metrics or caches that"
        " grow. predict keeps none with return_predictions=False."
    ),
    "nearly full": (
        "The peak, {peak}, is above 95% of the limit of {limit}. Use a smaller"
        " batch, or recompute activations (torch.utils.checkpoint)."
    ),
    "failed": (
        "Allocations failed {count} in steps that went on: these batches were skipped or ran in"
        " parts, or a library took an algorithm with less memory. Use a smaller batch if they were"
        " skipped."
    ),
    "data": (
        "{share:.0%} of the last {seconds:.0f} s ({steps} steps) passed before the next batch"
        " arrived, and the device was busy for {busy:.0f}% of it. Use more num_workers in the"
        " DataLoader of the {stage} with persistent_workers=True, and pin_memory=True on a GPU, or"
        " move work out of the data set."
    ),
}
_NEARLY_FULL_SHARE = 0.95
# The alert about data and each conclusion need at least this many steps and seconds. One step is
# then at most a twentieth of them, as far as they are equal, and the utilization, which is read
# once a second, has ten readings.
_MIN_STEPS = 20
_MIN_SECONDS = 10.0
# More than this share of the time has to pass before batches arrive.
_MAX_WAIT_SHARE = 0.5
# A device that is busy for this part of the time does not wait.
_MIN_BUSY_PERCENT = 50.0
# A leak is looked for in four windows of this many readings.
_READINGS_PER_WINDOW = 16
# The smallest growth over the windows that counts, as a share of the limit: what takes more than 50
# times as long to fill the memory may be a heap that settles.
_MIN_GROWTH_SHARE = 0.02
# The last rise must be at least this share of the first one, for each step.
_MIN_STEADINESS = 0.85
# In the conclusion: a device that is busy for this part of the time hardly waits for anything.
_BUSY_PERCENT = 90.0
# A search stays below 0.95 of what a device can provide.
_MOSTLY_FULL_SHARE = 0.9


class Alerts:
    """The alerts of one run.

    Args:
        warn: takes each sentence once.
        stage: the stage of the run. A validation in a training is checked for its peak only.
        granularity_bytes: peaks of equal steps may differ by this much.
        planned_bytes: a plan fills the memory up to this limit on purpose.
        steps_in_epoch: the steps after which a training may free what it has kept.
    """

    def __init__(
        self,
        warn: Callable[[str], object],
        stage: str = "train",
        *,
        granularity_bytes: int = 0,
        planned_bytes: int = 0,
        steps_in_epoch: float = math.inf,
    ) -> None:
        # The sentence of each kind of alert.
        self.issued: dict[str, str] = {}
        self._warn = warn
        self._stage = stage
        self._planned_bytes = planned_bytes
        self._steps_in_epoch = steps_in_epoch
        self._leaks = LeakDetector(granularity_bytes)
        self._waited = Times()

    def take(self, totals: Totals) -> None:
        """Check the steps since the last call."""
        limit_bytes = totals.reading.limit_bytes or 0
        for step in totals.each:
            if limit_bytes and step.start_bytes is not None:
                self._check_growth(step, step.start_bytes, limit_bytes)
        # The live peak of steps with CUDA graphs is not known.
        peak_bytes = (totals.peak_reserved_bytes if totals.graph_steps else totals.peak_bytes) or 0
        is_nearly_full = peak_bytes > max(_NEARLY_FULL_SHARE * limit_bytes, self._planned_bytes)
        # What grows would fill the memory at a smaller size too.
        if limit_bytes and is_nearly_full and "leak" not in self.issued:
            self.issue("nearly full", peak=mib(peak_bytes), limit=mib(limit_bytes))
        if count := totals.reading.num_ooms:
            self.issue("failed", count=counted(count, "time"))
        # A device may work while its process waits, so a wait counts only with the utilization.
        if totals.reading.busy_percent is not None and totals.stage == self._stage:
            self._check_wait(totals.times)

    def _check_growth(self, step: Step, start_bytes: int, limit_bytes: int) -> None:
        """Compare the memory in use at the start of a step with the steps before it."""
        pace_bytes = self._leaks.add(step.number, start_bytes, limit_bytes)
        if pace_bytes is None:
            return
        free_bytes = max(0, limit_bytes - max(start_bytes, step.peak_bytes or 0))
        end = round(step.number + free_bytes / pace_bytes)
        # The next epoch may begin with an empty list, so growth within one matters if it fills the
        # memory there.
        first, last = self._leaks.compared
        each = self._steps_in_epoch
        if first // each == last // each and step.number // each < end // each:
            return
        self.issue("leak", pace=mib(1000 * pace_bytes), end=end, limit=mib(limit_bytes))

    def _check_wait(self, times: Times) -> None:
        """Add the steps since the last call, and check the wait once they are enough."""
        self._waited.add(times)
        waited = self._waited
        seconds = waited.seconds
        if waited.steps < _MIN_STEPS or seconds < _MIN_SECONDS:
            return
        self._waited = Times()
        share = waited.per_second("wait") or 0.0
        busy = waited.per_second("busy") or 0.0
        if share > _MAX_WAIT_SHARE and busy < _MIN_BUSY_PERCENT:
            self.issue("data", share=share, seconds=seconds, steps=waited.steps, busy=busy)

    def issue(self, kind: str, **values: object) -> None:
        """Warn of something, once."""
        if kind not in self.issued:
            self.issued[kind] = _SENTENCES[kind].format(stage=STAGES[self._stage], **values)
            self._warn(self.issued[kind])


def conclusion(speed: RunSpeed, memory: RunMemory, steps: int) -> str:
    """Return what limits a run, and what helps; empty where the numbers do not decide."""
    if steps < _MIN_STEPS or steps * speed.step_ms < 1e3 * _MIN_SECONDS:
        return ""
    busy_percent = speed.gpu_utilization_pct or speed.cpu_utilization_pct or 0.0
    is_busy = busy_percent >= _BUSY_PERCENT
    wait_percent = speed.data_wait_pct or 0.0
    is_waiting = wait_percent > 100 * _MAX_WAIT_SHARE
    # The cores of a process may be busy with the making of its batches.
    is_host = speed.cores is not None
    if is_waiting and (is_host or not is_busy):
        return (
            f"Limited by data: {wait_percent:.0f}% of the time passed before the batch"
            " arrived. More loader workers (num_workers) or cheaper samples help."
        )
    if is_busy:
        # A device may work while the process waits for data, or for another process.
        if is_waiting:
            return ""
        device = "CPU" if is_host else "GPU"
        return (
            f"Limited by compute: the {device} was {busy_percent:.0f}% busy."
            f" A lower precision, torch.compile or a faster {device} helps."
        )
    if not memory.limit_bytes:
        return ""
    share = (memory.peak_reserved_bytes or memory.peak_bytes or 0) / memory.limit_bytes
    if share < _MOSTLY_FULL_SHARE:
        return ""
    if memory.is_planned and share <= 1:
        return f"Memory is used as planned: {share:.0%} of the limit."
    return (
        f"Limited by memory: {share:.0%} of the limit. A lower"
        " precision, activation checkpointing or sharding needs less memory."
    )


class LeakDetector:
    """Detects steady growth of the memory in use at the start of a step.

    The last four windows of readings count. It is a leak if the lowest reading rises from window to
    window, not slower in the end (a heap that fills up slows down), and if the lowest one of the
    last window is above all readings of the second one (so that noise does not count).

    Args:
        granularity_bytes: each rise must be above this.
    """

    def __init__(self, granularity_bytes: int) -> None:
        self._granularity_bytes = granularity_bytes
        # A reading is a pair of bytes and step.
        self._readings: list[tuple[int, int]] = []
        self._windows: deque[list[tuple[int, int]]] = deque(maxlen=4)
        # The steps at the end of the first window of the last leak, and at the begin of its last.
        self.compared = (0, 0)

    def add(self, step: int, start_bytes: int, limit_bytes: int) -> float | None:
        """Add a reading; return the growth in bytes per step if there is a leak.

        Args:
            step: the number of the step.
            start_bytes: the memory in use at its start.
            limit_bytes: the memory that can be used.
        """
        self._readings.append((start_bytes, step))
        if len(self._readings) < _READINGS_PER_WINDOW:
            return None
        self._windows.append(self._readings)
        self._readings = []
        if len(self._windows) < 4:
            return None
        lows = [min(window) for window in self._windows]
        rises = [later[0] - low[0] for low, later in pairwise(lows)]
        paces = [(later[0] - low[0]) / (later[1] - low[1]) for low, later in pairwise(lows)]
        last_bytes = lows[3][0]
        if (
            min(rises) <= self._granularity_bytes
            or paces[2] < _MIN_STEADINESS * paces[0]
            or last_bytes - lows[0][0] < _MIN_GROWTH_SHARE * limit_bytes
            or last_bytes <= max(self._windows[1])[0]
        ):
            return None
        self.compared = (self._windows[0][-1][1], self._windows[3][0][1])
        # The first window may contain a warm-up.
        return (last_bytes - lows[1][0]) / (lows[3][1] - lows[1][1])
