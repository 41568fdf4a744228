"""Alerts raised during a run, each at most once: numbers in, sentences out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, MemoryModel, mib
from lightning_batchmem.profile.step_record import DeviceReading, StepRecord
from lightning_batchmem.profile.totals import Ratio, StepTotals

# Each has what happened, and what to do.
_SENTENCES = {
    "allocator retries": (
        "The allocator released its cache and retried {retries} times, because it found no free"
        " block. Use a smaller batch, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        " against fragmentation."
    ),
    "leak": (
        "The memory in use at the start of a training step grows by {pace} and would reach the"
        " limit of {limit} at about step {end}. Keep loss.item() or loss.detach() instead of the"
        " loss, and no outputs, list states of metrics or caches that grow."
    ),
    "validation": (
        "The peak of evaluation ({stage}), {peak}, is above the {train_peak} of training. Keep less"
        " from batch to batch, or use a smaller batch size in the {stage} DataLoader."
    ),
    "nearly full": (
        "The peak, {peak}, is above 95% of the {limit} that this process may hold. Use a smaller"
        " batch, or recompute activations (torch.utils.checkpoint)."
    ),
    "prediction": (
        "The peak in step {number} ({batch_size} samples), {peak}, is above {allowed}, the most"
        " that BatchFinder's plan predicts. Look for memory that the search could not measure"
        " (longer samples: worst_case; work in every N-th step; layers unfrozen later), or search"
        " again with a smaller max_batch_size."
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
        held_is_resident_set: whether the peaks are those of the resident set of the process.
        plan: the plan of a BatchFinder in the same run.
    """

    def __init__(
        self,
        warn: Callable[[str], object],
        *,
        granularity_bytes: int = 0,
        held_is_resident_set: bool = False,
        plan: Plan | None = None,
    ) -> None:
        # The keys are the kinds of alerts, and the values are their sentences.
        self.issued: dict[str, str] = {}
        self._warn = warn
        self._granularity_bytes = granularity_bytes
        self._prediction = None
        if plan is not None:
            self._prediction = Prediction(
                plan, granularity_bytes, held_is_resident_set=held_is_resident_set
            )
        # A plan fills the memory up to its limit on purpose.
        self._planned_bytes = 0 if plan is None else plan.limit_bytes
        self._leaks = LeakDetector(granularity_bytes)
        self._retries: int | None = None
        self._data_wait = DataWait()

    def predicted_bytes(self, batch_size: int | None) -> int | None:
        """The plan's peak of a training step; None without a plan, or beyond its sizes."""
        return None if self._prediction is None else self._prediction.peak_bytes(batch_size)

    def step(self, step: StepRecord, limit_bytes: int | None) -> None:
        """Compare a training step with the plan and with the steps before it."""
        peak_bytes = step.peaks.peak_bytes
        if self._prediction is not None and "prediction" not in self.issued:
            allowed_bytes = self._prediction.exceeded_bytes(step.batch_size, peak_bytes)
            if allowed_bytes is not None:
                self._issue(
                    "prediction",
                    number=step.number,
                    batch_size=step.batch_size,
                    peak=mib(peak_bytes),
                    allowed=mib(allowed_bytes),
                )
        if step.start_bytes is not None:
            pace_bytes = self._leaks.add(step.number, step.start_bytes)
            if pace_bytes is not None:
                limit_bytes = limit_bytes or 0
                free_bytes = max(0, limit_bytes - max(step.start_bytes, peak_bytes))
                pace = f"{mib(pace_bytes)} a step"
                if pace_bytes < MIB / 100:
                    pace = f"{mib(1000 * pace_bytes)} in 1,000 steps"
                end = round(step.number + free_bytes / pace_bytes)
                self._issue("leak", pace=pace, end=end, limit=mib(limit_bytes))

    def evaluation(self, stage: str, peak_bytes: int | None, train_peak_bytes: int | None) -> None:
        """Compare an evaluation with the training around it."""
        if (
            peak_bytes is not None
            and train_peak_bytes is not None
            and is_above_training(peak_bytes, train_peak_bytes, self._granularity_bytes)
        ):
            peak = mib(peak_bytes)
            self._issue("validation", stage=stage, peak=peak, train_peak=mib(train_peak_bytes))

    def interval(self, totals: StepTotals, reading: DeviceReading, limit_bytes: int | None) -> None:
        """Check the training steps since the last call."""
        if reading.alloc_retries is not None:
            # Retries before the first reading do not count, because the first steps place their
            # blocks once in a training.
            if self._retries is not None and reading.alloc_retries > self._retries:
                self._issue("allocator retries", retries=reading.alloc_retries - self._retries)
            self._retries = reading.alloc_retries
        peak_bytes = totals.peak_bytes or 0
        if limit_bytes is not None and is_nearly_full(peak_bytes, limit_bytes, self._planned_bytes):
            self._issue("nearly full", peak=mib(peak_bytes), limit=mib(limit_bytes))
        # A device may work while its process waits, so a wait counts only with the utilization.
        if reading.utilization is not None:
            waited = self._data_wait.add(totals, reading.utilization[1])
            if waited is not None:
                self._issue("data", **waited._asdict())

    def _issue(self, kind: str, **values: object) -> None:
        if kind not in self.issued:
            self.issued[kind] = _SENTENCES[kind].format(**values)
            self._warn(self.issued[kind])


