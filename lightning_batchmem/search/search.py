"""The search: measure a size, fit and decide, until there is a plan.

The state before the search is restored afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_batchmem._lightning.bounds import limited_batches, stage_bounds, training_bounds
from lightning_batchmem._lightning.clean_start import Attempts
from lightning_batchmem._lightning.data_source import (
    attach_loaders,
    validation_loop,
    validation_source,
)
from lightning_batchmem._lightning.hooks import configure_optimizers_again, freeze_schedulers
from lightning_batchmem._lightning.module_state import ModuleState
from lightning_batchmem._lightning.run_step import EvaluationLoop, begin_training
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.strategies import is_synchronized, wrap_again
from lightning_batchmem._lightning.trainer_state import (
    RandomStates,
    callbacks_of,
    saves_checkpoints,
    weight_average_bytes,
)
from lightning_batchmem.batches.loaders import Bound, StageLoaders
from lightning_batchmem.batches.probe_batches import ProbeBatches
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.breakdown import measure_breakdown
from lightning_batchmem.plan.decide import decide
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import NextSize, SearchFailed, SearchLimits, Trial, mib
from lightning_batchmem.plan.reuse import reuse
from lightning_batchmem.plan.sentences import not_used_text
from lightning_batchmem.search.budget import (
    WorkerMemory,
    expected_seconds,
    own_limit_bytes,
    search_limits,
    with_workers,
)
from lightning_batchmem.search.compiled import each_size_static, forget_compiled
from lightning_batchmem.search.progress import SearchProgress
from lightning_batchmem.search.ranks import Ranks, own_budget_bytes
from lightning_batchmem.search.step_runner import PhaseCallback
from lightning_batchmem.search.steps import EvaluationSteps, TrainingSteps
from lightning_batchmem.search.trial import TrialRunner

# The expected time of a search is shown if it is longer than this.
_LONG_SECONDS = 30.0


@dataclass
class _Stage:
    """One stage of a run: training with its validation, or an evaluation."""

    setting: BatchSizeSetting
    loaders: StageLoaders
    runner: TrialRunner
    workers: WorkerMemory
    # A call enters the state in which the stage starts.
    start: Callable[[], ExitStack]
    reused: Plan | None = None


class BatchSizeSearch:
    """A search over real steps, in a trainer whose loop has not started."""

    def __init__(
        self,
        trainer: Trainer,
        device: DeviceMemory,
        options: SearchOptions,
        random: RandomStates,
        module_state: ModuleState,
        reused: Plan | None = None,
    ) -> None:
        self._reused = reused
        self._trainer = trainer
        self._device = device
        self._options = options
        self._callback = PhaseCallback(device)
        self._attempts = Attempts(trainer, device, self._callback, random, module_state)
        self._ranks = Ranks(trainer)
        self._first = options.first_size
        self._callbacks = callbacks_of(trainer)
        self._averages_bytes = (
            weight_average_bytes(trainer) if not device.held_is_resident_set else 0
        )
        shown = trainer.is_global_zero and trainer.progress_bar_callback is not None
        self._progress = SearchProgress(enabled=shown)
        # An epoch has this many batches at the chosen size. The number is inf when it is unknown.
        self.epoch_batches = math.inf
        # This many live bytes existed at the start of the last rehearsal.
        self.start_bytes = 0
        if module_state.not_restorable:
            what = "; ".join(module_state.not_restorable[:10])
            rank_zero_warn(
                f"BatchFinder cannot restore these if a training step changes them: {what}"
            )

    def training(self, setting: BatchSizeSetting) -> Plan | SearchFailed:
        """Search with training steps; validation is a phase of them."""
        with self._ranks.fail_together():
            outcome = self._training(setting)
            wrap_again(self._trainer)
        return outcome

    def evaluation(
        self, setting: BatchSizeSetting, loop: EvaluationLoop
    ) -> Plan | SearchFailed | None:
        """Search with forward passes only.

        The result is ``None`` when the stage's loaders do not follow the batch size.
        """
        start = partial(self._attempts.restoring, [setting], loop)
        with (
            self._ranks.fail_together(),
            self._progress,
            each_size_static(),
            self._attempts.begin(start),
        ):
            loaders: StageLoaders | None = None
            try:
                loaders = setting.loaders_for(self._first, may_be_fixed=True)
            except ValueError as error:
                # In training this is an error, but this stage may not be meant for BatchFinder.
                rank_zero_warn(str(error))
            follows = self._ranks.exchange(loaders is not None and loaders.follows)
            if loaders is None or not all(follows):
                return None
            return self._over(setting, self._evaluation_steps(loaders, loop), start)

    def _training(self, setting: BatchSizeSetting) -> Plan | SearchFailed:
        trainer = self._trainer
        options = self._options
        setting.check()
        own_name = options.eval_batch_arg_name
        project_size = setting.size
        validation = replace(
            setting, source=validation_source(trainer), name=own_name or setting.name
        )
        loaders: StageLoaders | None = None
        evaluation: EvaluationSteps | None = None

        def start() -> ExitStack:
            """Enter the state in which training starts, with the loaders attached."""
            with self._attempts.restoring([setting, validation], trainer.fit_loop) as attempt:
                if loaders is not None:
                    val_loaders = None
                    val_batches: list[float] = []
                    if evaluation is not None:
                        val_loaders = evaluation.loaders.combined
                        val_batches = [
                            loader.batches(self._first) for loader in evaluation.loaders.sized
                        ]
                    attach_loaders(
                        trainer,
                        loaders.combined,
                        loaders.batches(self._first),
                        val_loaders,
                        val_batches,
                    )
                    if options.target_batch_size is not None:
                        # Under accumulation the gradients are alive in backward too.
                        trainer.accumulate_grad_batches = 2
                    # The values that configure_optimizers sets in the module were restored too.
                    configure_optimizers_again(trainer)
                    freeze_schedulers(trainer)
                    begin_training(trainer)
                # The state is restored here only after an error in the user's hooks.
                return attempt.pop_all()

        with self._progress, each_size_static(), self._attempts.begin(start):
            loaders = setting.loaders_for(self._first)
            evaluation = self._validation(validation, is_own=own_name is not None)
            if not all(self._ranks.exchange(evaluation is not None)):
                evaluation = None
            steps = TrainingSteps(trainer, self._probe_batches(loaders), loaders.batches)
            self._attempts.restart(start)
            phase = None if own_name is not None else evaluation
            workers = WorkerMemory(
                [one.probe_batches for one in (steps, evaluation) if one is not None]
            )
            bounds = training_bounds(
                trainer, loaders, phase.loaders if phase else None, options, project_size
            )
            limits = self._limits(workers, bounds, options.target_batch_size)
            stage = _Stage(
                setting, loaders, self._runner(steps, phase), workers, start, self._reused
            )
            outcome = self._search(stage, limits)
            if isinstance(outcome, Plan) and outcome.trials and is_synchronized(trainer):
                outcome = self._synchronized(outcome, stage, limits)
            if isinstance(outcome, SearchFailed):
                return self._explained(outcome)
            batches = limited_batches(
                loaders.batches(outcome.batch_size), trainer.limit_train_batches
            )
            self.epoch_batches = min(self._ranks.exchange(batches))
            outcome = _with_notes(outcome, steps, setting)
            outcome = _with_notes(outcome, phase, validation)
            if own_name is not None and evaluation is not None:
                own = self._over(validation, evaluation, start)
                if isinstance(own, SearchFailed):
                    return replace(own, reason=f"validation: {own.reason}")
                outcome = replace(outcome, evaluation=own)
            return outcome

    def _over(
        self, setting: BatchSizeSetting, steps: EvaluationSteps, start: Callable[[], ExitStack]
    ) -> Plan | SearchFailed:
        workers = WorkerMemory([steps.probe_batches])
        limits = self._limits(
            workers, stage_bounds(self._trainer, setting.source.stage, steps.loaders), None
        )
        reused = self._reused and self._reused.evaluation
        stage = _Stage(setting, steps.loaders, self._runner(None, steps), workers, start, reused)
        outcome = self._search(stage, limits)
        if isinstance(outcome, SearchFailed):
            return outcome
        return _with_notes(outcome, steps, setting)

    def _search(
        self, stage: _Stage, limits: SearchLimits, trials_run: Sequence[Trial] | None = None
    ) -> Plan | SearchFailed:
        """Measure, fit, decide; or only rehearse the size of a plan that is used again."""
        trials = list(trials_run or ())
        runner = stage.runner
        notes = list[str]()
        reused = stage.reused if trials_run is None else None
        begin = time.monotonic()
        is_announced = False
        while True:
            step = reuse(reused, trials, limits) if reused is not None else decide(trials, limits)
            if isinstance(step, str):
                if trials:
                    self._restart(stage, self._first)
                notes = [not_used_text(step)]
                trials = []
                reused = None
                continue
            if not isinstance(step, NextSize):
                break
            if step.kind != "probe" and not is_announced:
                seconds = time.monotonic() - begin + expected_seconds(trials, limits)
                is_announced = True
                if seconds > _LONG_SECONDS:
                    rank_zero_info(f"BatchFinder expects to search for {seconds:.0f} s.")
            self._progress.trying(step, trials)
            if step.kind != "probe" or (trials and trials[-1].outcome != "ok"):
                self._restart(stage, step.batch_size)
            stage.setting.write(step.batch_size)
            if not trials and self._ranks.size > 1 and not runner.is_collective:
                runner.is_collective = any(
                    self._ranks.exchange(runner.calls_collectives(step.batch_size))
                )
                # The check has ended a step early, or has changed the state at the start.
                if runner.is_collective or step.kind != "probe":
                    self._restart(stage, step.batch_size)
            smaller = stage.loaders.last_batch_size(step.batch_size)
            trial = runner.run(step.kind, step.batch_size, smaller, limits.limit_bytes)
            trial = with_workers(trial, stage.workers, self._device, limits.limit_bytes)
            trials.append(self._ranks.worst_of_all(trial))
            self._progress.measured(trials[-1])
            # Other processes may have filled the device meanwhile.
            own_bytes = own_limit_bytes(self._trainer, self._device, self._averages_bytes)
            of_ranks, are_compiled = zip(
                *self._ranks.exchange((own_bytes, runner.is_compiled)), strict=True
            )
            limits = replace(
                limits,
                limit_bytes=min(limits.limit_bytes, *of_ranks),
                steps_are_collective=runner.is_collective,
                max_sizes=4 if any(are_compiled) else limits.max_sizes,
            )
        if isinstance(step, Plan):
            stage.setting.check_loaders(step.batch_size, stage.loaders)
            step = replace(step, notes=(*step.notes, *notes, *runner.notes))
        return step

    def _restart(self, stage: _Stage, batch_size: int) -> None:
        """Restore the state in which the stage starts, and set the size of the next steps."""
        forget_compiled()
        self._attempts.restart(stage.start)
        self.start_bytes = stage.runner.current_bytes()
        stage.setting.write(batch_size)

    def _synchronized(self, plan: Plan, stage: _Stage, limits: SearchLimits) -> Plan | SearchFailed:
        """The plan after a step in which the ranks exchange gradients.

        Room is left for the buffers of the exchange.
        """
        # The limit may have become smaller during the search.
        limits = replace(limits, limit_bytes=plan.limit_bytes)
        room = limits
        while True:
            self._restart(stage, plan.batch_size)
            held_bytes = max(self._ranks.exchange(stage.runner.synchronized_step(plan.batch_size)))
            if held_bytes <= limits.limit_bytes:
                return replace(plan, limit_bytes=limits.limit_bytes)
            alone_bytes = plan.held_peak_bytes or plan.measured_peak_bytes or 0
            room = replace(room, limit_bytes=room.limit_bytes - max(1, held_bytes - alone_bytes))
            kept = [
                trial
                for trial in plan.trials
                if trial.kind == "probe" or trial.needed_bytes <= room.limit_bytes
            ]
            outcome = self._search(stage, room, kept)
            if isinstance(outcome, SearchFailed):
                return outcome
            plan = replace(outcome, notes=tuple(dict.fromkeys([*plan.notes, *outcome.notes])))

    def _runner(
        self, training: TrainingSteps | None, evaluation: EvaluationSteps | None
    ) -> TrialRunner:
        is_saved = training is not None and saves_checkpoints(self._callbacks)
        return TrialRunner(
            self._trainer,
            self._device,
            self._callback,
            self._ranks,
            training=training,
            evaluation=evaluation,
            saved_callbacks=self._callbacks if is_saved else (),
        )

    def _limits(
        self, workers: WorkerMemory, bounds: list[Bound], target: int | None
    ) -> SearchLimits:
        return search_limits(
            self._trainer,
            self._device,
            self._ranks,
            self._options,
            workers,
            bounds=bounds,
            target_batch_size=target,
            averages_bytes=self._averages_bytes,
        )

    def _validation(self, setting: BatchSizeSetting, *, is_own: bool) -> EvaluationSteps | None:
        """The steps of validation; ``None`` without one, or if its loaders cannot be probed."""
        if not self._trainer.enable_validation or setting.source.is_empty:
            return None
        if is_own:
            setting.check()
        try:
            loaders = setting.loaders_for(self._first, may_be_fixed=not is_own)
            return self._evaluation_steps(loaders, validation_loop(self._trainer))
        except ValueError as error:
            if is_own:
                raise
            rank_zero_warn(f"BatchFinder leaves validation out of the search: {error}")
            return None

    def _evaluation_steps(self, loaders: StageLoaders, loop: EvaluationLoop) -> EvaluationSteps:
        return EvaluationSteps(self._trainer, loop, loaders, self._probe_batches(loaders))

    def _probe_batches(self, loaders: StageLoaders) -> ProbeBatches:
        budget_bytes = own_budget_bytes(self._device, self._trainer)
        room_bytes = budget_bytes - self._device.current().allocated_bytes
        return ProbeBatches(loaders, self._options.worst_case, room_bytes=max(0, room_bytes))

    def _explained(self, failure: SearchFailed) -> SearchFailed:
        """The failure with the memory breakdown of the last size."""
        if not failure.trials:
            return failure
        trial = failure.trials[-1]
        trainer = self._trainer
        self._device.release_cached()
        breakdown = measure_breakdown(
            trainer.lightning_module,
            trainer.optimizers,
            # No batch is passed, because its move to the device could run out of memory again.
            None,
            trainer.strategy.root_device,
            start_bytes=self._device.current().allocated_bytes,
            peak_bytes=trial.peak_bytes or trial.held_bytes,
        )
        text = f"At {trial.batch_size} samples the memory held {breakdown}"
        if trial.worker_bytes and self._device.holds_loader_workers:
            text += f"; DataLoader workers hold {mib(trial.worker_bytes)} more"
        return replace(failure, reason=f"{failure.reason} {text}.")


def _with_notes(
    plan: Plan, steps: TrainingSteps | EvaluationSteps | None, setting: BatchSizeSetting
) -> Plan:
    notes = () if steps is None else steps.probe_batches.notes
    return replace(plan, notes=(*plan.notes, *(f"{setting.source.hook}: {note}" for note in notes)))
