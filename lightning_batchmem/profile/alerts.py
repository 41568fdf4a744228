"""Alerts raised during a run, each at most once: steps in, sentences out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from lightning_batchmem.plan.records import MIB, mib
from lightning_batchmem.profile.step import Step
from lightning_batchmem.profile.totals import Interval, Ratio, StepTotals

# Each has what happened, and what to do.
_SENTENCES = {
    "leak": (
        "The memory in use at the start of a training step grows by {pace} and would reach the"
        " limit of {limit} at about step {end}. Keep loss.item() or loss.detach() instead of the"
        " loss, and no outputs, list states of metrics or caches that grow."
    ),
    "nearly full": (
        "The peak, {peak}, is above 95% of the {limit} that this process may hold. Use a smaller"
        " batch, or recompute activations (torch.utils.checkpoint)."
    ),
    "data": (
        "{share:.0%} of the last {seconds:.0f} s ({steps} steps) passed before the next batch"
        " arrived, and the device was busy for {busy:.0f}% of it. Use more num_workers in the train"
        " DataLoader with persistent_workers=True, and pin_memory=True on a GPU, or move work out"
        " of the data set."
    ),
}


class Alerts:
    """The alerts of one run.

    Args:
        warn: takes each sentence once.
        granularity_bytes: peaks of equal steps may differ by this much.
        planned_bytes: a plan fills the memory up to this limit on purpose.
    """

    def __init__(
        self,
        warn: Callable[[str], object],
        *,
        granularity_bytes: int = 0,
        planned_bytes: int = 0,
    ) -> None:
        # The keys are the kinds of alerts, and the values are their sentences.
        self.issued: dict[str, str] = {}
        self._warn = warn
        self._planned_bytes = planned_bytes
        self._leaks = LeakDetector(granularity_bytes)
        self._data_wait = DataWait()

    def take(self, interval: Interval) -> None:
        """Check the training steps since the last call."""
        if interval.stage != "train":
            return
        limit_bytes = interval.reading.limit_bytes or 0
        for step in interval.steps:
            if step.start_bytes is not None:
                self._check_start(step, step.start_bytes, limit_bytes)
        totals = interval.totals
        # The live peak of steps with CUDA graphs is not known.
        peak_bytes = totals.peak_reserved_bytes if totals.graph_steps else totals.peak_bytes
        peak_bytes = peak_bytes or 0
        if limit_bytes and is_nearly_full(peak_bytes, limit_bytes, self._planned_bytes):
            self._issue("nearly full", peak=mib(peak_bytes), limit=mib(limit_bytes))
        # A device may work while its process waits, so a wait counts only with the utilization.
        utilization = interval.reading.utilization
        if utilization is not None:
            waited = self._data_wait.add(totals, utilization[1])
            if waited is not None:
                self._issue("data", **waited._asdict())

    def _check_start(self, step: Step, start_bytes: int, limit_bytes: int) -> None:
        """Compare the memory in use at the start of a step with that of the steps before it."""
        pace_bytes = self._leaks.add(step.number, start_bytes)
        if pace_bytes is None:
            return
        free_bytes = max(0, limit_bytes - max(start_bytes, step.peak_bytes or 0))
        pace = f"{mib(pace_bytes)} a step"
        if pace_bytes < MIB / 100:
            pace = f"{mib(1000 * pace_bytes)} in 1,000 steps"
        end = round(step.number + free_bytes / pace_bytes)
        self._issue("leak", pace=pace, end=end, limit=mib(limit_bytes))

    def _issue(self, kind: str, **values: object) -> None:
        if kind not in self.issued:
            self.issued[kind] = _SENTENCES[kind].format(**values)
            self._warn(self.issued[kind])


def is_nearly_full(
    peak_bytes: int, limit_bytes: int, planned_bytes: int, *, share: float = 0.95
) -> bool:
    """Whether a peak is above a share of the limit, and above what a plan fills on purpose."""
    return peak_bytes > max(share * limit_bytes, planned_bytes)


class WaitedTime(NamedTuple):
    """A time of which the device spent the larger part on waiting for data."""

    share: float
    seconds: float
    steps: int
    # The device was busy for so many per cent of the time.
    busy: float


@dataclass
class DataWait:
    """Detects that most of the time passes before the next batch arrives.

    Each check is of the steps since the previous check.

    Args:
        min_steps: fewest steps of a check.
        min_seconds: shortest time of a check.
        max_wait_share: share of the time, 0 to 1, that may pass before batches arrive.
        min_busy_percent: a device that is busy for this share of the time does not wait.
    """

    min_steps: int = 20
    min_seconds: float = 10.0
    max_wait_share: float = 0.5
    min_busy_percent: float = 50.0
    _steps: int = 0
    _wait: Ratio = field(default_factory=Ratio)
    _busy: Ratio = field(default_factory=Ratio)

    def add(self, totals: StepTotals, busy_percent: float) -> WaitedTime | None:
        """Add the steps since the last call; return their time if most of it was a wait."""
        self._steps += totals.steps
        self._wait.add(totals.data_wait.amount, totals.data_wait.per)
        self._busy.add(busy_percent * totals.seconds, totals.seconds)
        seconds = self._busy.per
        if self._steps < self.min_steps or seconds < self.min_seconds:
            return None
        waited = WaitedTime(
            self._wait.value() or 0.0, seconds, self._steps, self._busy.value() or 0.0
        )
        self._steps = 0
        self._wait = Ratio()
        self._busy = Ratio()
        if waited.share <= self.max_wait_share or waited.busy >= self.min_busy_percent:
            return None
        return waited


@dataclass
class LeakDetector:
    """Detects steady growth of the memory in use at step start.

    The last four windows of readings count. It is a leak if the lowest reading rises from window to
    window, not slower in the end (a heap that fills up slows down), and if the lowest one of the
    last window is above all readings of the second one (so that noise does not count).

    Args:
        granularity_bytes: each rise must be above this.
        readings_per_window: readings in a window.
        min_growth_bytes: smallest growth over the windows that counts.
        min_growth_share: smallest growth that counts, as a share of the first window's reading.
        min_steadiness: the last rise must be at least this share of the first one, for each step.
    """

    granularity_bytes: int
    readings_per_window: int = 16
    min_growth_bytes: int = 16 * MIB
    min_growth_share: float = 0.02
    min_steadiness: float = 0.85
    # A reading is a pair of bytes and step.
    _readings: list[tuple[int, int]] = field(default_factory=list)
    _windows: deque[list[tuple[int, int]]] = field(default_factory=lambda: deque(maxlen=4))

    def add(self, step: int, start_bytes: int) -> float | None:
        """Add a reading; return the growth in bytes per step if there is a leak."""
        self._readings.append((start_bytes, step))
        if len(self._readings) < self.readings_per_window:
            return None
        self._windows.append(self._readings)
        self._readings = []
        if len(self._windows) < 4:
            return None
        lows = [min(window) for window in self._windows]
        rises = [later[0] - low[0] for low, later in pairwise(lows)]
        paces = [(later[0] - low[0]) / (later[1] - low[1]) for low, later in pairwise(lows)]
        first_bytes = lows[0][0]
        last_bytes = lows[3][0]
        min_growth_bytes = max(self.min_growth_bytes, self.min_growth_share * first_bytes)
        if (
            min(rises) <= self.granularity_bytes
            or paces[2] < self.min_steadiness * paces[0]
            or last_bytes - first_bytes < min_growth_bytes
            or last_bytes <= max(self._windows[1])[0]
        ):
            return None
        # The first window may contain a warm-up.
        return (last_bytes - lows[1][0]) / (lows[3][1] - lows[1][1])
