"""A trial: real steps at one batch size, from the state in which training starts."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace

from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.devices.out_of_memory import is_out_of_memory, release_traceback
from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.objectives import objective_of
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Outcome, Trial, TrialKind, TrialMemory
from lightning_batchmem.plan.sizes import accumulated_batches, size_range
from lightning_batchmem.search.compiled import forget_compiled
from lightning_batchmem.search.limits import RAGGED_SHARE
from lightning_batchmem.search.meter import TrialMeter, other_bytes_at_start, sample_bytes
from lightning_batchmem.search.program import Program
from lightning_batchmem.search.ranks import CollectiveDetector, Ranks
from lightning_batchmem.search.readings import (
    StepReading,
    call_seconds,
    differing_peaks,
    held_peak_bytes,
    num_caught_errors,
    num_full_steps,
    num_retries,
    phase_peak_bytes,
)
from lightning_batchmem.search.rehearsal import rehearse
from lightning_batchmem.search.steps import ConsecutiveSteps

COMPARED_STEPS = 5
"""Steps of each of two sizes whose throughputs are compared. A single step is wrong by 35 %."""

LIVE_BYTES_NOT_COUNTED = (
    "The tensors could not be counted, so the memory of the whole process was measured instead."
)


class TrialRunner:
    """Runs trials of a program on this rank. It keeps nothing of them.

    Args:
        program: the training program.
        device: its memory.
        ranks: the processes that search together.
        policy: the numbers that steer the search.
        before_step: this function is called before each full step.

    Attributes:
        program: the same.
    """

    def __init__(
        self,
        program: Program,
        device: DeviceMemory,
        ranks: Ranks,
        policy: SearchPolicy,
        before_step: Callable[[], object],
    ) -> None:
        self.program = program
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
        limit = ExitStack()
        before_step = self._before_step
        if kind == "rehearsal" and limits.fragmented_bytes and not is_collective:
            before_step = functools.partial(
                self._before_ragged_step, limit, limits, self._num_retries()
            )
        try:
            meter = self._restarted(batch_size, before_step)
        # The user's hooks may take memory that grows with the size.
        except Exception as error:
            if not is_out_of_memory(error) or is_collective:
                raise
            text = self._ranks.named(release_traceback(error))
            return Trial(batch_size, "out_of_memory", TrialMemory(), kind, error=text)
        is_limit_enforced = False
        outcome: Outcome = "ok"
        failed_phase = ""
        error_text = ""
        try:
            with self._watched_steps(batch_size, is_collective), limit:
                if not is_collective:
                    enforced = self._device.limit_enforced(limits.limit_bytes)
                    is_limit_enforced = limit.enter_context(enforced)
                if kind == "rehearsal":
                    on_any_rank = self._is_on_any_rank if is_collective else bool
                    rehearse(
                        meter,
                        self._policy,
                        batch_size,
                        on_any_rank,
                        is_fragmented=limits.fragmented_bytes > 0,
                    )
                else:
                    self._probe(meter, batch_size, limits)
        # Out of memory has many types. Every other error is raised again.
        except Exception as error:
            if not is_out_of_memory(error) or is_collective:
                raise
            outcome = "out_of_memory"
            if self.program.training is not None:
                failed_phase = self.program.phases.phase or ""
            error_text = self._ranks.named(release_traceback(error))
        trial = self._measured(kind, batch_size, limits, meter)
        if outcome == "ok":
            outcome = _outcome(trial, limits, meter.readings, is_limit_enforced=is_limit_enforced)
        return replace(trial, outcome=outcome, failed_phase=failed_phase, error=error_text)

    def samples_per_s(
        self, batch_size: int, accumulate_grad_batches: int, limits: SearchLimits
    ) -> float | None:
        """The throughput of this rank in a few steps of a size that fits.

        It is ``None`` where memory runs out all the same. A median of five steps is wrong by 11 %
        at most in nine of ten cases, and a single step by 35 %.
        """
        meter = self._restarted(batch_size, self._before_step)
        is_collective = limits.steps_are_collective
        limit: AbstractContextManager[object] = nullcontext()
        if not is_collective:
            limit = self._device.limit_enforced(limits.limit_bytes)
        steps = self.program.primary
        try:
            with (
                self._watched_steps(batch_size, is_collective),
                limit,
                ConsecutiveSteps(meter, steps, batch_size) as consecutive,
            ):
                consecutive.warm_up(self._policy.steps.warmup_steps)
                consecutive.run_timed(COMPARED_STEPS, 0.0)
        # Out of memory has many types. Every other error is raised again.
        except Exception as error:
            if not is_out_of_memory(error) or is_collective:
                raise
            release_traceback(error)
            return None
        seconds = call_seconds(meter.readings).of_optimizer_step(accumulate_grad_batches)
        return accumulate_grad_batches * steps.items(batch_size) / seconds if seconds else None

    def losses_of_copies(self, batch_sizes: Sequence[int]) -> list[float | None]:
        """The losses of the first step on copies of one sample, in batches of these sizes.

        A step on copies may be an error of the user's code, and its loss is not known then.
        """
        measure = self.program.loss_of_copies
        return [value_or_none("The loss of copies of a sample", measure, n) for n in batch_sizes]

    def calls_collectives(self, batch_size: int) -> bool:
        """Whether the user's own steps exchange data between ranks.

        Such a step ends before the exchange.
        """
        detector = CollectiveDetector()
        for steps in (self.program.training, self.program.evaluation):
            if steps is None or detector.found:
                continue
            # The progress shows the steps of trials only.
            meter = self._restarted(batch_size, before_step=lambda: None)
            try:
                alone = self.program.without_synchronization()
                with alone, detector:
                    for _ in range(2):
                        # A hook comes before the first step of a second epoch.
                        with ConsecutiveSteps(meter, steps, batch_size) as consecutive:
                            consecutive.run(1)
            # Out of memory has many types, and the first probe reports it.
            except Exception as error:
                if not detector.found and not is_out_of_memory(error):
                    raise
                release_traceback(error)
        return detector.found

    def _before_ragged_step(
        self, limit: ExitStack, limits: SearchLimits, retries_before: int
    ) -> None:
        """Leave a share of the room free once the allocator has released its cache in a trial."""
        self._before_step()
        if self._num_retries() > retries_before:
            # In the steps after the first of these, the limit is this low already.
            lower_bytes = limits.limit_bytes - limits.fragmented_bytes
            limit.enter_context(self._device.limit_enforced(lower_bytes))

    def _num_retries(self) -> int:
        return self._device.counters().get("num_alloc_retries", 0)

    def _is_on_any_rank(self, value: bool) -> bool:
        return any(self._ranks.exchange(value))

    def _restarted(self, batch_size: int, before_step: Callable[[], object]) -> TrialMeter:
        """Go back to the state in which the stage starts."""
        forget_compiled()
        self.program.restart(batch_size)
        return TrialMeter(self.program, self._device, self._other_bytes, before_step)

    @contextmanager
    def _watched_steps(self, batch_size: int, is_collective: bool) -> Iterator[None]:
        """Mark the phases of the steps in the body, which ranks take together or alone."""
        phases = self.program.phases
        phases.watch(self.program.optimizers)
        together_or_alone = self.program.without_synchronization()
        if is_collective:
            together_or_alone = self._ranks.collective_step(batch_size)
        try:
            with together_or_alone:
                yield
        finally:
            phases.unwatch()

    def _probe(self, meter: TrialMeter, batch_size: int, limits: SearchLimits) -> None:
        """Run a few steps and measure the peak of each phase."""
        policy = self._policy
        times_count = objective_of(limits.options).needs_times
        num_timed = policy.steps.timed_steps if times_count else 1
        # The user's steps may exchange data between ranks, in later steps only.
        seconds = policy.steps.timed_seconds if times_count and self._ranks.size == 1 else 0.0
        for steps in (self.program.training, self.program.evaluation):
            if steps is None:
                continue
            with ConsecutiveSteps(meter, steps, batch_size) as consecutive:
                consecutive.warm_up(policy.steps.warmup_steps)
                consecutive.run_timed(num_timed, seconds)
                consecutive.run_others()
                consecutive.measure_live_bytes()
            if steps is self.program.primary:
                meter.read_fixed_bytes()

    def _measured(
        self, kind: TrialKind, batch_size: int, limits: SearchLimits, meter: TrialMeter
    ) -> Trial:
        """What the steps used, also those before an error."""
        readings = meter.readings
        accumulate = accumulated_batches(batch_size, limits)
        seconds = call_seconds(readings)
        step_seconds = seconds.of_optimizer_step(accumulate)
        samples_per_s = None
        if step_seconds:
            samples_per_s = accumulate * self.program.primary.items(batch_size) / step_seconds
        peaks = phase_peak_bytes(readings)
        held_bytes = held_peak_bytes(readings)
        live_bytes = max(peaks.values(), default=0)
        needed_bytes = held_bytes or live_bytes
        set_aside_bytes = 0
        if limits.is_host:
            set_aside_bytes = meter.checkpoint_bytes() + self.program.worker_bytes(batch_size)
            # A checkpoint is saved between two steps.
            lasting_bytes = meter.fixed_bytes + meter.gradient_bytes() + set_aside_bytes
            needed_bytes = max(live_bytes, lasting_bytes)
        differing_bytes: tuple[int, ...] = ()
        # Ragged batches have a lower limit already, and what grows has a sentence of its own.
        if not (limits.is_host or limits.fragmented_bytes or meter.growth):
            differing_bytes = differing_peaks(readings)
        # Where ranks take steps together, more stays free in any case.
        if differing_bytes and limits.catches_errors:
            # A later step may need more, and each one leaves other blocks in the cache.
            changing_bytes = live_bytes - meter.fixed_bytes
            needed_bytes = max(needed_bytes, meter.fixed_bytes + int(changing_bytes / RAGGED_SHARE))
        notes = []
        if meter.has_idle_optimizer:
            text = (
                "An optimizer did not step in the first steps, so its state is not part of the"
                " measured memory. Set a smaller max_batch_size to leave room for it."
            )
            notes.append(Note("risk", text))
        if meter.live is None:
            notes.append(Note("search", LIVE_BYTES_NOT_COUNTED))
        if any(step.caught_errors > 0 for step in readings):
            text = (
                "At some sizes an allocation failed inside a step that went on: cuDNN takes a"
                " slower algorithm then, with less memory. So their memory is not on one line with"
                " that of smaller sizes."
            )
            notes.append(Note("search", text))
        return Trial(
            batch_size=batch_size,
            outcome="ok",
            kind=kind,
            step_seconds=statistics.median(seconds.all) if seconds.all else None,
            samples_per_s=samples_per_s,
            full_steps=num_full_steps(readings),
            growth=meter.growth,
            notes=tuple(notes),
            memory=TrialMemory(
                phase_peak_bytes=peaks,
                is_exact=meter.live is not None,
                start_bytes=meter.start_bytes,
                held_peak_bytes=held_bytes,
                needed_bytes=needed_bytes,
                set_aside_bytes=max(set_aside_bytes, sample_bytes(self.program, self._device)),
                fixed_bytes=meter.fixed_bytes,
                largest_batch_bytes=self.program.largest_batch_bytes,
                differing_bytes=differing_bytes,
            ),
        )


def _outcome(
    trial: Trial,
    limits: SearchLimits,
    readings: Sequence[StepReading],
    *,
    is_limit_enforced: bool,
) -> Outcome:
    """The outcome of a trial whose steps have ended without an error."""
    if trial.kind == "rehearsal" and _would_retry(trial, readings, limits):
        return "allocator_retry"
    # On the host the needed bytes are of tensors, but the limit is of the process.
    needed_bytes = max(trial.memory.needed_bytes, trial.memory.held_bytes)
    if trial.kind == "rehearsal" and trial.batch_size > size_range(limits)[0]:
        # Where a checkpoint had no room beside what the steps left, a training was killed. No size
        # below the smallest one could leave more.
        needed_bytes = max(needed_bytes, trial.memory.held_bytes + trial.memory.set_aside_bytes)
    # The last page of an expandable segment may exceed an enforced limit.
    is_exact = not is_limit_enforced or trial.memory.differing_bytes
    if needed_bytes > limits.filled_bytes and is_exact:
        return "over_limit"
    return "ok"


def _would_retry(trial: Trial, readings: Sequence[StepReading], limits: SearchLimits) -> bool:
    """Whether the allocator would release its cache again and again in the training."""
    if num_caught_errors(readings) > 0:
        return True
    # With ever new shapes a training releases its cache now and then, at any size near the limit.
    if num_retries(readings) == 0 or limits.fragmented_bytes or trial.memory.differing_bytes:
        return False
    # Only the limit of the user is enforced in the training too, and none is in trials where ranks
    # take steps together.
    is_of_trial = limits.options.memory_limit is None and not limits.steps_are_collective
    return not (is_of_trial and limits.has_expandable_segments)
