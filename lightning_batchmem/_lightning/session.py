"""A Trainer as the session of a search: a training with its validation, or one evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_batchmem._lightning.bounds import limited_batches, stage_bounds, training_bounds
from lightning_batchmem._lightning.clean_start import CleanStart
from lightning_batchmem._lightning.data_source import (
    attach_loaders,
    validation_loop,
)
from lightning_batchmem._lightning.hooks import configure_optimizers_again, freeze_schedulers
from lightning_batchmem._lightning.run_step import (
    EvaluationLoop,
    begin_epoch,
    begin_evaluation,
    begin_training,
    drop_batch,
    end_evaluation,
    run_evaluation_step,
    run_step,
)
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.strategies import (
    is_synchronized,
    steps_are_collective,
    without_synchronization,
)
from lightning_batchmem._lightning.trainer_state import saves_checkpoints
from lightning_batchmem.batches.loaders import StageLoaders
from lightning_batchmem.batches.probe_batches import ProbeBatches
from lightning_batchmem.devices.peaks import PhasePeaks
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Bound
from lightning_batchmem.search.budget import Budget
from lightning_batchmem.search.ranks import Ranks


@dataclass(eq=False)
class TrainingSteps:
    """The user's training step in Lightning's own loop."""

    trainer: Trainer
    loaders: StageLoaders
    batches: ProbeBatches
    first_phase = "forward"
    follows_batch_size = True

    @property
    def sample_bytes(self) -> int:
        return self.batches.held_bytes

    def begin(self, batch_size: int) -> int:
        micro_batches = begin_epoch(self.trainer, self.loaders.batches(batch_size))
        return micro_batches * self.batches.loaders_in_turn

    def run(self, batch_size: int, index: int) -> None:
        run_step(self.trainer, lambda: self.batches.batch(batch_size, index)[0])

    def run_other_lengths(self, batch_size: int, index: int) -> None:
        run_step(self.trainer, lambda: self.batches.other_lengths(batch_size, index)[0])

    def end(self) -> None:
        """There is nothing to leave."""

    def release(self) -> None:
        for parameter in self.trainer.lightning_module.parameters():
            parameter.grad = None
        for optimizer in self.trainer.optimizers:
            optimizer.state.clear()
        drop_batch(self.trainer.fit_loop.epoch_loop)


@dataclass(eq=False)
class EvaluationSteps:
    """The user's validation, test or prediction step in Lightning's own loop, without gradients."""

    trainer: Trainer
    loop: EvaluationLoop
    loaders: StageLoaders
    batches: ProbeBatches
    first_phase = "evaluation"

    @property
    def follows_batch_size(self) -> bool:
        return self.loaders.follows

    @property
    def sample_bytes(self) -> int:
        return self.batches.held_bytes

    def begin(self, batch_size: int) -> int:
        """Enter the evaluation with the module's hooks."""
        num_batches = self.loaders.batches(batch_size)
        begin_evaluation(self.trainer, self.loop, self.loaders.combined, num_batches)
        return self.batches.loaders_in_turn

    def run(self, batch_size: int, index: int) -> None:
        run_evaluation_step(self.loop, lambda: self.batches.batch(batch_size, index))

    def run_other_lengths(self, batch_size: int, index: int) -> None:
        run_evaluation_step(self.loop, lambda: self.batches.other_lengths(batch_size, index))

    def end(self) -> None:
        end_evaluation(self.trainer, self.loop)

    def release(self) -> None:
        """An evaluation step holds nothing after an error."""


