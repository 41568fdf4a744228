"""A trial: real steps at one batch size, from the state in which training starts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.out_of_memory import is_out_of_memory, release_traceback
from lightning_batchmem.plan import sentences
from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Outcome, Trial, TrialKind
from lightning_batchmem.plan.sizes import accumulated_batches
from lightning_batchmem.search.compiled import forget_compiled
from lightning_batchmem.search.meter import TrialMeter, other_bytes_at_start
from lightning_batchmem.search.program import Program
from lightning_batchmem.search.ranks import CollectiveDetector, Ranks
from lightning_batchmem.search.rehearsal import rehearse
from lightning_batchmem.search.steps import MAX_WARMUP_STEPS, ConsecutiveSteps


class TrialRunner:
    """Runs trials of a program on this rank. It keeps nothing of them.

    Args:
        program: the training program.
        device: its memory.
        ranks: the processes that search together.
        policy: the numbers that steer the search.
        before_step: this function is called before each full step.
    """

    def __init__(
        self,
        program: Program,
        device: DeviceMemory,
        ranks: Ranks,
        policy: SearchPolicy,
        before_step: Callable[[], object],
    ) -> None:
        self._program = program
        self._device = device
        self._ranks = ranks
        self._policy = policy
        self._before_step = before_step
        self._other_bytes = other_bytes_at_start(program, device)

    def run(self, kind: TrialKind, batch_size: int, limits: SearchLimits) -> Trial:
        """Run a trial from the state in which training starts, under the limit.

        Errors of the user's code are raised; out of memory is an outcome.
        """
        is_collective = limits.steps_are_collective
        try:
            meter = self._restarted(batch_size)
        # The user's hooks may take memory that grows with the size.
        except Exception as error:
            if not is_out_of_memory(error) or is_collective:
                raise
            text = self._ranks.named(release_traceback(error))
            return Trial(batch_size, "out_of_memory", {}, kind, error=text)
        run = self._steps_of(kind, meter, batch_size, limits)
        limit: AbstractContextManager[object] = nullcontext()
        if not is_collective:
            limit = self._device.limit_enforced(limits.limit_bytes)
        outcome: Outcome = "ok"
        error_text = ""
        try:
            with self._watched_steps(batch_size, is_collective), limit as is_enforced:
                meter.is_limit_enforced = bool(is_enforced)
                run()
        # Out of memory has many types. Every other error is raised again.
        except Exception as error:
            if not is_out_of_memory(error) or is_collective:
                raise
            outcome = "out_of_memory"
            error_text = release_traceback(error)
        return self._trial(kind, batch_size, limits, meter, outcome, error_text)

    def calls_collectives(self, batch_size: int) -> bool:
        """Whether the user's own steps exchange data between ranks.

        Such a step ends before the exchange.
        """
        detector = CollectiveDetector()
        for steps in (self._program.training, self._program.evaluation):
            if steps is None or detector.found:
                continue
            meter = self._restarted(batch_size)
            # The progress shows the steps of trials only.
            meter.before_step = lambda: None
            try:
                alone = self._program.without_synchronization()
                with alone, detector, ConsecutiveSteps(meter, steps, batch_size) as consecutive:
                    consecutive.run(1)
            # Out of memory has many types, and the first probe reports it.
            except Exception as error:
                if not detector.found and not is_out_of_memory(error):
                    raise
                release_traceback(error)
        return detector.found

    def _is_on_any_rank(self, value: bool) -> bool:
        return any(self._ranks.exchange(value))

    def _restarted(self, batch_size: int) -> TrialMeter:
        """Go back to the state in which the stage starts."""
        forget_compiled()
        self._program.restart(batch_size)
        return TrialMeter(
            self._program, self._device, self._policy, self._other_bytes, self._before_step
        )

    @contextmanager
    def _watched_steps(self, batch_size: int, is_collective: bool) -> Iterator[None]:
        """Mark the phases of the steps in the body, which ranks take together or alone."""
        phases = self._program.phases
        phases.watch(self._program.optimizers)
        together_or_alone = self._program.without_synchronization()
        if is_collective:
            together_or_alone = self._ranks.collective_step(batch_size)
        try:
            with together_or_alone:
                yield
        finally:
            phases.unwatch()

    def _steps_of(
        self, kind: TrialKind, meter: TrialMeter, batch_size: int, limits: SearchLimits
    ) -> Callable[[], None]:
        if kind == "rehearsal" and limits.steps_are_collective:
            return partial(rehearse, meter, batch_size, self._is_on_any_rank)
        if kind == "rehearsal":
            return partial(rehearse, meter, batch_size)
        # The time of a step decides nothing where the largest size is wanted.
        is_quick = limits.options.objective == "memory"
        return partial(self._probe, meter, batch_size, is_quick=is_quick)

    def _probe(self, meter: TrialMeter, batch_size: int, *, is_quick: bool) -> None:
        """Run a few steps and measure the peak of each phase."""
        for steps in (self._program.training, self._program.evaluation):
            if steps is None:
                continue
            with ConsecutiveSteps(meter, steps, batch_size) as consecutive:
                consecutive.warm_up(self._policy.warmup_steps)
                if is_quick:
                    consecutive.run_once()
                else:
                    # The user's steps may exchange data between ranks, in later steps only.
                    consecutive.run_timed(equally_many=self._ranks.size > 1)
                consecutive.run_others()
                consecutive.measure_live_bytes()
            if steps is meter.primary:
                meter.fixed_bytes = max(0, meter.live_bytes() - meter.gradient_bytes())

    def _would_retry(self, meter: TrialMeter, limits: SearchLimits) -> bool:
        """Whether the allocator would release its cache again and again in the training."""
        if meter.caught_errors > 0:
            return True
        if meter.allocator_retries == 0:
            return False
        # Only the limit of the user is enforced in the training too, and none is in trials where
        # ranks take steps together.
        is_of_trial = limits.options.memory_limit is None and not limits.steps_are_collective
        return not (is_of_trial and limits.has_expandable_segments)

    def _trial(
        self,
        kind: TrialKind,
        batch_size: int,
        limits: SearchLimits,
        meter: TrialMeter,
        outcome: Outcome,
        error_text: str,
    ) -> Trial:
        accumulate = accumulated_batches(batch_size, limits)
        step_seconds = meter.optimizer_step_seconds(accumulate)
        samples_per_second = None
        if step_seconds:
            samples_per_second = accumulate * meter.primary.items(batch_size) / step_seconds
        phase_peak_bytes = meter.phase_peak_bytes
        held_bytes = max(meter.held_bytes_of_calls, default=None)
        live_bytes = max(phase_peak_bytes.values(), default=0)
        needed_bytes = held_bytes or live_bytes
        set_aside_bytes = 0
        if limits.is_host:
            set_aside_bytes = meter.checkpoint_bytes() + self._program.worker_bytes(batch_size)
            # A checkpoint is saved between two steps.
            lasting_bytes = meter.fixed_bytes + meter.gradient_bytes() + set_aside_bytes
            needed_bytes = max(live_bytes, lasting_bytes)
        if outcome == "ok" and kind == "rehearsal" and self._would_retry(meter, limits):
            outcome = "allocator_retry"
        # The last page of an expandable segment may exceed an enforced limit.
        elif outcome == "ok" and needed_bytes > limits.limit_bytes and not meter.is_limit_enforced:
            outcome = "over_limit"
        notes = []
        if meter.has_idle_optimizer:
            notes.append(sentences.idle_optimizer(MAX_WARMUP_STEPS))
        if meter.live is None:
            notes.append(sentences.LIVE_BYTES_NOT_COUNTED)
        return Trial(
            batch_size=batch_size,
            outcome=outcome,
            kind=kind,
            phase_peak_bytes=phase_peak_bytes,
            is_exact=meter.live is not None,
            start_bytes=meter.start_bytes,
            held_peak_bytes=held_bytes,
            needed_bytes=needed_bytes,
            set_aside_bytes=set_aside_bytes,
            fixed_bytes=meter.fixed_bytes,
            allocator_retries=meter.allocator_retries,
            largest_batch_bytes=self._program.largest_batch_bytes,
            step_seconds=statistics.median(meter.seconds) if meter.seconds else None,
            fastest_step_seconds=min(meter.seconds, default=None),
            samples_per_second=samples_per_second,
            full_steps=meter.full_steps,
            samples_run=meter.samples,
            notes=tuple(notes),
            error=self._ranks.named(error_text),
        )
