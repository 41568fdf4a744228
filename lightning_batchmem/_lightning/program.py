"""A Trainer as the program of a search: a training with its validation, or one evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from lightning_batchmem._lightning.bounds import stage_bounds, training_bounds, why_not_accumulate
from lightning_batchmem._lightning.clean_start import CleanStart
from lightning_batchmem._lightning.data_source import DataSource, attach_loaders
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.steps import EvaluationSteps, TrainingSteps
from lightning_batchmem._lightning.strategies import (
    has_batch_norm,
    steps_are_collective,
    without_synchronization,
)
from lightning_batchmem._lightning.trainer_state import call_module_hook
from lightning_batchmem._lightning.training_state import TrainingState, most_epochs
from lightning_batchmem.batches.loaders import StageLoaders
from lightning_batchmem.batches.probe_batches import ProbeBatches
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.recipe import Recipe
from lightning_batchmem.plan.records import Bound
from lightning_batchmem.search.program import Program
from lightning_batchmem.search.ranks import Ranks

# Losses that differ by at most this share are the same: sums on a GPU have no fixed order.
_SAME_LOSS_SHARE = 1e-3


def from_smallest_budget(
    setting: BatchSizeSetting,
    loaders: StageLoaders,
    batches: ProbeBatches,
    options: SearchOptions,
    ranks: Ranks,
    *,
    may_be_fixed: bool = False,
) -> SearchOptions:
    """Options whose search begins at the smallest budget that changes a batch.

    Raises:
        ValueError: if no loader follows the budget, unless they ``may_be_fixed``.
    """
    project_budget = setting.project_budget
    smallest = batches.smallest_useful_budget(
        project_budget, needs_two_samples=has_batch_norm(setting.module)
    )
    if not (loaders.follows or may_be_fixed):
        raise ValueError(
            f"the batches of {loaders.hook} must change with `{setting.name}`, got the same"
            " batches at another value"
        )
    if options.max_batch_size is None and batches.has_constant_length(project_budget):
        raise ValueError(
            f"max_batch_size must be given, because {loaders.hook} has the same number of"
            f" batches with any `{setting.name}`, so the largest useful value is not known"
        )
    if options.min_batch_size is not None:
        return options
    smallest = max(ranks.exchange(min(smallest, options.largest_size)))
    return replace(options, min_batch_size=smallest)


class StageProgram(Program):
    """One stage of a Trainer.

    Args:
        clean_start: the state in which the stage starts, entered.
        setting: the place of the batch size.
        sources: the origins of all loaders.
        steps: the steps of the stage; those whose number and times count come first.
    """

    def __init__(
        self,
        clean_start: CleanStart,
        setting: BatchSizeSetting,
        sources: Sequence[DataSource],
        steps: Sequence[TrainingSteps | EvaluationSteps],
    ) -> None:
        trainer = setting.trainer
        self.trainer = trainer
        self.module = trainer.lightning_module
        self.device = trainer.strategy.root_device
        self.phases = clean_start.phases
        self.steps_are_collective = steps_are_collective(trainer)
        self.is_ragged = any(one.batches.is_ragged for one in steps)
        self._clean_start = clean_start
        self._setting = setting
        self._sources = sources
        self._all_steps = steps
        self._keeps_caches = False

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return self.trainer.optimizers

    @property
    def batches(self) -> list[ProbeBatches]:
        """The batches of all steps, whose workers are alive at the same time."""
        return [steps.batches for steps in self._all_steps]

    @property
    def notes(self) -> list[Note]:
        return [
            replace(note, text=f"{steps.loaders.hook}: {note}")
            for steps in self._all_steps
            for note in steps.batches.notes
        ]

    def batches_in_epoch(self, batch_size: int) -> float:
        return self._all_steps[0].batches_in_epoch(batch_size)

    def batches_in_training(self, batch_size: int) -> float:
        return self.batches_in_epoch(batch_size)

    def shared_bytes(self, batch_size: int) -> int:
        return sum(batches.shared_bytes(batch_size) for batches in self.batches)

    def worker_bytes(self, batch_size: int) -> int:
        return sum(batches.worker_bytes(batch_size) for batches in self.batches)

    def sample_sizes(self) -> list[Any]:
        return [(batches.longest_bytes, batches.notes) for batches in self.batches]

    def use_sample_sizes(self, of_ranks: Sequence[list[Any]]) -> None:
        # Either all ranks have a validation or none.
        for batches, sizes in zip(self.batches, zip(*of_ranks, strict=True), strict=True):
            batches.agree(sizes)

    def check_batch_size(self, batch_size: int) -> None:
        self._setting.check_loaders(batch_size, self._all_steps[0].loaders)

    def restart(self, batch_size: int) -> None:
        if self._keeps_caches:
            self._clean_start.reset_with_caches()
        else:
            self._clean_start.reset()
        for source in self._sources:
            source.set_attributes_of_hook()
        self._setting.write(batch_size)
        self._begin(batch_size)

    def keep_caches(self) -> None:
        """Keep the caches of the device in each further restart."""
        self._keeps_caches = True

    def without_synchronization(self) -> AbstractContextManager[None]:
        if self.steps_are_collective:
            # Where the other ranks do not exist, these steps run with their collectives.
            return nullcontext()
        return without_synchronization(self.trainer)

    def _begin(self, batch_size: int) -> None:
        """Run what comes before the first step at a batch size, which hooks may read."""
        raise NotImplementedError


class EvaluationProgram(StageProgram):
    """A validation, test or prediction by itself.

    Args:
        clean_start: the state in which it starts, entered.
        setting: the place of the batch size.
        steps: its steps.
    """

    def __init__(
        self, clean_start: CleanStart, setting: BatchSizeSetting, steps: EvaluationSteps
    ) -> None:
        super().__init__(clean_start, setting, [setting.source], [steps])
        self.evaluation: EvaluationSteps = steps

    def bounds(self) -> list[Bound]:
        setting = self._setting
        return stage_bounds(setting.trainer, setting.source.stage, self.evaluation.loaders)

    def _begin(self, batch_size: int) -> None:
        self.evaluation.loaders.set_sizes(batch_size)


class TrainingProgram(StageProgram):
    """A training with its validation.

    Args:
        clean_start: the state in which it starts, entered.
        setting: the place of the batch size, which the loaders follow.
        sources: the origins of all loaders.
        training: the training steps.
        evaluation: the steps of the validation; ``None`` for none.
        before: the optimizer steps of the project.
        options: the arguments of BatchFinder.
        policy: the numbers that steer the search.
        state: the state of the training in which trials run.
        rehearsed_after: the program in another state, made in the same ``clean_start``; ``None``
            for none.

    Attributes:
        samples_per_step: what accumulation keeps in each optimizer step over all ranks; ``None``
            for nothing.
    """

    def __init__(
        self,
        clean_start: CleanStart,
        setting: BatchSizeSetting,
        sources: Sequence[DataSource],
        training: TrainingSteps,
        evaluation: EvaluationSteps | None,
        before: Recipe,
        options: SearchOptions,
        policy: SearchPolicy,
        state: TrainingState,
        rehearsed_after: TrainingProgram | None,
    ) -> None:
        all_steps: list[TrainingSteps | EvaluationSteps] = [training]
        if evaluation is not None:
            all_steps.append(evaluation)
        super().__init__(clean_start, setting, sources, all_steps)
        trainer = setting.trainer
        loaders = training.loaders
        self.training: TrainingSteps = training
        self.evaluation: EvaluationSteps | None = evaluation
        self.evaluates_first = bool(trainer.num_sanity_val_steps)
        self.rehearsed_after: TrainingProgram | None = rehearsed_after
        if rehearsed_after is not None:
            rehearsed_after.keep_caches()
        # The search itself accumulates at most two batches.
        self.accumulate_grad_batches = before.accumulate_grad_batches
        step_samples = (before.effective_batch_size or 0) // before.ranks
        # No batch is larger than an epoch.
        project_size = min(before.batch_size or 0, step_samples) or None
        is_kept = options.objective == "recipe" or setting.is_budget
        if step_samples <= policy.first_size and not is_kept:
            # It is a placeholder.
            project_size = None
        self.project_batch_size = project_size
        may_accumulate = (
            project_size is not None
            and options.objective in ("auto", "recipe")
            and not why_not_accumulate(trainer, loaders, is_budget=setting.is_budget)
        )
        self.step_samples = step_samples if may_accumulate else None
        self.samples_per_step: int | None = None
        keeps_step = may_accumulate and options.keeps_step(before.accumulate_grad_batches)
        self._bounds = training_bounds(
            trainer,
            loaders,
            None if evaluation is None else evaluation.loaders,
            options,
            policy,
            project_size,
            keeps_step=keeps_step or options.target_batch_size is not None,
        )
        largest_size = min([options.largest_size, *(size for size, _ in self._bounds)])
        self._most_epochs = most_epochs(trainer, training.batches_in_epoch(largest_size))
        self._state = state

    @property
    def largest_batch_bytes(self) -> int:
        return self._clean_start.search_callback.largest_batch_bytes

    def longest_sample_text(self, plan: Plan, project_size: int | None, ranks: Ranks) -> str:
        """A sentence about a size that the longest samples keep below the project's."""
        # The samples of this rank may be others.
        note = ranks.exchange(self.training.batches.longest_sample_text(plan.batch_size))[0]
        is_smaller = plan.batch_size < (project_size or 0)
        return note if is_smaller and plan.limited_by == "memory" else ""

    def kept_size_text(self, project_size: int | None) -> str:
        """A sentence about loaders of a validation that keep the size of the project."""
        if self.evaluation is None or self.evaluation.loaders.follows:
            return ""
        loaders = self.evaluation.loaders
        if project_size not in [loader.size_at(1) for loader in loaders.sized]:
            return ""
        return f"The loaders of {loaders.hook} keep your batch size, {project_size}."

    def bounds(self) -> list[Bound]:
        return self._bounds

    def avoided_sizes(self) -> set[int]:
        if not has_batch_norm(self.module):
            return set()
        return {
            size
            for info in self.training.loaders.sized
            for size in info.sizes_with_last_of_one()
            if info.may_end_smaller(size, self.batches_in_epoch(size))
        }

    def batches_in_training(self, batch_size: int) -> float:
        trainer = self.trainer
        max_epochs = trainer.max_epochs
        epochs = math.inf
        if max_epochs is not None and max_epochs >= 0:
            epochs = max(1, max_epochs - trainer.current_epoch)
        batches = self.batches_in_epoch(batch_size) * epochs
        if trainer.max_steps > 0:
            accumulate = self.accumulate_grad_batches
            if self.samples_per_step is not None:
                accumulate = -(-self.samples_per_step // (batch_size * trainer.world_size))
            return min(batches, trainer.max_steps * accumulate)
        return batches

    def accumulate(self, samples_per_step: int) -> None:
        self.samples_per_step = samples_per_step
        if self.rehearsed_after is not None:
            self.rehearsed_after.accumulate(samples_per_step)

    @property
    def follows_validation(self) -> bool:
        """Whether the batches of all validation loaders have the batch size too."""
        steps = self.evaluation
        return steps is not None and all(loader.follows for loader in steps.loaders.sized)

    def loss_of_copies(self, batch_size: int) -> float | None:
        training = self.training
        self.restart(batch_size)
        callback = self._clean_start.search_callback
        callback.record_losses()
        with self.without_synchronization():
            training.begin(batch_size)
            try:
                for _ in range(2):
                    training.make_copies(batch_size)
                    training.run()
            finally:
                training.end()
        losses = callback.losses
        # The loss of the same batch differs where it is random.
        if losses and abs(losses[0] - losses[-1]) <= _SAME_LOSS_SHARE * abs(losses[0]):
            return float(losses[0])
        return None

    def checkpoint_states(self) -> list[object]:
        if not self._clean_start.saves_checkpoints:
            return []
        # A callback may make its state in a hook that has not run yet, or count its calls.
        return [self.module.state_dict(), *(optimizer.state for optimizer in self.optimizers)]

    def _begin(self, batch_size: int) -> None:
        """Attach the loaders, configure optimizers, and call the hooks before the first step."""
        trainer = self.trainer
        if self.samples_per_step is not None:
            # With two micro batches, gradients are alive in backward too.
            trainer.accumulate_grad_batches = 2
        validation_loaders = None if self.evaluation is None else self.evaluation.loaders
        attach_loaders(trainer, self.training.loaders, validation_loaders, batch_size)
        self._clean_start.start_training()
        # Lightning calls the hook of the callbacks before the module's, which may read what
        # they have unfrozen. What the user's function makes would be lost in this hook.
        self._state.unfreeze(self._most_epochs)
        call_module_hook(trainer, "on_train_epoch_start")
        self._state.prepare()
