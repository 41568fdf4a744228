"""What a run should be told while it runs, each thing once: what was seen, what it means, and what to do.

Pure: bytes, seconds and counts in, sentences out; whoever calls warns with them. Constant in size over any number of
steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, mib
from lightning_batchmem.report.expected import Expected
from lightning_batchmem.report.leaks import LeakDetector

_NEARLY_FULL = 0.95
"""Share of the limit; above it the next fragment or larger sample may not fit."""

_EVALUATION_ABOVE, _PREDICTION_ABOVE = 0.02, 0.05
"""By what share a peak has to be above the one that it is held against, beside the resolution of the meter."""

_WAIT_STEPS, _WAIT_SECONDS, _WAIT_SHARE, _BUSY_PERCENT = 20, 10.0, 0.5, 50.0
"""How much has to be seen before it is judged; what share of the time is much waiting, and what device is busy."""


class Alerts:
    """What a run should be told, each once.

    Args:
        resolution_bytes: what two peaks may differ by although the step needed the same; see :class:`.DeviceMemory`.
        plan: of a :class:`.BatchFinder` that chose the batch size on the same device, if there is one.
        has_peak: ``False`` where the peaks are only the highest values seen at the marks.

    Attributes:
        said: kind of alarm -> its sentence, in the order in which they were raised. The kinds: ``"allocator retries"``,
            ``"leak"``, ``"validation"``, ``"nearly full"``, ``"prediction"``, ``"data"``.
    """

    def __init__(self, *, resolution_bytes: int, plan: Plan | None = None, has_peak: bool = True) -> None:
        self.issued: dict[str, str] = {}
        self._resolution_bytes = resolution_bytes
        self._peak = "peak" if has_peak else "highest value seen"
        self._expected = None if plan is None else Expected(plan)
        self._heap_keeps = plan is not None and plan.device == "host"
        self._planned_bytes = 0 if plan is None else plan.limit_bytes
        self._most_bytes: dict[int | None, float] = {}
        self._latest_peak_bytes = 0
        self._floors = LeakDetector()
        self._retries: int | None = None
        self._waiting = _Waiting()

    def step(self, *, number: int, batch_size: int | None, peak_bytes: int) -> str | None:
        """Hold the peak of a training step against the plan.

        The first step at each size is not judged: libraries start and tune themselves in it, which takes memory that no
        later step needs (pytorch/pytorch#15872).

        Args:
            number: which batch of the training it was.
            batch_size: samples in it, on this rank; ``None`` when it is not known.
            peak_bytes: highest allocated bytes inside it.

        Returns:
            A sentence, the first time that the peak is above the plan's upper bound.
        """
        self._latest_peak_bytes = peak_bytes
        if self._expected is None or "prediction" in self.issued:
            return None
        most_bytes = self._most_bytes.get(batch_size)
        if most_bytes is None:
            upper_bytes = self._expected.upper_bytes(batch_size)
            if upper_bytes is not None:
                above_bytes = max(self._resolution_bytes, _PREDICTION_ABOVE * upper_bytes)
                self._most_bytes[batch_size] = upper_bytes + above_bytes
                if self._heap_keeps:  # what a larger batch has left there counts in the peak of a smaller one after it
                    most_bytes = max(self._most_bytes.values())
                    self._most_bytes = dict.fromkeys(self._most_bytes, most_bytes)
            return None
        if peak_bytes <= most_bytes:
            return None
        return self._warn_once(
            "prediction",
            f"The {self._peak} in step {number} ({batch_size} samples), {mib(peak_bytes)}, is above what BatchFinder's"
            f" plan allows for, {mib(most_bytes)}: training needs memory that the search did not see, and may run out"
            " of it. Look for what is larger or comes later than in the search (long samples: worst_case; work of every"
            " N-th step, layers that are unfrozen later), or search again with a lower memory_limit.",
        )

    def predicted_bytes(self, batch_size: int | None) -> int | None:
        """What the plan expects as the peak of a training step: allocated bytes of this process.

        Args:
            batch_size: samples in the step; ``None`` when it is not known.

        Returns:
            Bytes, without those of loader workers; ``None`` where there is no plan or it does not reach that far.
        """
        return None if self._expected is None else self._expected.bytes_at(batch_size)

    @property
    def next_floor(self) -> float:
        """The step from which on a floor should be read next: at most 64 are kept, and ever fewer are asked for."""
        return self._floors.due

    def floor(self, number: int, allocated_bytes: int, *, limit_bytes: int) -> str | None:
        """Take in what is in use when a training step begins, before it needs anything.

        Epochs need no new beginning: what is given back at their end is no steady rise, unless they are long.

        Args:
            number: which batch of the training it is.
            allocated_bytes: in use now (host: the resident set).
            limit_bytes: what this process may hold.

        Returns:
            A sentence, the first time that the floor has been rising steadily.
        """
        if "leak" in self.issued:
            return None
        self._floors.add(number, allocated_bytes)
        growth = self._floors.growth(self._resolution_bytes)
        if growth is None:
            return None
        self._floors.due = math.inf
        free_bytes = max(0, limit_bytes - max(allocated_bytes, self._latest_peak_bytes))
        return self._warn_once(
            "leak",
            f"What is in use when a training step begins has been rising, by {_pace(growth.bytes_per_step)}"
            f" ({mib(growth.first_bytes)} at step {growth.first_step}, {mib(growth.last_bytes)} at step"
            f" {growth.last_step}): something of every step is kept. At this pace the limit of {mib(limit_bytes)} is"
            f" reached at about step {number + round(free_bytes / growth.bytes_per_step)}, unless it is given back"
            " before, as at the end of an epoch. Keep loss.item() or loss.detach() and not the loss, no lists of"
            " outputs, no metrics with list states over so many steps, and no unbounded caches in the data set.",
        )

    def interval(
        self,
        *,
        steps: int,
        seconds: float,
        data_wait_share: float | None,
        peak_bytes: int,
        limit_bytes: int,
        counters: Mapping[str, int],
        busy_percent: float | None,
    ) -> list[str]:
        """Take in what was tallied since the last call.

        Args:
            steps: training steps.
            seconds: wall time of these, evaluation left out.
            data_wait_share: share of it that passed before the batch was there, 0 to 1; ``None`` when it is not known.
            peak_bytes: highest bytes that could not have been given back, which are the allocated ones.
            limit_bytes: what this process may hold.
            counters: running totals of the process, as :meth:`.DeviceMemory.counters` gives them. What had been counted
                by the first call is not held against the run: first steps tune, and a search may have tried.
            busy_percent: how busy the device was, 0 to 100; ``None`` when it is not known.

        Returns:
            The sentences that are due, often none.
        """
        found = [
            self._retried(steps, counters),
            self._filled(steps, peak_bytes, limit_bytes),
            self._waited(steps, seconds, data_wait_share, busy_percent),
        ]
        return [sentence for sentence in found if sentence is not None]

    def evaluation(self, *, stage: str, peak_bytes: int, train_peak_bytes: int | None) -> str | None:
        """Hold an evaluation during ``fit`` against training.

        Args:
            stage: what was run, such as ``"validate"``.
            peak_bytes: highest allocated bytes inside one of its steps.
            train_peak_bytes: highest allocated bytes inside a training step so far; ``None`` before the first.

        Returns:
            A sentence, the first time that the peak is above that of training.
        """
        if "validation" in self.issued or train_peak_bytes is None:
            return None
        if peak_bytes - train_peak_bytes <= max(self._resolution_bytes, _EVALUATION_ABOVE * train_peak_bytes):
            return None
        return self._warn_once(
            "validation",
            f"The {self._peak} in evaluation ({stage}), {mib(peak_bytes)}, is above the {mib(train_peak_bytes)} of"
            " training: its batches, or what it keeps from one to the next (metrics with list states, outputs), bound"
            " the memory. Keep less, or give its DataLoader a smaller batch_size: BatchFinder measures validation too,"
            " and with eval_batch_arg_name finds a size for it alone.",
        )

    def _retried(self, steps: int, counters: Mapping[str, int]) -> str | None:
        retries = counters.get("num_alloc_retries")
        before, self._retries = self._retries, retries
        if "allocator retries" in self.issued or retries is None or before is None or retries <= before:
            return None
        # This name works from torch 2.5.1 to 2.13 (CUDAAllocatorConfig.h of both) and on ROCm, with a notice of
        # deprecation in some releases between. The newer PYTORCH_ALLOC_CONF is not read by 2.5.1, and ignored on CUDA
        # by 2.9.1 (pytorch/pytorch#183387).
        return self._warn_once(
            "allocator retries",
            f"In {_last(steps)} the allocator found no memory, gave its cache back and asked again (num_alloc_retries"
            f" rose by {retries - before}): each time the device stands still, and the next time it may run out of"
            " memory. Take a smaller batch, or start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the"
            " environment, which helps where the memory is there but in pieces.",
        )

    def _filled(self, steps: int, peak_bytes: int, limit_bytes: int) -> str | None:
        # a plan fills the memory up to its limit on purpose, and has run its size
        if "nearly full" in self.issued or peak_bytes <= max(_NEARLY_FULL * limit_bytes, self._planned_bytes):
            return None
        return self._warn_once(
            "nearly full",
            f"The {self._peak} in {_last(steps)}, {mib(peak_bytes)}, is above {_NEARLY_FULL:.0%} of the"
            f" {mib(limit_bytes)} that this process may hold: a larger sample, or memory in pieces, can end the run."
            " Take a smaller batch, as BatchFinder(memory_limit=0.9) finds one, or recompute activations instead of"
            " keeping them (torch.utils.checkpoint).",
        )

    def _waited(self, steps: int, seconds: float, share: float | None, busy_percent: float | None) -> str | None:
        if "data" in self.issued or share is None:
            return None
        self._waiting.add(steps, seconds, share, busy_percent)
        if self._waiting.steps < _WAIT_STEPS or self._waiting.seconds < _WAIT_SECONDS:
            return None
        seen, self._waiting = self._waiting, _Waiting()
        # Steps are launched ahead of a GPU: it may be at work while its process waits.
        if seen.share <= _WAIT_SHARE or (seen.busy_percent is not None and seen.busy_percent >= _BUSY_PERCENT):
            return None
        busy = "" if seen.busy_percent is None else f", and the device was busy for {seen.busy_percent:.0f}% of it"
        return self._warn_once(
            "data",
            f"{seen.share:.0%} of the last {seen.seconds:.1f} s ({seen.steps} steps) passed between the end of a"
            f" step and its next batch{busy}: a larger batch does not help. If it is the data, give the DataLoader more"
            " num_workers with persistent_workers=True, on a GPU pin_memory=True too, and take heavy work out of the"
            " data set: do it once and store it, or do it on the device. Other callbacks, and checkpoints of weights"
            " only, count in it as well.",
        )

    def _warn_once(self, kind: str, sentence: str) -> str:
        self.issued[kind] = sentence
        return sentence


def _last(steps: int) -> str:
    return "the last step" if steps == 1 else f"the last {steps} steps"


def _pace(bytes_per_step: float) -> str:
    """The pace in a unit that shows two digits of it at least, down to ten bytes a step."""
    if bytes_per_step >= MIB / 100:
        return f"{mib(bytes_per_step)} a step"
    return f"{mib(1e3 * bytes_per_step)} in 1,000 steps"


@dataclass(slots=True)
class _Waiting:
    """The wait for data over some intervals."""

    steps: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    told_seconds: float = 0.0
    busy_seconds: float = 0.0

    def add(self, steps: int, seconds: float, share: float, busy_percent: float | None) -> None:
        self.steps += steps
        self.seconds += seconds
        self.wait_seconds += share * seconds
        if busy_percent is not None:
            self.told_seconds += seconds
            self.busy_seconds += seconds * busy_percent / 100

    @property
    def share(self) -> float:
        return self.wait_seconds / self.seconds

    @property
    def busy_percent(self) -> float | None:
        return 100 * self.busy_seconds / self.told_seconds if self.told_seconds else None
