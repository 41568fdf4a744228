"""What a probe runs: the user's training step, or the evaluation step of a stage, on samples that are at hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

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
from lightning_batchmem.apply.batch_size import ProbeBatches, StageLoaders
from lightning_batchmem.measure.breakdown import list_state_bytes
from lightning_batchmem.plan.records import mib


class Steps(Protocol):
    """Steps of one kind.

    Attributes:
        first_phase: the phase in which each call of :meth:`run` begins.
    """

    first_phase: str

    def begin(self, batch_size: int) -> int:
        """Get ready for steps of ``batch_size`` samples; returns how many calls of :meth:`run` make a full step."""
        ...

    def run(self, batch_size: int, index: int) -> None:
        """Run the ``index``-th call since :meth:`begin`."""
        ...

    def end(self) -> None:
        """Undo :meth:`begin`, whatever became of the steps."""
        ...

    def let_go(self) -> None:
        """Give back what a step that was cut short still holds."""
        ...


class TrainingSteps:
    """The user's real training step in Lightning's own loop.

    Args:
        trainer: in a search.
        samples: drawn from the training loaders.
        batches: batches in an epoch at a batch size, as the module is to see them.
    """

    first_phase = "forward"

    def __init__(self, trainer: Trainer, samples: ProbeBatches, batches: Callable[[int], float]) -> None:
        self._trainer = trainer
        self._samples = samples
        self._batches = batches
        self._growth = MetricGrowth(trainer.lightning_module)

    def begin(self, batch_size: int) -> int:
        """Let the next step be the first of an epoch."""
        self._growth.begin(batch_size)
        return begin_epoch(self._trainer, self._batches(batch_size)) * self._samples.round

    def run(self, batch_size: int, index: int) -> None:
        """Run a training step; under gradient accumulation, a micro batch."""
        run_step(self._trainer, lambda: self._samples.batch(batch_size, index)[0])
        self._growth.count()

    def end(self) -> None:
        """Nothing to undo."""

    def let_go(self) -> None:
        """Drop gradients and the batch that the loop's results hold."""
        for parameter in self._trainer.lightning_module.parameters():
            parameter.grad = None
        drop_batch(self._trainer)

    def growth_notes(self, batch_size: int) -> tuple[str, ...]:
        """What the steps cannot weigh, since it grows with each of them."""
        return self._growth.notes(batch_size, self._batches(batch_size))


class EvaluationSteps:
    """The user's real validation, test or prediction step in Lightning's own loop, without gradients.

    Args:
        trainer: in a search.
        loop: of the stage.
        loaders: the stage's loaders.
        samples: drawn from them.
    """

    first_phase = "evaluation"

    def __init__(self, trainer: Trainer, loop: EvaluationLoop, loaders: StageLoaders, samples: ProbeBatches) -> None:
        self._trainer = trainer
        self._loop = loop
        self._loaders = loaders
        self._samples = samples
        self._growth = MetricGrowth(trainer.lightning_module)

    def begin(self, batch_size: int) -> int:
        """Enter the evaluation, with the module's own hooks."""
        begin_evaluation(self._trainer, self._loop, self._loaders.combined, self._loaders.batches(batch_size))
        self._growth.begin(batch_size)
        return self._samples.round

    def run(self, batch_size: int, index: int) -> None:
        """Run an evaluation step."""
        run_evaluation_step(self._loop, lambda: self._samples.batch(batch_size, index))
        self._growth.count()

    def end(self) -> None:
        """Leave the evaluation: module and trainer as they were."""
        end_evaluation(self._trainer, self._loop)

    def let_go(self) -> None:
        """Nothing is held."""

    def growth_notes(self, batch_size: int) -> tuple[str, ...]:
        """What the steps cannot weigh, since it grows with each of them."""
        return self._growth.notes(batch_size, self._loaders.batches(batch_size))


class MetricGrowth:
    """By how much torchmetrics' list states grow with each step, which no probe of a few steps can weigh.

    Args:
        module: whose metrics are watched.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._batch_size = self._calls = 0
        self._bytes_before: dict[str, int] = {}
        self._grown: dict[int, dict[str, float]] = {}

    def begin(self, batch_size: int) -> None:
        """Steps of ``batch_size`` samples follow."""
        self._batch_size, self._calls = batch_size, 0
        self._bytes_before = list_state_bytes(self._module)

    def count(self) -> None:
        """A step has run."""
        self._calls += 1
        now = list_state_bytes(self._module)
        grown = {name: (size - self._bytes_before.get(name, 0)) / self._calls for name, size in now.items()}
        self._grown[self._batch_size] = {name: size for name, size in grown.items() if size > 0}

    def notes(self, batch_size: int, batches: float) -> tuple[str, ...]:
        """A sentence, which is also a warning, for each metric that steps of ``batch_size`` samples let grow.

        Args:
            batch_size: one of those that were run.
            batches: in an epoch; ``inf`` when unknown.
        """
        notes = []
        for name, grown in self._grown.get(batch_size, {}).items():
            until = f", {mib(grown * batches)} by the end of an epoch" if math.isfinite(batches) else ""
            notes.append(
                f"the metric {name!r} keeps what every step gives it: {mib(grown)} more with each one{until}, on top of"
                " what was measured"
            )
            rank_zero_warn(notes[-1])
        return tuple(notes)