def is_nearly_full(
    peak_bytes: int, limit_bytes: int, planned_bytes: int, *, share: float = 0.95
) -> bool:
    """Whether a peak is above a share of the limit, and above what a plan fills on purpose."""
    return peak_bytes > max(share * limit_bytes, planned_bytes)


def is_above_training(
    peak_bytes: int, train_peak_bytes: int, granularity_bytes: int, *, share: float = 0.02
) -> bool:
    """Whether the peak of an evaluation is above that of training, by more than readings vary."""
    return peak_bytes - train_peak_bytes > max(granularity_bytes, share * train_peak_bytes)


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


class Prediction:
    """The peak of a training step according to a BatchFinder's plan.

    Args:
        plan: the plan.
        granularity_bytes: peaks of equal steps may differ by this much.
        held_is_resident_set: whether the peaks to compare are those of the resident set. The lines
            of the plan are live bytes, and the resident set is larger.
        max_extrapolation: predictions end at this multiple of the largest size that was measured.
    """

    def __init__(
        self,
        plan: Plan,
        granularity_bytes: int,
        *,
        held_is_resident_set: bool,
        max_extrapolation: float = 1.5,
    ) -> None:
        lines = {} if plan.memory is None else plan.memory.lines
        training = {phase: line for phase, line in lines.items() if phase != "evaluation"}
        completed = [trial for trial in plan.trials if trial.outcome == "ok"]
        sizes = [trial.batch_size for trial in completed] if training else []
        self._smallest = min(sizes, default=0)
        # Without lines no size is compared, not even an empty batch.
        self._largest = max_extrapolation * max(sizes, default=-1)
        self._model = MemoryModel(training)
        # An allocator takes the same bytes for the same step.
        self._bound = self._model
        self._beyond_bytes = 0
        self._tolerance_share = 0.05
        self._min_tolerance_bytes = granularity_bytes
        self._keeps_largest = held_is_resident_set
        self._held_bytes: dict[int, int] | None = None
        self._allowed_bytes: dict[int, float] = {}
        if held_is_resident_set:
            self._held_bytes = {trial.batch_size: trial.held_bytes for trial in completed}
            # The heap keeps memory of evaluation.
            self._bound = MemoryModel(lines)
            beyond = (trial.needed_bytes - trial.peak_bytes for trial in completed)
            self._beyond_bytes = max(beyond, default=0)
            # The resident set varies by up to 30 % of its growth, and at least by the libraries
            # that are loaded, and what loggers allocate, during training.
            self._tolerance_share = 0.30
            self._min_tolerance_bytes = 64 * MIB

    def peak_bytes(self, batch_size: int | None) -> int | None:
        """The peak that the plan expects; None if the plan does not reach this size.

        A resident set is compared with the bytes that the search held at this size.
        """
        if self._held_bytes is not None:
            return None if batch_size is None else self._held_bytes.get(batch_size)
        if batch_size is None or batch_size > self._largest:
            return None
        return round(self._model.predict_bytes(batch_size))

    def allowed_bytes(self, batch_size: int) -> float:
        """The highest peak that agrees with the plan.

        It is the prediction plus a share of its growth from size 0.
        """
        # Below the measured sizes the line may be too low.
        line_bytes = self._bound.predict_bytes(max(self._smallest, batch_size))
        peak_bytes = line_bytes + self._beyond_bytes
        growth_bytes = peak_bytes - self._bound.predict_bytes(0)
        return peak_bytes + max(self._min_tolerance_bytes, self._tolerance_share * growth_bytes)

    def exceeded_bytes(self, batch_size: int | None, peak_bytes: int) -> float | None:
        """Return the bytes that the plan allows in a step, if its peak is above them.

        The first step of a size is not compared, because libraries allocate memory once in it.
        Source: pytorch/pytorch#15872
        """
        if batch_size is None or batch_size > self._largest:
            return None
        if batch_size in self._allowed_bytes:
            allowed_bytes = self._allowed_bytes[batch_size]
            return allowed_bytes if peak_bytes > allowed_bytes else None
        self._allowed_bytes[batch_size] = self.allowed_bytes(batch_size)
        if self._keeps_largest:
            # The heap keeps the memory of the largest batch so far.
            largest_bytes = max(self._allowed_bytes.values())
            self._allowed_bytes = dict.fromkeys(self._allowed_bytes, largest_bytes)
        return None


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
