"""The user's training step, or the evaluation step of a stage, on batches of the search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning.pytorch import Trainer

from lightning_batchmem._lightning.run_step import (
    EvaluationLoop,
    begin_epoch,
    begin_evaluation,
    drop_batch,
    end_evaluation,
    run_evaluation_step,
    run_step,
)
from lightning_batchmem.batches.loaders import StageLoaders
from lightning_batchmem.batches.probe_batches import ProbeBatches


@dataclass(eq=False)
class TrainingSteps:
    """The user's training step in Lightning's own loop."""

    first_phase = "forward"
    trainer: Trainer
    probe_batches: ProbeBatches
    batches: Callable[[int], float]

    def begin(self, batch_size: int) -> int:
        """Make the next step the first of an epoch.

        Return the number of calls of :meth:`run` in a full step.
        """
        micro_batches = begin_epoch(self.trainer, self.batches(batch_size))
        return micro_batches * self.probe_batches.loaders_in_turn

    def run(self, batch_size: int, index: int, *, varied: bool = False) -> None:
        """Run a training step; under gradient accumulation, a micro batch."""
        batches = self.probe_batches
        make = batches.other_lengths if varied else batches.batch
        run_step(self.trainer, lambda: make(batch_size, index)[0])

    def end(self) -> None:
        """Nothing to undo."""

    def release(self) -> None:
        """Drop gradients, a half-made optimizer state and the batch, which a failed step holds."""
        for parameter in self.trainer.lightning_module.parameters():
            parameter.grad = None
        for optimizer in self.trainer.optimizers:
            optimizer.state.clear()
        drop_batch(self.trainer.fit_loop.epoch_loop)


@dataclass(eq=False)
class EvaluationSteps:
    """The user's validation, test or prediction step in Lightning's own loop, without gradients."""

    first_phase = "evaluation"
    trainer: Trainer
    loop: EvaluationLoop
    loaders: StageLoaders
    probe_batches: ProbeBatches

    def begin(self, batch_size: int) -> int:
        """Enter the evaluation with the module's hooks.

        Return the number of calls of :meth:`run` in a full step.
        """
        begin_evaluation(
            self.trainer, self.loop, self.loaders.combined, self.loaders.batches(batch_size)
        )
        return self.probe_batches.loaders_in_turn

    def run(self, batch_size: int, index: int, *, varied: bool = False) -> None:
        batches = self.probe_batches
        make = batches.other_lengths if varied else batches.batch
        run_evaluation_step(self.loop, lambda: make(batch_size, index))

    def end(self) -> None:
        end_evaluation(self.trainer, self.loop)

    def release(self) -> None:
        """Nothing is held."""


Steps = TrainingSteps | EvaluationSteps
