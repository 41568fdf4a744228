"""Real steps at one batch size, measured: a probe of a few steps, or a rehearsal of training."""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_batchmem._lightning.strategies import steps_are_collective, without_synchronization
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.devices.peaks import LiveStorages, StepPeaks
from lightning_batchmem.plan.records import Outcome, Trial, TrialKind
from lightning_batchmem.search.compiled import forget_compiled
from lightning_batchmem.search.ranks import CollectiveDetector, Ranks
from lightning_batchmem.search.step_runner import (
    OverLimitError,
    PhaseCallback,
    StepRecords,
    StepRunner,
)
from lightning_batchmem.search.steps import EvaluationSteps, Steps, TrainingSteps

# CUDA graphs need one step each to warm up, to record and to replay.
_GRAPH_WARMUP_STEPS = 3
# With fewer steps, simulated trainings ran out of memory in later steps.
_STEADY_STEPS = 5
# Activations of a batch of this share leave a part of most segments of the larger batch free. The
# gradients of the smaller batch lie there, so that the next step can neither use nor release these
# segments.
# Source: simulated CUDA allocator.
_WORST_SMALLER_SHARE = 0.75
# So many steps are added if the steps differ, as with random depth or image size.
_MORE_STEPS = 15
# Steps differ if their held bytes vary by more than this share of the highest. Less is noise.
_DIFFERENCE = 0.1
# Fewer steps are repeated if a step takes longer than this.
_SLOW_SECONDS = 2.0
# This share of the growth of the resident set is left free. In a measurement, 60 steps exceeded the
# first eight by up to 7 %.
_RESERVE_SHARE = 0.12
# This larger share is left free where live bytes cannot be counted and the size is less certain.
_RESERVE_SHARE_INEXACT = 0.4


