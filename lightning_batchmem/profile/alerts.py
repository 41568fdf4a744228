"""Alerts raised during a run, each at most once. Pure: numbers in, sentences out."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, MemoryModel, mib
from lightning_batchmem.profile.step_record import DeviceReading, StepRecord
from lightning_batchmem.profile.totals import StepTotals

# All sentences are here. Each has what happened, and what to do.
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
        " again with a lower memory_limit."
    ),
    "data": (
        "{share:.0%} of the last {seconds:.0f} s ({steps} steps) passed before the next batch"
        " arrived{busy}. Use more num_workers in the train DataLoader with persistent_workers=True,"
        " and pin_memory=True on a GPU, or move work out of the data set."
    ),
}

# CUDA allocates the same bytes for the same step. The resident set of the host varies by up to 30 %
# of its growth.
_TOLERANCE = {"device": 0.05, "host": 0.30}
# The tolerance on the host is at least this, since libraries are loaded, and loggers allocate
# memory, during training.
_HOST_TOLERANCE_BYTES = 64 * MIB
# Predictions end at this multiple of the largest batch size that was measured.
_MAX_EXTRAPOLATION = 1.5
_NEARLY_FULL = 0.95
_EVALUATION_ABOVE = 0.02
_MIN_LEAK_BYTES = 16 * MIB
_MIN_LEAK_SHARE = 0.02
_MIN_LEAK_STEADINESS = 0.85
# A window of the leak detector has this many readings of the memory at step start.
_READINGS_PER_WINDOW = 16
_WAIT_STEPS = 20
_WAIT_SECONDS = 10.0
_WAIT_SHARE = 0.5
_BUSY_PERCENT = 50.0


class Alerts:
    """The alerts of one run. Each method returns the new sentences."""

    def __init__(self, *, granularity_bytes: int, plan: Plan | None = None) -> None:
        # The keys are the kinds of alerts, and the values are their sentences.
        self.issued: dict[str, str] = {}
        self._granularity_bytes = granularity_bytes
        self._plan = plan
        self._prediction = None if plan is None else Prediction(plan, granularity_bytes)
        self._leaks = LeakDetector(granularity_bytes)
        self._retries = 0
        self._has_read_retries = False
        self._waiting = StepTotals()
        self._busy_seconds = 0.0
        self._read_seconds = 0.0

    def predicted_bytes(self, batch_size: int | None) -> int | None:
        """The plan's peak of a training step; None without a plan, or beyond its sizes."""
        return None if self._prediction is None else self._prediction.peak_bytes(batch_size)

    def step(self, step: StepRecord, limit_bytes: int | None) -> list[str]:
        """Compare a training step with the plan and with the steps before it."""
        issued = []
        peak_bytes = step.peaks.peak_bytes
        if self._prediction is not None and "prediction" not in self.issued:
            allowed_bytes = self._prediction.allowed_bytes(step.batch_size)
            if allowed_bytes is not None and peak_bytes > allowed_bytes:
                numbers = {"number": step.number, "batch_size": step.batch_size}
                issued += self._issue(
                    "prediction", peak=mib(peak_bytes), allowed=mib(allowed_bytes), **numbers
                )
        if step.start_bytes is None:
            return issued
        pace = self._leaks.add(step.number, step.start_bytes)
        if pace is not None:
            free_bytes = max(0, (limit_bytes or 0) - max(step.start_bytes, peak_bytes))
            end = round(step.number + free_bytes / pace)
            limit = mib(limit_bytes or 0)
            text = f"{mib(pace)} a step"
            if pace < MIB / 100:
                text = f"{mib(1000 * pace)} in 1,000 steps"
            issued += self._issue("leak", pace=text, end=end, limit=limit)
        return issued

    def evaluation(
        self, stage: str, peak_bytes: int | None, train_peak_bytes: int | None
    ) -> list[str]:
        """Compare an evaluation with the training around it."""
        tolerance_bytes = max(self._granularity_bytes, _EVALUATION_ABOVE * (train_peak_bytes or 0))
        if (
            peak_bytes is None
            or train_peak_bytes is None
            or peak_bytes - train_peak_bytes <= tolerance_bytes
        ):
            return []
        return self._issue(
            "validation", stage=stage, peak=mib(peak_bytes), train_peak=mib(train_peak_bytes)
        )

    def interval(self, totals: StepTotals, reading: DeviceReading, *, is_host: bool) -> list[str]:
        """Check the training steps since the last call."""
        issued = []
        if reading.alloc_retries is not None:
            retries = reading.alloc_retries - self._retries
            self._retries = reading.alloc_retries
            if retries and self._has_read_retries:
                issued += self._issue("allocator retries", retries=retries)
            # Retries before the first reading do not count, because a search may cause some.
            self._has_read_retries = True
        # A plan fills the memory up to its limit on purpose.
        planned_bytes = 0 if self._plan is None else self._plan.limit_bytes
        peak_bytes = totals.peak_bytes or 0
        limit_bytes = reading.limit_bytes
        if limit_bytes is not None and peak_bytes > max(_NEARLY_FULL * limit_bytes, planned_bytes):
            issued += self._issue("nearly full", peak=mib(peak_bytes), limit=mib(limit_bytes))
        busy_percent = None if reading.utilization is None else reading.utilization[1]
        # A GPU may work while its process waits, so there the wait counts only if the utilization
        # is known.
        if (is_host or busy_percent is not None) and totals.data_wait_share is not None:
            issued += self._add_wait(totals, busy_percent)
        return issued

    def _add_wait(self, totals: StepTotals, busy_percent: float | None) -> list[str]:
        self._waiting.merge(totals)
        if busy_percent is not None:
            self._read_seconds += totals.seconds
            self._busy_seconds += totals.seconds * busy_percent / 100
        waiting = self._waiting
        share = self._waiting.data_wait_share or 0.0
        if waiting.steps < _WAIT_STEPS or waiting.seconds < _WAIT_SECONDS:
            return []
        percent = 100 * self._busy_seconds / self._read_seconds if self._read_seconds else None
        self._waiting = StepTotals()
        self._busy_seconds = 0.0
        self._read_seconds = 0.0
        if share <= _WAIT_SHARE or (percent is not None and percent >= _BUSY_PERCENT):
            return []
        busy = "" if percent is None else f", and the device was busy for {percent:.0f}% of it"
        return self._issue(
            "data", share=share, seconds=waiting.seconds, steps=waiting.steps, busy=busy
        )

    def _issue(self, kind: str, **values: object) -> list[str]:
        if kind in self.issued:
            return []
        self.issued[kind] = _SENTENCES[kind].format(**values)
        return [self.issued[kind]]