@dataclass(eq=False)
class LightningSession:
    """One stage of a Trainer, as :class:`.search.session.Session` describes it.

    Args:
        trainer: the Trainer, before the first step of the stage.
        phases: the phases of a step.
        clean_start: the state in which the stage starts.
        setting: the places of the batch size.
        loaders: the loaders that follow it.
        training: the training steps.
        evaluation: the evaluation steps whose size the search sets too.
        bounds_of_stage: the largest sizes that data and settings allow.
        working: the batches of all loaders whose workers are alive at the same time.
    """

    trainer: Trainer
    phases: PhasePeaks
    clean_start: CleanStart
    setting: BatchSizeSetting
    loaders: StageLoaders
    training: TrainingSteps | None
    evaluation: EvaluationSteps | None
    bounds_of_stage: list[Bound]
    working: list[ProbeBatches]

    @property
    def device(self) -> torch.device:
        return self.trainer.strategy.root_device

    @property
    def module(self) -> torch.nn.Module:
        return self.trainer.lightning_module

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return self.trainer.optimizers

    @property
    def evaluates_first(self) -> bool:
        return bool(self.trainer.num_sanity_val_steps)

    @property
    def steps_are_collective(self) -> bool:
        return steps_are_collective(self.trainer)

    @property
    def exchanges_gradients(self) -> bool:
        return self.training is not None and is_synchronized(self.trainer)

    @property
    def notes(self) -> list[str]:
        notes = []
        for steps in (self.training, self.evaluation):
            if steps is not None:
                notes += [f"{steps.loaders.hook}: {note}" for note in steps.batches.notes]
        return notes

    def bounds(self) -> list[Bound]:
        return self.bounds_of_stage

    def smaller_batch_size(self, batch_size: int) -> int:
        return self.loaders.last_batch_size(batch_size)

    def batches_in_epoch(self, batch_size: int) -> float:
        batches = self.loaders.batches(batch_size)
        return limited_batches(batches, self.trainer.limit_train_batches)

    def worker_bytes(self, batch_size: int) -> int:
        return sum(batches.worker_bytes(batch_size) for batches in self.working)

    def sample_sizes(self) -> list[Any]:
        return [(batches.longest_bytes, batches.notes) for batches in self.working]

    def use_sample_sizes(self, of_ranks: Sequence[list[Any]]) -> None:
        # A rank without validation has fewer stages than the others.
        for number, batches in enumerate(self.working):
            batches.agree([sizes[number] for sizes in of_ranks if number < len(sizes)])

    def set_batch_size(self, batch_size: int) -> None:
        self.setting.write(batch_size)

    def check_batch_size(self, batch_size: int) -> None:
        self.setting.check_loaders(batch_size, self.loaders)

    def restart(self, batch_size: int) -> None:
        self.clean_start.again()
        self.setting.write(batch_size)

    def without_synchronization(self) -> AbstractContextManager[None]:
        return without_synchronization(self.trainer)

    def checkpoint_states(self) -> list[object] | None:
        callbacks = self.clean_start.callbacks
        if self.training is None or not saves_checkpoints(callbacks):
            return None
        states: list[object] = [self.module.state_dict()]
        states += [optimizer.state for optimizer in self.optimizers]
        return states + [callback.state_dict() for callback in callbacks]


