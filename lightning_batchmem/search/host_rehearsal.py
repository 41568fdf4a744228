"""A rehearsal on the host, where a step that does not fit would end the process."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.search.meter import OverLimitError, TrialMeter
from lightning_batchmem.search.ranks import Ranks
from lightning_batchmem.search.session import Steps
from lightning_batchmem.search.steps import ConsecutiveSteps


@dataclass(eq=False)
class HostRehearsal:
    """Steps as a training will run them.

    Args:
        meter: reads the steps of the session.
        batch_size: samples in each full batch.
        limits: everything that limits the search.
        ranks: the processes that search together.
    """

    meter: TrialMeter
    batch_size: int
    limits: SearchLimits
    ranks: Ranks

    def __post_init__(self) -> None:
        self._policy = self.meter.policy
        self._reserve_share = self._policy.reserve_share
        if self.meter.live is None:
            self._reserve_share = self._policy.reserve_share_inexact
        # What lasts: the bytes before the steps, and the optimizer states once they exist.
        self._start_held_bytes = 0
        self._start_live_bytes = self.meter.start_bytes

    def run(self) -> None:
        """Run the steps, and note what they used."""
        meter = self.meter
        self._start_held_bytes = meter.held_bytes()
        self._set_most_held_bytes()
        try:
            self._steps_of_a_training()
        except OverLimitError:
            meter.reserve_bytes = int(self._reserve_share * self._grown_bytes())
            raise
        # Counting live bytes takes memory itself, so this is read before.
        saving_bytes = meter.held_bytes() + (meter.checkpoint_bytes() or 0)
        self._count_live_bytes()
        meter.reserve_bytes = self._reserve_bytes(saving_bytes)
        if meter.live is not None:
            live_bytes = max(meter.phase_peak_bytes.values()) - self._start_live_bytes
            # Holes in the heap differ between processes.
            hole_bytes = self._grown_bytes() - live_bytes
            meter.reserve_bytes += int(self._reserve_share * max(0, hole_bytes))

    def _grown_bytes(self) -> int:
        """What the step that held most has held beyond what lasts."""
        return max(self.meter.held_bytes_of_calls) - self._start_held_bytes

    def _set_most_held_bytes(self) -> None:
        """Let a step that leaves no room for the reserve be the last one."""
        if not self.limits.steps_are_collective:
            share = self._reserve_share
            most_held_bytes = self.limits.limit_bytes + share * self._start_held_bytes
            self.meter.most_held_bytes = most_held_bytes / (1 + share)

    def _count_states_as_held_before(self, start_state_bytes: int) -> None:
        """Count new optimizer states to what was held before, as they do not vary between steps."""
        new_bytes = self.meter.optimizer_state_bytes() - start_state_bytes
        # They may lie in memory that was held before, or may not be written yet.
        new_bytes = min(new_bytes, self.meter.held_bytes() - self._start_held_bytes)
        self._start_held_bytes += max(0, new_bytes)
        self._start_live_bytes += max(0, new_bytes)
        self._set_most_held_bytes()

    def _steps_of_a_training(self) -> None:
        """Run the kinds of steps that the training will run."""
        meter = self.meter
        session = meter.session
        policy = self._policy
        batch_size = self.batch_size
        primary = meter.primary
        evaluation = session.evaluation if session.training is not None else None
        smaller_size = primary.last_batch_size(batch_size)
        if evaluation is not None and session.evaluates_first:
            with self._consecutive(evaluation, batch_size) as consecutive:
                consecutive.run(policy.measured_steps)
        with self._consecutive(primary, batch_size) as consecutive:
            start_state_bytes = meter.optimizer_state_bytes()
            consecutive.warm_up(policy.warmup_steps)
            self._count_states_as_held_before(start_state_bytes)
            consecutive.run_steady(policy.host_steady_steps)
            # Ranks that step together run equally many steps, so none of them counts as slow.
            is_slow = (
                not self.limits.steps_are_collective
                and statistics.median(meter.seconds) > policy.slow_step_seconds
            )
            # Most of what a small training holds there is the interpreter and its libraries.
            # Batches of other lengths, and micro-batches, differ anyway.
            held_bytes = [held - self._start_held_bytes for held in meter.steady_held_bytes]
            if self._differ(held_bytes):
                more_steps = policy.more_steady_steps
                if is_slow:
                    more_steps = policy.more_steady_steps_slow
                consecutive.run_steady(more_steps)
            consecutive.run_others()
        measured_steps = 1 if is_slow else policy.measured_steps
        following = [(primary, smaller_size, 1), (primary, batch_size, measured_steps)]
        if evaluation is not None:
            following.insert(0, (evaluation, smaller_size, 1))
            following.insert(0, (evaluation, batch_size, measured_steps))
        for steps, size, count in following:
            with self._consecutive(steps, size) as consecutive:
                consecutive.run(count)

    def _differ(self, held_bytes: list[int]) -> bool:
        """Whether steps differ in their held bytes, on this rank or on one that steps with it."""
        difference_bytes = max(held_bytes) - min(held_bytes)
        differ = difference_bytes > self._policy.differing_share * max(held_bytes)
        # If only some of the ranks that step together ran more steps, they would wait forever.
        return any(self.ranks.exchange(differ)) if self.limits.steps_are_collective else differ

    def _count_live_bytes(self) -> None:
        for steps in (self.meter.session.training, self.meter.session.evaluation):
            if steps is not None:
                with self._consecutive(steps, self.batch_size) as consecutive:
                    consecutive.count_live_bytes()

    def _consecutive(self, steps: Steps, batch_size: int) -> ConsecutiveSteps:
        return ConsecutiveSteps(self.meter, steps, batch_size)

    def _reserve_bytes(self, saving_bytes: int) -> int:
        """Bytes to keep free for later steps or for a checkpoint, above the highest held bytes.

        Later steps vary as the steady ones did, and at least by a share of what they hold beyond
        what lasts. In one of many steps the largest block finds no free place, and the heap grows
        by it. A checkpoint is saved between two steps, so it needs only what the steps do not.
        """
        meter = self.meter
        peak_bytes = max(meter.held_bytes_of_calls)
        floor_bytes = self._reserve_share * max(0, self._grown_bytes())
        steady = meter.steady_held_bytes
        later_bytes = 0.0
        if len(steady) > 1:
            deviation_bytes = self._policy.reserve_deviations * statistics.stdev(steady)
            later_bytes = statistics.fmean(steady) + deviation_bytes - peak_bytes
            with_block_bytes = statistics.median(steady) + meter.heap_block_bytes
            floor_bytes += max(0, with_block_bytes - peak_bytes)
        return int(max(floor_bytes, later_bytes, saving_bytes - peak_bytes))
