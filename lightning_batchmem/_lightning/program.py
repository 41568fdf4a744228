"""A Trainer as the program of a search: a training with its validation, or one evaluation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from lightning_batchmem._lightning.clean_start import CleanStart
from lightning_batchmem._lightning.data_source import DataSource
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.steps import EvaluationSteps, TrainingSteps
from lightning_batchmem._lightning.strategies import (
    has_batch_norm,
    steps_are_collective,
    without_synchronization,
)
from lightning_batchmem.batches.probe_batches import ProbeBatches
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.records import Bound
from lightning_batchmem.search.program import Program

# Losses that differ by at most this share are the same: sums on a GPU have no fixed order.
_SAME_LOSS_SHARE = 1e-3


class TrainerProgram(Program):
    """One stage of a Trainer, as the program of a search.

    Args:
        clean_start: the state in which the stage starts, entered.
        setting: the place of the batch size.
        sources: the origins of all loaders.
        training: the training steps.
        evaluation: the evaluation steps.
        bounds_of_stage: the largest sizes that data and settings allow.
        begin_stage: runs what comes before the first step at a batch size, which hooks may read.
        later: the program in the later state of the training, made in the same ``clean_start``.
        project_batch_size: the size of the project; ``None`` where it is not known.
        step_samples: samples of its optimizer step on a rank, which accumulation may keep; ``None``
            if it may not.
        accumulate_grad_batches: batches to an optimizer step of the project.
    """

    def __init__(
        self,
        clean_start: CleanStart,
        setting: BatchSizeSetting,
        sources: Sequence[DataSource],
        training: TrainingSteps | None,
        evaluation: EvaluationSteps | None,
        bounds_of_stage: list[Bound],
        begin_stage: Callable[[int], None],
        later: TrainerProgram | None = None,
        *,
        project_batch_size: int | None = None,
        step_samples: int | None = None,
        accumulate_grad_batches: int = 1,
    ) -> None:
        trainer = setting.trainer
        self.module = trainer.lightning_module
        self.device = trainer.strategy.root_device
        self.phases = clean_start.phases
        self.training: TrainingSteps | None = training
        self.evaluation: EvaluationSteps | None = evaluation
        self._clean_start = clean_start
        self._again = clean_start.reset
        self._setting = setting
        self._sources = sources
        self._bounds = bounds_of_stage
        self._begin_stage = begin_stage
        self._all_steps = [steps for steps in (training, evaluation) if steps is not None]
        # The search itself accumulates at most two batches.
        self.accumulate_grad_batches = accumulate_grad_batches
        self.project_batch_size = project_batch_size
        self.step_samples = step_samples
        # What accumulation keeps in each optimizer step over all ranks; None for nothing.
        self.samples_per_step: int | None = None
        if later is not None:
            self.later = later._with_caches()
        self.evaluates_first = bool(trainer.num_sanity_val_steps)
        self.steps_are_collective = steps_are_collective(trainer)
        self.is_ragged = any(steps.batches.is_ragged for steps in self._all_steps)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return self._setting.trainer.optimizers

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

    @property
    def largest_batch_bytes(self) -> int:
        return self._clean_start.search_callback.largest_batch_bytes

    def longest_sample_note(self, batch_size: int) -> str:
        """A sentence about a size whose training batches have the longest samples only."""
        return self._all_steps[0].batches.longest_sample_note(batch_size)

    def kept_size_note(self, project_size: int | None) -> str:
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
        if self.training is None or not has_batch_norm(self.module):
            return set()
        return {
            size
            for info in self._all_steps[0].loaders.sized
            for size in info.sizes_with_last_of_one()
            if info.may_end_smaller(size, self.batches_in_epoch(size))
        }

    def batches_in_epoch(self, batch_size: int) -> float:
        return self._all_steps[0].batches_in_epoch(batch_size)

    def batches_in_training(self, batch_size: int) -> float:
        in_epoch = self.batches_in_epoch(batch_size)
        if self.training is None:
            return in_epoch
        trainer = self._setting.trainer
        max_epochs = trainer.max_epochs
        epochs = math.inf
        if max_epochs is not None and max_epochs >= 0:
            epochs = max(1, max_epochs - trainer.current_epoch)
        batches = in_epoch * epochs
        if trainer.max_steps > 0:
            accumulate = self.accumulate_grad_batches
            if self.samples_per_step is not None:
                accumulate = -(-self.samples_per_step // (batch_size * trainer.world_size))
            return min(batches, trainer.max_steps * accumulate)
        return batches

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
        self._again()
        for source in self._sources:
            source.set_attributes_of_hook()
        self._setting.write(batch_size)
        if self.samples_per_step is not None:
            # With two micro batches, gradients are alive in backward too.
            self._setting.trainer.accumulate_grad_batches = 2
        self._begin_stage(batch_size)

    def accumulate(self, samples_per_step: int) -> None:
        self.samples_per_step = samples_per_step
        if self.later is not None:
            self.later.accumulate(samples_per_step)

    @property
    def follows_validation(self) -> bool:
        """Whether the batches of all validation loaders have the batch size too."""
        steps = self.evaluation
        return steps is not None and all(loader.follows for loader in steps.loaders.sized)

    def loss_of_copies(self, batch_size: int) -> float | None:
        training = self.training
        if training is None:
            return None
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

    def without_synchronization(self) -> AbstractContextManager[None]:
        return without_synchronization(self._setting.trainer)

    def checkpoint_states(self) -> list[object]:
        if self.training is None or not self._clean_start.saves_checkpoints:
            return []
        # A callback may make its state in a hook that has not run yet, or count its calls.
        return [self.module.state_dict(), *(optimizer.state for optimizer in self.optimizers)]

    def _with_caches(self) -> TrainerProgram:
        """The same program, which keeps the caches of the device in a restart."""
        program = copy.copy(self)
        program._again = self._clean_start.reset_with_caches
        return program