@dataclass(frozen=True)
class SessionFactory:
    """Makes the sessions of a Trainer.

    Args:
        trainer: the Trainer, before its first step.
        options: the arguments of BatchFinder.
        policy: the numbers that steer the search.
        budget: the memory of this rank, of which samples take a share.
        ranks: the processes that search together.
        phases: the phases of a step.
    """

    trainer: Trainer
    options: SearchOptions
    policy: SearchPolicy
    budget: Budget
    ranks: Ranks
    phases: PhasePeaks

    def training(
        self, clean_start: CleanStart, setting: BatchSizeSetting, validation: BatchSizeSetting
    ) -> tuple[LightningSession, LightningSession | None]:
        """The session of the training, and that of a validation whose size is searched by itself.

        Args:
            clean_start: the state in which the training starts, entered.
            setting: the places of the batch size of the training.
            validation: the places of the batch size of the validation.

        Raises:
            ValueError: if no loader follows the batch size.
        """
        first_size = self.options.first_size(self.policy)
        has_own_size = self.options.eval_batch_arg_name is not None
        project_size = setting.size
        loaders = setting.loaders_for(first_size)
        evaluation = self._validation(validation, has_own_size=has_own_size)
        if not all(self.ranks.exchange(evaluation is not None)):
            evaluation = None
        training = TrainingSteps(self.trainer, loaders, self._batches(loaders))
        clean_start.prepare = lambda: self._begin_training(training, evaluation)
        phase = None if has_own_size else evaluation
        bounds = training_bounds(
            self.trainer,
            loaders,
            None if phase is None else phase.loaders,
            self.options,
            self.policy,
            project_size,
        )
        working = [steps.batches for steps in (training, evaluation) if steps is not None]
        session = LightningSession(
            self.trainer,
            self.phases,
            clean_start,
            setting,
            loaders,
            training,
            phase,
            bounds,
            working,
        )
        session.restart(first_size)
        if evaluation is None or not has_own_size:
            return session, None
        return session, self._evaluation(clean_start, validation, evaluation)

    def evaluation(
        self, clean_start: CleanStart, setting: BatchSizeSetting, loop: EvaluationLoop
    ) -> LightningSession | None:
        """The session of an evaluation; ``None`` if no loader follows the batch size."""
        loaders: StageLoaders | None = None
        try:
            loaders = setting.loaders_for(self.options.first_size(self.policy), may_be_fixed=True)
        except ValueError as error:
            # In a training this is an error. This stage may not be meant for BatchFinder.
            rank_zero_warn(str(error))
        follows = loaders is not None and loaders.follows
        if not all(self.ranks.exchange(follows)) or loaders is None:
            return None
        steps = EvaluationSteps(self.trainer, loop, loaders, self._batches(loaders))
        return self._evaluation(clean_start, setting, steps)

    def _evaluation(
        self, clean_start: CleanStart, setting: BatchSizeSetting, steps: EvaluationSteps
    ) -> LightningSession:
        bounds = stage_bounds(self.trainer, setting.source.stage, steps.loaders)
        return LightningSession(
            self.trainer,
            self.phases,
            clean_start,
            setting,
            steps.loaders,
            None,
            steps,
            bounds,
            [steps.batches],
        )

    def _validation(
        self, setting: BatchSizeSetting, *, has_own_size: bool
    ) -> EvaluationSteps | None:
        """The steps of validation; ``None`` where there is none, or its loaders cannot be used."""
        if not self.trainer.enable_validation or setting.source.is_empty:
            return None
        if has_own_size:
            setting.check()
        try:
            loaders = setting.loaders_for(
                self.options.first_size(self.policy), may_be_fixed=not has_own_size
            )
            batches = self._batches(loaders)
        except ValueError as error:
            if has_own_size:
                raise
            rank_zero_warn(f"BatchFinder leaves validation out of the search: {error}")
            return None
        return EvaluationSteps(self.trainer, validation_loop(self.trainer), loaders, batches)

    def _batches(self, loaders: StageLoaders) -> ProbeBatches:
        return ProbeBatches(
            loaders,
            self.options.worst_case,
            policy=self.policy,
            room_bytes=self.budget.free_bytes(),
        )

    def _begin_training(self, training: TrainingSteps, evaluation: EvaluationSteps | None) -> None:
        """Attach the loaders, configure optimizers, and call the hooks before the first step."""
        first_size = self.options.first_size(self.policy)
        combined = None
        counts: list[float] = []
        if evaluation is not None:
            combined = evaluation.loaders.combined
            counts = [info.batches(first_size) for info in evaluation.loaders.sized]
        num_batches = training.loaders.batches(first_size)
        attach_loaders(self.trainer, training.loaders.combined, num_batches, combined, counts)
        if self.options.target_batch_size is not None:
            # With two micro batches, gradients are alive in backward too.
            self.trainer.accumulate_grad_batches = 2
        configure_optimizers_again(self.trainer)
        freeze_schedulers(self.trainer)
        begin_training(self.trainer)
