"""A rehearsal: steps as a training will run them, at one size and under the limit."""

from __future__ import annotations

import statistics
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from lightning_batchmem.search.ranks import Ranks
from lightning_batchmem.search.readings import TrialReadings
from lightning_batchmem.search.session import Steps
from lightning_batchmem.search.steps import (
    ConsecutiveSteps,
    OverLimitError,
    StepMeter,
)


class _Steady(NamedTuple):
    """The steady part of a rehearsal, which begins once every optimizer has state."""

    # So many calls came before it.
    first_call: int
    # The allocator's retries after its first steps, and in the steps of other kinds and sizes.
    num_retries: int


@dataclass(eq=False)
class Rehearsal:
    """Steps as a training will run them; the session is in the state in which training starts.

    Args:
        meter: reads the steps of the session.
        ranks: the processes that search together.
        batch_size: samples in each full batch.
        limit_bytes: what the process may hold.
        multiple_of: samples of which batches are a multiple, unless they end an epoch.
        readings: takes what the steps used.
        is_collective: whether ranks take every step together.
        is_slow: whether steps are repeated less often.
    """

    meter: StepMeter
    ranks: Ranks
    batch_size: int
    limit_bytes: int
    multiple_of: int
    readings: TrialReadings
    is_collective: bool
    is_slow: bool

    def __post_init__(self) -> None:
        self._device = self.meter.device
        self._policy = self.meter.policy
        self._reserve_share = self._policy.reserve_share
        if self.meter.live is None:
            self._reserve_share = self._policy.reserve_share_inexact
        # What lasts: the bytes before the steps, and the optimizer states once they exist.
        self._start_held_bytes = 0
        self._start_live_bytes = 0

    def run(self) -> None:
        """Run the steps, and write what they used to the readings."""
        readings = self.readings
        limit_bytes = self.limit_bytes
        self._start_held_bytes = self.meter.held_bytes()
        self._start_live_bytes = self.meter.live_bytes()
        limit: AbstractContextManager[bool] = nullcontext(False)
        if not self.is_collective:
            limit = self._device.limit_enforced(limit_bytes)
        self._set_most_held_bytes()
        with limit as is_enforced:
            try:
                steady = self._steps_of_a_training()
            except OverLimitError:
                # The next step might exceed the limit, which would end the process.
                readings.step_peaks.clear()
                readings.reserve_bytes = int(self._reserve_share * self._grown_bytes())
                readings.outcome = "over_limit"
                return
        if self._device.held_is_resident_set:
            # Counting live bytes takes memory itself, so this is read before.
            saving_bytes = self.meter.held_bytes() + (self.meter.checkpoint_bytes() or 0)
            self._count_live_bytes()
            readings.reserve_bytes = self._reserve_bytes(saving_bytes)
            if self.meter.live is not None:
                live_bytes = max(readings.phase_peaks().values()) - self._start_live_bytes
                # Holes in the heap differ between processes.
                hole_bytes = self._grown_bytes() - live_bytes
                readings.reserve_bytes += int(self._reserve_share * max(0, hole_bytes))
        needed_bytes = max(readings.held_bytes[steady.first_call :]) + readings.reserve_bytes
        readings.outcome = "ok"
        if steady.num_retries > 0:
            readings.outcome = "allocator_retry"
        elif not is_enforced and needed_bytes > limit_bytes:
            readings.outcome = "over_limit"

    def _grown_bytes(self) -> int:
        """What the step that held most has held beyond what lasts."""
        return max(self.readings.held_bytes) - self._start_held_bytes

    def _set_most_held_bytes(self) -> None:
        """Let a step that leaves no room for the reserve be the last one."""
        if self._device.overrun_kills and not self.is_collective:
            share = self._reserve_share
            most_held_bytes = self.limit_bytes + share * self._start_held_bytes
            self.readings.most_held_bytes = most_held_bytes / (1 + share)

    def _count_states_as_held_before(self, start_state_bytes: int) -> None:
        """Count new optimizer states to what was held before, as they do not vary between steps."""
        new_bytes = self.meter.optimizer_state_bytes() - start_state_bytes
        # They may lie in memory that was held before, or may not be written yet.
        new_bytes = min(new_bytes, self.meter.held_bytes() - self._start_held_bytes)
        self._start_held_bytes += max(0, new_bytes)
        self._start_live_bytes += max(0, new_bytes)
        self._set_most_held_bytes()

    def _steps_of_a_training(self) -> _Steady:
        """Run the kinds of steps that the training will run."""
        session = self.meter.session
        batch_size = self.batch_size
        readings = self.readings
        primary = readings.primary
        evaluation = session.evaluation if session.training is not None else None
        smaller_size = session.smaller_batch_size(batch_size)
        measured_steps = 1 if self.is_slow else self._policy.measured_steps
        if evaluation is not None and session.evaluates_first:
            with self._consecutive(evaluation, batch_size) as consecutive:
                consecutive.run(measured_steps)
        with self._consecutive(primary, batch_size) as consecutive:
            start_state_bytes = self.meter.optimizer_state_bytes()
            consecutive.warm_up(self.meter.warmup_steps)
            if self._device.held_is_resident_set:
                self._count_states_as_held_before(start_state_bytes)
            first_call = len(readings.held_bytes)
            settling_steps = self._policy.settling_steps
            held_bytes = consecutive.run_steady(settling_steps)
            retries = self._allocator_retries()
            held_bytes += consecutive.run_steady(self._policy.steady_steps - settling_steps)
            if self._device.held_is_resident_set:
                # Most of what a small training holds there is the interpreter and its libraries.
                # Batches of other lengths, and micro-batches, differ anyway.
                start_held_bytes = self._start_held_bytes
                held_bytes = [held - start_held_bytes for held in readings.steady_held_bytes]
            if self._differ(held_bytes):
                more_steps = self._policy.more_steady_steps
                if self.is_slow:
                    more_steps = self._policy.more_steady_steps_slow
                consecutive.run_steady(more_steps)
            consecutive.run_others()
        following = [(primary, smaller_size, 1), (primary, batch_size, measured_steps)]
        if evaluation is not None:
            following.insert(0, (evaluation, smaller_size, 1))
            following.insert(0, (evaluation, batch_size, measured_steps))
        # A compiled module would be compiled again for another size.
        if not (self._device.held_is_resident_set or self.meter.is_compiled):
            following += self._fragmenting_steps(evaluation, smaller_size)
        for steps, size, count in following:
            with self._consecutive(steps, size) as consecutive:
                consecutive.run(count)
        num_retries = self._allocator_retries() - retries
        return _Steady(first_call, num_retries)

    def _fragmenting_steps(
        self, evaluation: Steps | None, smaller_size: int
    ) -> list[tuple[Steps, int, int]]:
        """The kinds, sizes and numbers of steps that show how the allocator fragments.

        Activations of a smaller batch leave a part of most segments of the larger batch free. Its
        gradients lie there, so that the next step can neither use nor release them.
        """
        primary = self.readings.primary
        batch_size = self.batch_size
        shares = self._policy.smaller_batch_shares
        steps = []
        for number, share in enumerate(shares[:1] if self.is_slow else shares):
            size = batch_size
            # A module may need full batches, and then the loader makes no others.
            if smaller_size < batch_size:
                size = int(share * batch_size) // self.multiple_of * self.multiple_of
                # One sample is an error to BatchNorm.
                size = max(self.multiple_of, min(2, batch_size), size)
            steps += [(primary, size, 1), (primary, batch_size, 1)]
            if number % 2 == 1:
                # This is the end of an epoch and the beginning of the next.
                steps.append((primary, smaller_size, 1))
                if evaluation is not None:
                    steps += [(evaluation, batch_size, 1), (evaluation, smaller_size, 1)]
                steps.append((primary, batch_size, 1))
        return steps

    def _differ(self, held_bytes: list[int]) -> bool:
        """Whether steps differ in their held bytes, on this rank or on one that steps with it."""
        difference_bytes = max(held_bytes) - min(held_bytes)
        differ = difference_bytes > self._policy.differing_share * max(held_bytes)
        # If only some of the ranks that step together ran more steps, they would wait forever.
        return any(self.ranks.exchange(differ)) if self.is_collective else differ

    def _count_live_bytes(self) -> None:
        for steps in (self.meter.session.training, self.meter.session.evaluation):
            if steps is not None:
                with self._consecutive(steps, self.batch_size) as consecutive:
                    consecutive.count_live_bytes()

    def _consecutive(self, steps: Steps, batch_size: int) -> ConsecutiveSteps:
        return ConsecutiveSteps(self.meter, steps, batch_size, self.readings)

    def _allocator_retries(self) -> int:
        return self._device.counters().get("num_alloc_retries", 0)

    def _reserve_bytes(self, saving_bytes: int) -> int:
        """Bytes to keep free for later steps or for a checkpoint, above the highest held bytes.

        Later steps vary as the steady ones did, and at least by a share of what they hold beyond
        what lasts. In one of many steps the largest block finds no free place, and the heap grows
        by it. A checkpoint is saved between two steps, so it needs only what the steps do not.
        """
        readings = self.readings
        peak_bytes = max(readings.held_bytes)
        floor_bytes = self._reserve_share * max(0, self._grown_bytes())
        steady = readings.steady_held_bytes
        later_bytes = 0.0
        if len(steady) > 1:
            deviation_bytes = self._policy.reserve_deviations * statistics.stdev(steady)
            later_bytes = statistics.fmean(steady) + deviation_bytes - peak_bytes
            with_block_bytes = statistics.median(steady) + readings.heap_block_bytes
            floor_bytes += max(0, with_block_bytes - peak_bytes)
        return int(max(floor_bytes, later_bytes, saving_bytes - peak_bytes))
