"""Programs for the search of a Trainer: their loaders, batches, steps and bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.bounds import (
    reached_samples,
    stage_bounds,
    training_bounds,
    why_not_accumulate,
)
from lightning_batchmem._lightning.clean_start import CleanStart
from lightning_batchmem._lightning.data_source import (
    attach_loaders,
    stage_loop,
    validation_loop,
    validation_source,
)
from lightning_batchmem._lightning.errors import noted_errors
from lightning_batchmem._lightning.place_search import find_place
from lightning_batchmem._lightning.program import TrainerProgram
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.steps import EvaluationSteps, TrainingSteps
from lightning_batchmem._lightning.strategies import configure_optimizers_again, has_batch_norm
from lightning_batchmem._lightning.trainer_state import call_module_hook
from lightning_batchmem._lightning.training_state import TrainingState, most_epochs
from lightning_batchmem.batches.loaders import StageLoaders
from lightning_batchmem.batches.probe_batches import ProbeBatches
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.recipe import Recipe
from lightning_batchmem.search.limits import MemoryRoom
from lightning_batchmem.search.ranks import Ranks
from lightning_batchmem.state.snapshot import freeze

# Loaders are requested at this size first. Small even sizes are constants in many projects, so a
# request at one of them would not show whether a loader follows.
_FIRST_REQUEST = 13


class ProgramMaker:
    """Makes the program of a search, whose loaders it requests.

    Args:
        trainer: the Trainer.
        options: the arguments of BatchFinder.
        policy: the numbers that steer the search.
        ranks: the processes that search together.
        room: the memory that this rank may use.

    Attributes:
        options: the same, for the search in the program: the smallest budget is known then.
    """

    def __init__(
        self,
        trainer: Trainer,
        options: SearchOptions,
        policy: SearchPolicy,
        ranks: Ranks,
        room: MemoryRoom,
    ) -> None:
        self.trainer = trainer
        self.options = options
        self.policy = policy
        self.ranks = ranks
        self.room = room
        self._first_size = options.first_size(policy.first_size)

    def find_place(
        self, setting: BatchSizeSetting, clean_start: CleanStart
    ) -> tuple[BatchSizeSetting, StageLoaders]:
        """The setting at a place that the training loaders follow, and the loaders.

        Raises:
            ValueError: if there is none.
        """
        if setting.is_budget:
            budget = setting.project_budget
            return setting, setting.loaders_for(budget)
        unit = self.options.multiple_of or 1
        largest_size = self.options.largest_size // unit * unit
        size = max(self._first_size, min(_FIRST_REQUEST * unit, largest_size))
        return find_place(setting, size, clean_start, self.ranks)

    def training(
        self,
        clean_start: CleanStart,
        setting: BatchSizeSetting,
        loaders: StageLoaders,
        before: Recipe,
        state: TrainingState,
        later: TrainerProgram | None,
    ) -> TrainerProgram:
        """The program of the training with its validation.

        Args:
            clean_start: the state in which the training starts, entered.
            setting: the setting at a place that the loaders follow.
            loaders: the loaders of the training.
            before: the optimizer steps of the project.
            state: the state of the training in which trials run.
            later: the program in a later state; ``None`` for none.
        """
        trainer = self.trainer
        batches = self._batches(loaders, clean_start)
        if setting.is_budget:
            self._begin_at_smallest_budget(setting, loaders, batches)
        setting.check_samples(batches)
        validation = replace(setting, source=validation_source(trainer))
        evaluation = self._validation_steps(validation, clean_start)
        if not all(self.ranks.exchange(evaluation is not None)):
            evaluation = None
        training = TrainingSteps(
            trainer,
            trainer.fit_loop.epoch_loop,
            loaders,
            batches,
            hook_of_epoch=state.begin_epoch,
        )
        validation_loaders = None if evaluation is None else evaluation.loaders
        step_samples = (before.effective_batch_size or 0) // before.ranks
        # No batch is larger than an epoch.
        project_size = min(before.batch_size or 0, step_samples) or None
        is_kept = self.options.objective == "recipe" or setting.is_budget
        if step_samples <= self.policy.first_size and not is_kept:
            # It is a placeholder.
            project_size = None
        may_accumulate = (
            project_size is not None
            and self.options.objective in ("auto", "recipe")
            and not why_not_accumulate(trainer, loaders, is_budget=setting.is_budget)
        )
        accumulate = before.accumulate_grad_batches
        bounds = training_bounds(
            trainer,
            loaders,
            validation_loaders,
            self.options,
            self.policy,
            project_size,
            keeps_step=(may_accumulate and self.options.keeps_step(accumulate))
            or self.options.target_batch_size is not None,
        )
        largest_size = min([self.options.largest_size, *(size for size, _ in bounds)])
        unfreeze = partial(
            state.unfreeze, most_epochs(trainer, training.batches_in_epoch(largest_size))
        )
        begin_stage = partial(
            self._begin_training, unfreeze, state.prepare, loaders, validation_loaders
        )
        program = TrainerProgram(
            clean_start,
            setting,
            [setting.source, validation.source],
            training,
            evaluation,
            bounds,
            begin_stage,
            later,
            project_batch_size=project_size,
            step_samples=step_samples if may_accumulate else None,
            accumulate_grad_batches=accumulate,
        )
        with noted_errors(lambda: self._first_size):
            program.restart(self._first_size)
        return program

    def evaluation(
        self, clean_start: CleanStart, setting: BatchSizeSetting
    ) -> TrainerProgram | None:
        try:
            size = setting.project_budget if setting.is_budget else self._first_size
            loaders = setting.loaders_for(size, may_be_fixed=True)
            batches = self._batches(loaders, clean_start)
            if setting.is_budget:
                self._begin_at_smallest_budget(setting, loaders, batches, may_be_fixed=True)
            follows = loaders.follows
        except ValueError as error:
            # In a training this is an error. This stage may not be meant for BatchFinder.
            rank_zero_warn(str(error))
            follows = False
        if not all(self.ranks.exchange(follows)):
            return None
        steps = EvaluationSteps(self.trainer, stage_loop(self.trainer), loaders, batches)
        bounds = stage_bounds(self.trainer, setting.source.stage, loaders)
        return TrainerProgram(
            clean_start, setting, [setting.source], None, steps, bounds, loaders.set_sizes
        )

    def _validation_steps(
        self, setting: BatchSizeSetting, clean_start: CleanStart
    ) -> EvaluationSteps | None:
        """The steps of validation; ``None`` where there is none, or its loaders cannot be used."""
        trainer = self.trainer
        if not trainer.enable_validation or setting.source.is_empty:
            return None
        try:
            loaders = setting.loaders_for(self._first_size, may_be_fixed=True)
            batches = self._batches(loaders, clean_start)
            batches.prepare(self._first_size)
        except ValueError as error:
            rank_zero_warn(f"BatchFinder leaves validation out of the search: {error}")
            return None
        return EvaluationSteps(trainer, validation_loop(trainer), loaders, batches)

    def _begin_at_smallest_budget(
        self,
        setting: BatchSizeSetting,
        loaders: StageLoaders,
        batches: ProbeBatches,
        *,
        may_be_fixed: bool = False,
    ) -> None:
        """Let the search begin at the smallest budget that changes a batch.

        Raises:
            ValueError: if no loader follows the budget, unless they ``may_be_fixed``.
        """
        project_budget = setting.project_budget
        smallest = batches.smallest_useful_budget(
            project_budget, needs_two_samples=has_batch_norm(self.trainer.lightning_module)
        )
        if not (loaders.follows or may_be_fixed):
            raise ValueError(
                f"the batches of {loaders.hook} must change with `{setting.name}`, got the same"
                " batches at another value"
            )
        if self.options.max_batch_size is None and batches.has_constant_length(project_budget):
            raise ValueError(
                f"max_batch_size must be given, because {loaders.hook} has the same number of"
                f" batches with any `{setting.name}`, so the largest useful value is not known"
            )
        if self.options.min_batch_size is None:
            smallest = max(self.ranks.exchange(min(smallest, self.options.largest_size)))
            self.options = replace(self.options, min_batch_size=smallest)
            self._first_size = self.options.first_size(self.policy.first_size)

    def _batches(self, loaders: StageLoaders, clean_start: CleanStart) -> ProbeBatches:
        clean_start.restore_collate([info.loader for info in loaders.sized])
        return ProbeBatches(
            loaders,
            self.options.worst_case,
            policy=self.policy.reading,
            largest_size=self.options.largest_size,
            room_bytes=self.room.free_bytes(),
            reached=partial(
                reached_samples, self.trainer, loaders.stage, self.options.largest_size
            ),
        )

    def _begin_training(
        self,
        unfreeze: Callable[[], None],
        prepare: Callable[[], None],
        training: StageLoaders,
        validation: StageLoaders | None,
        batch_size: int,
    ) -> None:
        """Attach the loaders, configure optimizers, and call the hooks before the first step."""
        trainer = self.trainer
        attach_loaders(trainer, training, validation, batch_size)
        configure_optimizers_again(trainer)
        freeze(config.scheduler for config in trainer.strategy.lr_scheduler_configs)
        for hook in ("on_fit_start", "on_train_start"):
            call_module_hook(trainer, hook)
        # Lightning calls the hook of the callbacks before that of the module, which may read what
        # they have unfrozen. What the user's function makes would be lost in this hook.
        unfreeze()
        call_module_hook(trainer, "on_train_epoch_start")
        prepare()
