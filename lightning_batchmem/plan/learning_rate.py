"""The optimizer steps and the learning rate of a training at another batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_batchmem.plan.options import LearningRateScaling
from lightning_batchmem.plan.sizes import MicroBatch, micro_batches
from lightning_batchmem.plan.unit import Unit

# Beyond this ratio of batch sizes the rules are untested.
_TESTED_FACTOR = 8

# Source: Goyal et al. 2017, arXiv 1706.02677, for SGD (with momentum too); Malladi et al. 2022,
# arXiv 2205.10287, for Adam and RMSprop. AdamW is Adam where it decays nothing, and torch
# multiplies its decay by the learning rate.
_RULES: dict[str, LearningRateScaling] = {
    "SGD": "linear",
    "Adam": "sqrt",
    "AdamW": "sqrt",
    "RMSprop": "sqrt",
}


class Epoch(NamedTuple):
    """An epoch of the training on the rank with the fewest batches; ``inf`` where it is unknown."""

    batches: float = math.inf
    # In the unit of the batch size.
    samples: float = math.inf

    def samples_of_step(self, batch_size: int, accumulate_grad_batches: int) -> int:
        """The samples of a full optimizer step on a rank.

        Lightning makes a step at the end of an epoch in any case.
        """
        batches = min(accumulate_grad_batches, max(1.0, self.batches))
        return int(min(batches * batch_size, max(1.0, self.samples)))


def learning_rate_factor(
    scaling: LearningRateScaling, effective_batch_size: int, effective_batch_size_before: int
) -> float:
    """By how much the learning rate grows for another effective batch size."""
    ratio = effective_batch_size / effective_batch_size_before
    return ratio if scaling == "linear" else math.sqrt(ratio)


def learning_rate_note(optimizer_names: Sequence[str], before: int, after: int, unit: Unit) -> str:
    """A note for a run whose samples per optimizer step changed and whose learning rate did not.

    It is empty where the samples per optimizer step are the same.
    """
    if before == after or not optimizer_names:
        return ""
    names = list(dict.fromkeys(optimizer_names))
    listed = " and ".join(names)
    rule = _RULES.get(names[0])
    if rule is None or any(_RULES.get(name) != rule for name in names):
        return (
            f"An optimizer step has {unit.step_size(after)} instead of {before:,}, and no single"
            f" rule is known for {listed}. Tune the learning rate by hand."
        )
    factor = learning_rate_factor(rule, after, before)
    ratio = after / before
    untested = ""
    if max(ratio, 1 / ratio) > _TESTED_FACTOR:
        untested = f" (untested beyond {_TESTED_FACTOR} times the {unit.budget_name or 'samples'})"
    return (
        f"An optimizer step has {unit.step_size(after)} instead of {before:,}. For {listed},"
        f' lr_scaling="{rule}" multiplies the learning rate by {factor:,.4g}{untested}:'
        ' see "Choosing a batch size" in the documentation.'
    )


@dataclass(frozen=True)
class TrainingSetup:
    """The optimizer steps of a training before its search.

    Args:
        accumulate_grad_batches: batches to an optimizer step.
        ranks: processes that train together.
        effective_batch_size: samples per optimizer step over all ranks; ``None`` if unknown.
        learning_rate: the learning rate of the module; ``None`` if it is not a number.
        optimizer_names: the classes of the optimizers.
        unit: what the sizes count.
    """

    accumulate_grad_batches: int
    ranks: int
    effective_batch_size: int | None
    learning_rate: float | None
    optimizer_names: tuple[str, ...]
    unit: Unit = Unit()  # noqa: RUF009


@dataclass(frozen=True)
class OptimizerStep:
    """The optimizer steps of a training at the chosen size.

    Args:
        accumulate_grad_batches: batches to an optimizer step.
        effective_batch_size: samples to an optimizer step over all ranks; ``None`` in an
            evaluation.
        learning_rate: the new learning rate; ``None`` where it stays.
        learning_rate_before: the learning rate before that; ``None`` likewise.
        learning_rate_note: a sentence about a learning rate that should change; or empty.
        notes: sentences about the accumulation.
    """

    accumulate_grad_batches: int = 1
    effective_batch_size: int | None = None
    learning_rate: float | None = None
    learning_rate_before: float | None = None
    learning_rate_note: str = ""
    notes: tuple[str, ...] = ()


def optimizer_step(
    setup: TrainingSetup,
    batch_size: int,
    epoch: Epoch,
    *,
    target_batch_size: int | None,
    multiple_of: int | None,
    lr_scaling: LearningRateScaling | None,
) -> OptimizerStep:
    """The optimizer steps at ``batch_size``, at which ``epoch`` is an epoch of the training."""
    notes = []
    accumulate = setup.accumulate_grad_batches
    if target_batch_size is not None:
        micro = micro_batches(target_batch_size, setup.ranks, multiple_of)[batch_size]
        accumulate = micro.accumulate_grad_batches
        if micro.effective_batch_size != target_batch_size:
            notes.append(_rounded_target(micro, target_batch_size, setup))
    if epoch.batches < accumulate:
        notes.append(
            f"An optimizer step takes {accumulate} batches, but an epoch ends after"
            f" {max(1, int(epoch.batches))}, so the step has fewer."
        )
    effective = epoch.samples_of_step(batch_size, accumulate) * setup.ranks
    before = setup.effective_batch_size
    rate = setup.learning_rate
    if before is not None and lr_scaling is not None and rate is not None:
        new_rate = rate * learning_rate_factor(lr_scaling, effective, before)
        return OptimizerStep(accumulate, effective, new_rate, rate, notes=tuple(notes))
    note = ""
    if before is not None:
        note = learning_rate_note(setup.optimizer_names, before, effective, setup.unit)
    return OptimizerStep(accumulate, effective, learning_rate_note=note, notes=tuple(notes))


def _rounded_target(micro: MicroBatch, target_batch_size: int, setup: TrainingSetup) -> str:
    on_ranks = f" on each of {setup.ranks} ranks" if setup.ranks > 1 else ""
    return (
        f"An optimizer step has {setup.unit.step_size(micro.effective_batch_size)}, not the"
        f" {target_batch_size:,} of target_batch_size: {micro.accumulate_grad_batches:,} x"
        f" {micro.batch_size:,}{on_ranks}."
    )
