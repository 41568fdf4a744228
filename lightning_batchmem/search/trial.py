"""Real steps at one batch size: a probe of a few steps, or a rehearsal of the training."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.out_of_memory import is_out_of_memory, release_traceback
from lightning_batchmem.devices.peaks import StepPeaks
from lightning_batchmem.plan import sentences
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import NextSize, SearchLimits, Trial
from lightning_batchmem.plan.scaling import accumulated_batches
from lightning_batchmem.search.compiled import forget_compiled
from lightning_batchmem.search.ranks import CollectiveDetector, Ranks
from lightning_batchmem.search.readings import TrialReadings
from lightning_batchmem.search.rehearsal import Rehearsal
from lightning_batchmem.search.session import Session, Steps
from lightning_batchmem.search.steps import (
    ConsecutiveSteps,
    OverLimitError,
    StepMeter,
)


class TrialRunner:
    """Runs trials of a session, and makes one complete :class:`.Trial` of each."""

    def __init__(
        self, session: Session, device: DeviceMemory, ranks: Ranks, policy: SearchPolicy
    ) -> None:
        self.is_collective = session.steps_are_collective
        self.meter = StepMeter(session, device, policy)
        self._session = session
        self._device = device
        self._ranks = ranks
        self._policy = policy
        primary = session.training or session.evaluation
        if primary is None:
            raise ValueError("session must have steps of training or of an evaluation, got neither")
        self._primary = primary
        self._is_slow = False
        # These peaks are used again if the batches of the evaluation do not follow the batch size.
        self._fixed_evaluation: list[StepPeaks] = []

    def notes(self) -> list[str]:
        """What the trials could not measure."""
        notes = []
        if self.meter.has_idle_optimizer:
            notes.append(sentences.idle_optimizer(self._policy.max_warmup_steps))
        if self.meter.live is None:
            notes.append(sentences.LIVE_BYTES_NOT_COUNTED)
        return notes

    def calls_collectives(self, batch_size: int) -> bool:
        """Whether the user's own steps exchange data between ranks.

        Such a step ends before the exchange.
        """
        detector = CollectiveDetector()
        for steps in self._all_steps():
            if detector.found:
                break
            try:
                alone = self._session.without_synchronization()
                readings = TrialReadings(steps)
                consecutive = ConsecutiveSteps(self.meter, steps, batch_size, readings)
                with alone, detector, consecutive:
                    consecutive.run(1)
            # Out of memory has many types, and the first probe reports it.
            except Exception as error:
                if not detector.found and not is_out_of_memory(error):
                    raise
                release_traceback(error)
                steps.release()
        return detector.found

    def run(self, step: NextSize, limits: SearchLimits) -> Trial:
        """Run a trial; before a rehearsal the caller restarts the session."""
        if step.kind == "probe":
            forget_compiled()
            self._device.release_cached()
        readings = TrialReadings(self._primary)
        with self._until_out_of_memory(step.batch_size, readings):
            if step.kind == "probe":
                self._probe(step.batch_size, limits.limit_bytes, readings)
            elif step.kind == "timing":
                self._time(step.batch_size, limits.limit_bytes, readings)
            else:
                rehearsal = Rehearsal(
                    self.meter,
                    self._ranks,
                    step.batch_size,
                    limits.limit_bytes,
                    limits.multiple_of or 1,
                    readings,
                    self.is_collective,
                    self._is_slow,
                )
                rehearsal.run()
        return self._trial(step, limits, readings)

    def synchronized_step(self, batch_size: int) -> int:
        """Run a step in which the ranks exchange gradients, and return its peak of held bytes."""
        readings = TrialReadings(self._primary)
        consecutive = ConsecutiveSteps(self.meter, self._primary, batch_size, readings)
        with self._ranks.collective_step(batch_size), consecutive:
            # All ranks have to run equally many steps, so none of them counts as slow.
            consecutive.run(self._policy.measured_steps)
        return max(readings.held_bytes)

    def _all_steps(self) -> list[Steps]:
        both = (self._session.training, self._session.evaluation)
        return [steps for steps in both if steps is not None]

    def _probe(self, batch_size: int, limit_bytes: int, readings: TrialReadings) -> None:
        """Run a few steps and measure the peak of each phase."""
        if self._device.overrun_kills and not self.is_collective:
            readings.most_held_bytes = limit_bytes
        training = self._session.training
        evaluation = self._session.evaluation
        if training is not None:
            self._probe_steps(training, batch_size, readings)
            lasting_bytes = self.meter.live_bytes() - self.meter.gradient_bytes()
            readings.fixed_bytes = max(0, lasting_bytes)
        if evaluation is not None:
            follows = training is None or evaluation.follows_batch_size
            if follows or not self._fixed_evaluation:
                before = len(readings.step_peaks)
                self._probe_steps(evaluation, batch_size, readings)
                self._fixed_evaluation = readings.step_peaks[before:]
            else:
                readings.step_peaks += self._fixed_evaluation
        self.meter.is_first_size = False
        readings.outcome = "ok"

    def _time(self, batch_size: int, limit_bytes: int, readings: TrialReadings) -> None:
        """Time the steps of a size that was run before, under the limit."""
        limit: AbstractContextManager[bool] = nullcontext(False)
        if not self.is_collective:
            limit = self._device.limit_enforced(limit_bytes)
            if self._device.overrun_kills:
                readings.most_held_bytes = limit_bytes
        consecutive = ConsecutiveSteps(self.meter, self._primary, batch_size, readings)
        with limit, consecutive:
            consecutive.warm_up(self.meter.warmup_steps)
            consecutive.run_timed(equally_many=self._ranks.size > 1)
        readings.outcome = "ok"

    def _probe_steps(self, steps: Steps, batch_size: int, readings: TrialReadings) -> None:
        at_least = self.meter.warmup_steps
        if self.meter.is_first_size:
            at_least = self._policy.first_warmup_steps
        with ConsecutiveSteps(self.meter, steps, batch_size, readings) as consecutive:
            consecutive.warm_up(at_least)
            # The user's steps may exchange data between ranks, in later steps only.
            consecutive.run_timed(equally_many=self._ranks.size > 1)
            consecutive.run_others()
            consecutive.count_live_bytes()

    @contextmanager
    def _until_out_of_memory(self, batch_size: int, readings: TrialReadings) -> Iterator[None]:
        """Run the steps of a trial until they end, or memory runs out."""
        phases = self._session.phases
        phases.watch(self._session.optimizers, forward_follows=True)
        alone = self._session.without_synchronization()
        try:
            with self._ranks.collective_step(batch_size) if self.is_collective else alone:
                yield
        except OverLimitError:
            # The next step of a probe might exceed the limit, which would end the process.
            readings.step_peaks.clear()
            readings.outcome = "over_limit"
        # Out of memory has many types. Every other error is raised again.
        except Exception as error:
            if not is_out_of_memory(error) or self.is_collective:
                raise
            readings.outcome = "out_of_memory"
            readings.error = release_traceback(error)
            for steps in self._all_steps():
                # Caches stay, since the next trial releases them.
                steps.release()
        finally:
            phases.unwatch()

    def _trial(self, step: NextSize, limits: SearchLimits, readings: TrialReadings) -> Trial:
        batch_size = step.batch_size
        seconds = statistics.median(readings.seconds) if readings.seconds else None
        accumulate = accumulated_batches(batch_size, limits)
        step_seconds = readings.optimizer_step_seconds(accumulate)
        samples_per_second = None
        if step_seconds:
            items = accumulate * self._primary.items(batch_size)
            samples_per_second = items / step_seconds
        is_slow = seconds is not None and seconds > self._policy.slow_step_seconds
        # Ranks that step together run equally many steps, so none of them counts as slow.
        self._is_slow = is_slow and not self.is_collective
        worker_bytes = self._session.worker_bytes(batch_size)
        held_bytes = max(readings.held_bytes, default=None)
        reserve_bytes = readings.reserve_bytes
        outcome = readings.outcome
        if self._device.holds_loader_workers:
            reserve_bytes += worker_bytes
            needed_bytes = held_bytes or max(readings.phase_peaks().values(), default=0)
            if outcome == "ok" and needed_bytes + reserve_bytes > limits.limit_bytes:
                outcome = "over_limit"
        return Trial(
            batch_size=batch_size,
            outcome=outcome,
            kind=step.kind,
            phase_peak_bytes=readings.phase_peaks(),
            is_exact=self.meter.live is not None,
            peak_held_bytes=held_bytes,
            reserve_bytes=reserve_bytes,
            fixed_bytes=readings.fixed_bytes,
            step_seconds=seconds,
            fastest_step_seconds=min(readings.seconds, default=None),
            samples_per_second=samples_per_second,
            full_steps=readings.full_steps,
            samples_run=readings.samples,
            worker_bytes=worker_bytes,
            error=self._ranks.named(readings.error),
        )