class TrialRunner:
    def __init__(
        self,
        trainer: Trainer,
        device: DeviceMemory,
        callback: PhaseCallback,
        ranks: Ranks,
        *,
        training: TrainingSteps | None,
        evaluation: EvaluationSteps | None,
        saved_callbacks: Sequence[Callback] = (),
    ) -> None:
        self._trainer = trainer
        self._device = device
        self._callback = callback
        self._ranks = ranks
        self._training = training
        self._evaluation = evaluation
        self._main: Any = training or evaluation
        self.is_collective = steps_are_collective(trainer)
        # Checkpoints contain the state of these callbacks. The sequence is empty if none is saved.
        self._saved_callbacks = saved_callbacks
        samples_bytes = sum(
            one.probe_batches.held_bytes for one in (training, evaluation) if one is not None
        )
        self._runner = StepRunner(
            trainer,
            device,
            callback,
            samples_bytes=samples_bytes,
            counts_live=not self.is_collective,
        )
        self._is_first = True
        self._is_slow = False
        # These peaks are used again if the evaluation's loaders do not follow the batch size.
        self._fixed_evaluation: list[StepPeaks] = []

    @property
    def is_compiled(self) -> bool:
        return self._runner.is_compiled

    @property
    def _warmup_steps(self) -> int:
        return _GRAPH_WARMUP_STEPS if self.is_compiled else 1

    @property
    def notes(self) -> tuple[str, ...]:
        """What the trials could not measure."""
        notes = []
        if self._runner.has_idle_optimizer:
            notes.append(
                "An optimizer did not step in the first 20 steps, so its state is not part of the"
                " measured memory. Lower memory_limit to leave room for it."
            )
        if self._runner.live is None:
            notes.append(
                "Live tensors could not be counted, so the resident set was measured and more room"
                " left free."
            )
        return tuple(notes)

    def current_bytes(self) -> int:
        return self._runner.current_bytes()

    def calls_collectives(self, batch_size: int) -> bool:
        """Whether the user's own steps exchange data between ranks.

        Such a step ends before the exchange.
        """
        detector = CollectiveDetector()
        for steps in (self._training, self._evaluation):
            if steps is None or detector.found:
                continue
            try:
                with without_synchronization(self._trainer), detector:
                    self._runner.series(steps, batch_size, StepRecords(steps), self._one_step)
            # Out of memory has many types, and the first probe reports it.
            except Exception as error:
                if not detector.found and not is_out_of_memory(error):
                    raise
                _release_traceback(error)
                steps.release()
        return detector.found

    def run(self, kind: TrialKind, batch_size: int, smaller_size: int, limit_bytes: int) -> Trial:
        """Run a trial; before a rehearsal the caller restores the state when training starts."""
        run = partial(self._rehearse, batch_size, smaller_size, limit_bytes)
        if kind == "probe":
            run = partial(self._probe, batch_size)
        return self._trial(kind, batch_size, run)

    def _probe(self, batch_size: int, record: StepRecords) -> Outcome:
        """Run a few steps and measure the peak of each phase."""
        if self._training is not None:
            self._runner.series(self._training, batch_size, record, self._probe_steps)
            lasting_bytes = self._runner.current_bytes() - self._runner.gradient_bytes()
            record.fixed_bytes = max(0, lasting_bytes)
        if self._evaluation is not None:
            follows = self._training is None or self._evaluation.loaders.follows
            if follows or not self._fixed_evaluation:
                before = len(record.exact)
                self._runner.series(self._evaluation, batch_size, record, self._probe_steps)
                self._fixed_evaluation = record.exact[before:]
            else:
                record.exact += self._fixed_evaluation
        self._is_first = False
        return "ok"

    def _rehearse(
        self, batch_size: int, smaller_size: int, limit_bytes: int, record: StepRecords
    ) -> Outcome:
        """Run steps as training will, under the limit."""
        is_alone = not self.is_collective
        warm = 0
        retries = 0
        start_bytes = self._runner.held_bytes()
        start_live_bytes = self._runner.current_bytes()
        share = _RESERVE_SHARE if self._runner.live is not None else _RESERVE_SHARE_INEXACT
        if self._runner.is_host and is_alone:
            record.most_held_bytes = (limit_bytes + share * start_bytes) / (1 + share)
        limit: AbstractContextManager[bool] = nullcontext(False)
        if is_alone:
            limit = self._device.limit_enforced(limit_bytes)
        with limit as is_enforced:
            try:
                warm, retries = self._steps_of_a_training(batch_size, smaller_size, record)
            except OverLimitError:
                # The trial ends here, since the next step might exceed the limit, which would end
                # the process.
                record.exact.clear()
                record.reserve_bytes = int(share * (max(record.held_bytes) - start_bytes))
                return "over_limit"
        if self._runner.is_host:
            # The reserve is read before live bytes are counted, since counting takes memory itself.
            record.reserve_bytes = self._reserve(record, start_bytes, share)
            for steps in (self._training, self._evaluation):
                if steps is not None:
                    self._runner.series(steps, batch_size, record, self._live_steps)
            if self._runner.live is not None:
                live_bytes = max(record.phase_peaks().values()) - start_live_bytes
                # Holes in the heap differ between processes.
                hole_bytes = max(record.held_bytes) - start_bytes - live_bytes
                record.reserve_bytes += int(share * max(0, hole_bytes))
        if retries > 0:
            return "allocator_retry"
        needed_bytes = max(record.held_bytes[warm:]) + record.reserve_bytes
        return "over_limit" if not is_enforced and needed_bytes > limit_bytes else "ok"

    def _steps_of_a_training(
        self, batch_size: int, smaller_size: int, record: StepRecords
    ) -> tuple[int, int]:
        """Run the kinds of steps that the training will run.

        Return the number of warm-up calls, and the retries after these.
        """
        main = self._main
        series = self._runner.series
        evaluation = self._evaluation if self._training is not None else None
        if evaluation is not None and self._trainer.num_sanity_val_steps:
            series(evaluation, batch_size, record, self._two_steps)
        warm, retries = series(main, batch_size, record, self._steady_steps)
        if evaluation is not None:
            series(evaluation, batch_size, record, self._two_steps)
            series(evaluation, smaller_size, record, self._one_step)
        series(main, smaller_size, record, self._one_step)
        series(main, batch_size, record, self._two_steps)
        # A compiled module would be compiled again for another size.
        if not (self._runner.is_host or self.is_compiled):
            for size in (max(1, int(_WORST_SMALLER_SHARE * batch_size)), batch_size):
                series(main, size, record, self._one_step)
        return warm, self._retries() - retries

    def synchronized_step(self, batch_size: int) -> int:
        """Run a step in which the ranks exchange gradients, and return its peak of held bytes."""
        record = StepRecords(self._main)
        # All ranks have to run equally many steps, so none of them may count as slow.
        self._is_slow = False
        with self._ranks.collective_step(batch_size):
            self._runner.series(self._main, batch_size, record, self._two_steps)
        return max(record.held_bytes)

    def _trial(
        self, kind: TrialKind, batch_size: int, run: Callable[[StepRecords], Outcome]
    ) -> Trial:
        # Before a trial of another kind, the caller has already released compiled functions and
        # caches.
        if kind == "probe":
            forget_compiled()
            self._device.release_cached()
        record = StepRecords(self._main)
        outcome = "out_of_memory"
        alone: AbstractContextManager[None] = without_synchronization(self._trainer)
        handles = self._callback.watch(self._trainer.optimizers)
        try:
            with self._ranks.collective_step(batch_size) if self.is_collective else alone:
                outcome = run(record)
        # Out of memory has many types. Every other error is raised again.
        except Exception as error:
            if not is_out_of_memory(error) or self.is_collective:
                raise
            record.error = _release_traceback(error)
        finally:
            for handle in handles:
                handle.remove()
        seconds = statistics.median(record.seconds) if record.seconds else None
        # Ranks that step together run equally many steps, so none of them may count as slow.
        self._is_slow = not self.is_collective and (seconds or 0.0) > _SLOW_SECONDS
        if record.error:
            for steps in (self._training, self._evaluation):
                if steps is not None:
                    # Caches stay, since the next trial releases them.
                    steps.release()
        return Trial(
            batch_size=batch_size,
            # mypy does not see that the string is one of the literals.
            outcome=outcome,  # type: ignore[arg-type]
            kind=kind,
            phase_peak_bytes=record.phase_peaks(),
            is_exact=self._runner.live is not None,
            peak_held_bytes=max(record.held_bytes, default=None),
            reserve_bytes=record.reserve_bytes,
            fixed_bytes=record.fixed_bytes,
            step_seconds=seconds,
            full_steps=record.full_steps,
            samples_run=record.samples,
            error=record.error,
        )

    def _probe_steps(self, steps: Steps, batch_size: int, record: StepRecords) -> None:
        at_least = 2 if self._is_first else self._warmup_steps
        self._runner.warm_up(steps, batch_size, record, at_least=at_least)
        self._runner.run(steps, batch_size, record, 1 if self._is_slow else 2, timed=True)
        self._live_steps(steps, batch_size, record)

    def _one_step(self, steps: Steps, batch_size: int, record: StepRecords) -> None:
        self._runner.run(steps, batch_size, record, 1)

    def _two_steps(self, steps: Steps, batch_size: int, record: StepRecords) -> None:
        self._runner.run(steps, batch_size, record, 1 if self._is_slow else 2)

    def _live_steps(self, steps: Steps, batch_size: int, record: StepRecords) -> None:
        """Count live bytes on the host, in steps of their own: counting uses memory itself."""
        if isinstance(self._runner.live, LiveStorages):
            self._runner.track_lasting()
            # An uncounted step finds the other tensors that the module holds.
            if self._is_first:
                self._runner.run(steps, batch_size, record, 1, live=True, counted=False)
            self._runner.run(steps, batch_size, record, 1, live=True)

    def _steady_steps(self, steps: Steps, batch_size: int, record: StepRecords) -> tuple[int, int]:
        """Warm up and run the steady steps.

        Return the number of measured calls and of retries before the steady steps.
        """
        self._runner.warm_up(steps, batch_size, record, at_least=self._warmup_steps)
        warm = len(record.held_bytes)
        retries = self._retries()
        self._runner.run(steps, batch_size, record, _STEADY_STEPS, timed=True, varied=True)
        steady_bytes = record.held_bytes[warm:]
        differ = max(steady_bytes) - min(steady_bytes) > _DIFFERENCE * max(steady_bytes)
        # If only some of the ranks that step together ran more steps, they would wait forever.
        if self.is_collective:
            differ = any(self._ranks.exchange(differ))
        if differ:
            more_steps = 5 if self._is_slow else _MORE_STEPS
            self._runner.run(steps, batch_size, record, more_steps, varied=True)
        return warm, retries

    def _retries(self) -> int:
        return self._device.counters().get("num_alloc_retries", 0)

    def _reserve(self, record: StepRecords, start_bytes: int, share: float) -> int:
        """Bytes to keep free for later steps and checkpoints, above the highest resident set."""
        peak_bytes = max(record.held_bytes)
        grown_bytes = max(0, peak_bytes - start_bytes)
        saved = self._saved_callbacks
        saving_bytes = self._runner.held_bytes() + self._runner.state_bytes(saved) if saved else 0
        # The first summand is for a later step, the second one for a checkpoint.
        return int(share * grown_bytes) + max(0, saving_bytes - peak_bytes)


def _release_traceback(failure: BaseException) -> str:
    """Drop the tensors in a failed step's traceback, and return the first line of the error.

    Source: https://github.com/Lightning-AI/pytorch-lightning/issues/7335
    """
    lines = str(failure).strip().splitlines()
    text = f"{type(failure).__name__}: {lines[0]}" if lines else type(failure).__name__
    seen: set[int] = set()
    error: BaseException | None = failure
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    return text
