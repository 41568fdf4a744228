"""The user's training step, or the evaluation step of a stage, on batches of the search."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

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
from lightning_batchmem.devices.tensors import list_state_bytes
from lightning_batchmem.measure.batches import ProbeBatches
from lightning_batchmem.plan.records import mib


class TrainingSteps:
    """The user's training step in Lightning's own loop.

    Args:
        trainer: during a search.
        probe_batches: of the training loaders.
        batches: batches in an epoch at a batch size.
    """

    first_phase = "forward"

    def __init__(self, trainer: Trainer, probe_batches: ProbeBatches, batches: Callable[[int], float]) -> None:
        self.probe_batches = probe_batches
        self._trainer = trainer
        self._batches = batches
        self._growth = MetricGrowth(trainer.lightning_module)

    def begin(self, batch_size: int) -> int:
        """Make the next step the first of an epoch, and return the calls of :meth:`run` to a full step."""
        self._growth.begin(batch_size)
        return begin_epoch(self._trainer, self._batches(batch_size)) * self.probe_batches.loaders_in_turn

    def run(self, batch_size: int, index: int, *, varied: bool = False) -> None:
        """Run a training step; under gradient accumulation, a micro batch."""
        run_step(self._trainer, lambda: _batch(self.probe_batches, batch_size, index, varied)[0])
        self._growth.count()

    def end(self) -> None:
        """Nothing to undo."""

    def let_go(self) -> None:
        """Drop what a failed step still holds: gradients, a half-made optimizer state, the batch."""
        for parameter in self._trainer.lightning_module.parameters():
            parameter.grad = None
        for optimizer in self._trainer.optimizers:
            optimizer.state.clear()
        drop_batch(self._trainer)

    def growth_notes(self, batch_size: int) -> tuple[str, ...]:
        """A sentence for each metric that grows with every step."""
        return self._growth.notes(batch_size, self._batches(batch_size))


class EvaluationSteps:
    """The user's validation, test or prediction step in Lightning's own loop, without gradients.

    Args:
        trainer: during a search.
        loop: of the stage.
        loaders: the stage's loaders.
        probe_batches: of these loaders.
    """

    first_phase = "evaluation"

    def __init__(
        self, trainer: Trainer, loop: EvaluationLoop, loaders: StageLoaders, probe_batches: ProbeBatches
    ) -> None:
        self.probe_batches = probe_batches
        self.loaders = loaders
        self._trainer = trainer
        self._loop = loop
        self._growth = MetricGrowth(trainer.lightning_module)

    def begin(self, batch_size: int) -> int:
        """Enter the evaluation with the module's hooks, and return the calls of :meth:`run` to a full step."""
        begin_evaluation(self._trainer, self._loop, self.loaders.combined, self.loaders.batches(batch_size))
        self._growth.begin(batch_size)
        return self.probe_batches.loaders_in_turn

    def run(self, batch_size: int, index: int, *, varied: bool = False) -> None:
        """Run an evaluation step."""
        run_evaluation_step(self._loop, lambda: _batch(self.probe_batches, batch_size, index, varied))
        self._growth.count()

    def end(self) -> None:
        """Leave the evaluation."""
        end_evaluation(self._trainer, self._loop)

    def let_go(self) -> None:
        """Nothing is held."""

    def growth_notes(self, batch_size: int) -> tuple[str, ...]:
        """A sentence for each metric that grows with every step."""
        return self._growth.notes(batch_size, self.loaders.batches(batch_size))


Steps = TrainingSteps | EvaluationSteps


def _batch(probe_batches: ProbeBatches, batch_size: int, index: int, varied: bool) -> tuple[Any, int]:
    return (probe_batches.varied_batch if varied else probe_batches.batch)(batch_size, index)


class MetricGrowth:
    """Growth of torchmetrics' list states with each step, which a few steps cannot measure."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._batch_size = self._calls = 0
        self._bytes_before: dict[str, int] = {}
        self._grown: dict[int, dict[str, float]] = {}

    def begin(self, batch_size: int) -> None:
        """Start to count steps of ``batch_size`` samples."""
        self._batch_size, self._calls = batch_size, 0
        self._bytes_before = list_state_bytes(self._module)

    def count(self) -> None:
        """Count a step that has run."""
        self._calls += 1
        now = list_state_bytes(self._module)
        grown = {name: (size - self._bytes_before.get(name, 0)) / self._calls for name, size in now.items()}
        self._grown[self._batch_size] = {name: size for name, size in grown.items() if size > 0}

    def notes(self, batch_size: int, batches: float) -> tuple[str, ...]:
        """A sentence, also a warning, for each metric that grows in steps of ``batch_size`` samples."""
        notes = []
        for name, grown in self._grown.get(batch_size, {}).items():
            total = f", {mib(grown * batches)} in an epoch" if math.isfinite(batches) else ""
            notes.append(
                f"The metric {name!r} grows by {mib(grown)} in every step{total}. This is not part of the measured"
                " peak: use a metric without list states, or lower memory_limit."
            )
            rank_zero_warn(notes[-1])
        return tuple(notes)