class Prediction:
    """The peak of a training step according to a BatchFinder's plan, in allocated bytes."""

    def __init__(self, plan: Plan, granularity_bytes: int) -> None:
        lines = {} if plan.memory is None else plan.memory.lines
        training = {phase: line for phase, line in lines.items() if phase != "evaluation"}
        completed = [trial for trial in plan.trials if trial.outcome == "ok"]
        sizes = [trial.batch_size for trial in completed]
        self._is_host = plan.device == "host"
        self._granularity_bytes = granularity_bytes
        self._model = MemoryModel(training) if training and sizes else None
        # The heap of the host keeps memory of evaluation, so the line of evaluation counts too.
        self._bound = MemoryModel(lines) if self._is_host else self._model
        self._smallest = min(sizes, default=0)
        self._largest = _MAX_EXTRAPOLATION * max(sizes, default=0)
        # The lines are live bytes. On the host the profiler reads the resident set, which is
        # larger.
        beyond = (trial.needed_bytes - trial.peak_bytes for trial in completed)
        self._beyond_bytes = max(beyond, default=0) if self._is_host else 0
        self._allowed_bytes: dict[int | None, float] = {}

    def peak_bytes(self, batch_size: int | None) -> int | None:
        """The predicted peak; None if the plan does not reach this size."""
        if self._model is None or batch_size is None or batch_size > self._largest:
            return None
        return round(self._model.predict_bytes(batch_size))

    def allowed_bytes(self, batch_size: int | None) -> float | None:
        """Return the highest peak that agrees with the plan; None if there is none.

        It is the prediction plus a share of its growth from size 0. The first call for a batch size
        returns None.
        """
        if batch_size in self._allowed_bytes:
            return self._allowed_bytes[batch_size]
        if (
            batch_size is not None
            and self.peak_bytes(batch_size) is not None
            and self._bound is not None
        ):
            # Below the measured sizes the line may be too low.
            line_size = max(self._smallest, batch_size)
            peak_bytes = self._bound.predict_bytes(line_size) + self._beyond_bytes
            growth_bytes = peak_bytes - self._bound.predict_bytes(0)
            tolerance = _TOLERANCE["host" if self._is_host else "device"] * growth_bytes
            least = _HOST_TOLERANCE_BYTES if self._is_host else self._granularity_bytes
            self._allowed_bytes[batch_size] = peak_bytes + max(least, tolerance)
            # The heap of the host keeps the memory of the largest batch so far.
            if self._is_host:
                highest_bytes = max(self._allowed_bytes.values())
                self._allowed_bytes = dict.fromkeys(self._allowed_bytes, highest_bytes)
        # The first step of a size is not compared, because libraries allocate memory once in it.
        # Source: pytorch/pytorch#15872
        return None


class LeakDetector:
    """Detects steady growth of the memory in use at step start.

    The last four windows of readings count.
    It is a leak if the minimum rises from window to window, not slower in the end (a heap that
    fills up slows down), and above all readings of the second window (so that noise does not
    count).
    """

    def __init__(self, granularity_bytes: int) -> None:
        self._granularity_bytes = granularity_bytes
        self._readings: list[tuple[int, int]] = []
        self._windows: deque[list[tuple[int, int]]] = deque(maxlen=4)

    def add(self, step: int, start_bytes: int) -> float | None:
        """Add a reading; return the growth in bytes per step if there is a leak."""
        self._readings.append((start_bytes, step))
        if len(self._readings) < _READINGS_PER_WINDOW:
            return None
        self._windows.append(self._readings)
        self._readings = []
        lows = [min(window) for window in self._windows]
        rises = [(later[0] - one[0], later[1] - one[1]) for one, later in pairwise(lows)]
        if (
            len(lows) < 4
            or min(rises)[0] <= self._granularity_bytes
            or rises[2][0] / rises[2][1] < _MIN_LEAK_STEADINESS * rises[0][0] / rises[0][1]
            or lows[3][0] - lows[0][0] < max(_MIN_LEAK_BYTES, _MIN_LEAK_SHARE * lows[0][0])
            or lows[3][0] <= max(self._windows[1])[0]
        ):
            return None
        return (lows[3][0] - lows[1][0]) / (lows[3][1] - lows[1][1])
