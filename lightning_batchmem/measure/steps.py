"""The user's training step, or the evaluation step of a stage, on batches of the search."""

from __future__ import annotations

from collections.abc import Callable

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
from lightning_batchmem.apply.loaders import StageLoaders
from lightning_batchmem.measure.batches import ProbeBatches


class TrainingSteps:
    """The user's training step in Lightning's own loop."""

    first_phase = "forward"

    def __init__(self, trainer: Trainer, probe_batches: ProbeBatches, batches: Callable[[int], float]) -> None:
        self.probe_batches = probe_batches
        self._trainer = trainer
        self._batches = batches

    def begin(self, batch_size: int) -> int:
        """Make the next step the first of an epoch, and return the calls of :meth:`run` to a full step."""
        return begin_epoch(self._trainer, self._batches(batch_size)) * self.probe_batches.loaders_in_turn

    def run(self, batch_size: int, index: int, *, varied: bool = False) -> None:
        """Run a training step; under gradient accumulation, a micro batch."""
        run_step(self._trainer, lambda: self.probe_batches.batch(batch_size, index, varied=varied)[0])

    def end(self) -> None:
        """Nothing to undo."""

    def release(self) -> None:
        """Drop what a failed step still holds: gradients, a half-made optimizer state, the batch."""
        for parameter in self._trainer.lightning_module.parameters():
            parameter.grad = None
        for optimizer in self._trainer.optimizers:
            optimizer.state.clear()
        drop_batch(self._trainer)


class EvaluationSteps:
    """The user's validation, test or prediction step in Lightning's own loop, without gradients."""

    first_phase = "evaluation"

    def __init__(
        self, trainer: Trainer, loop: EvaluationLoop, loaders: StageLoaders, probe_batches: ProbeBatches
    ) -> None:
        self.probe_batches = probe_batches
        self.loaders = loaders
        self._trainer = trainer
        self._loop = loop

    def begin(self, batch_size: int) -> int:
        """Enter the evaluation with the module's hooks, and return the calls of :meth:`run` to a full step."""
        begin_evaluation(self._trainer, self._loop, self.loaders.combined, self.loaders.batches(batch_size))
        return self.probe_batches.loaders_in_turn

    def run(self, batch_size: int, index: int, *, varied: bool = False) -> None:
        """Run an evaluation step."""
        run_evaluation_step(self._loop, lambda: self.probe_batches.batch(batch_size, index, varied=varied))

    def end(self) -> None:
        """Leave the evaluation."""
        end_evaluation(self._trainer, self._loop)

    def release(self) -> None:
        """Nothing is held."""


Steps = TrainingSteps | EvaluationSteps
