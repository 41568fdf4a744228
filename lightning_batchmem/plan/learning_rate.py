"""The optimizer steps and the learning rate of a training at another batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_batchmem.plan import sentences
from lightning_batchmem.plan.records import LearningRateScaling
from lightning_batchmem.plan.sizes import micro_batches

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


def learning_rate_factor(
    scaling: LearningRateScaling, effective_batch_size: int, effective_batch_size_before: int
) -> float:
    """By how much the learning rate grows for another effective batch size."""
    ratio = effective_batch_size / effective_batch_size_before
    return ratio if scaling == "linear" else math.sqrt(ratio)


def learning_rate_note(
    optimizer_names: Sequence[str], before: int, after: int, budget_name: str | None = None
) -> str:
    """A note for a run whose samples per optimizer step changed and whose learning rate did not.

    It is empty where the samples per optimizer step are the same. With a ``budget_name`` both
    numbers are budgets.
    """
    if before == after or not optimizer_names:
        return ""
    names = list(dict.fromkeys(optimizer_names))
    listed = " and ".join(names)
    rule = _RULES.get(names[0])
    if rule is None or any(_RULES.get(name) != rule for name in names):
        return sentences.no_learning_rate_rule(before, after, listed, budget_name)
    factor = learning_rate_factor(rule, after, before)
    return sentences.learning_rate_rule(
        before, after, listed, budget_name, rule, factor, _TESTED_FACTOR
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
        budget_name: the budget that sizes are values of; ``None`` where they count samples.
    """

    accumulate_grad_batches: int
    ranks: int
    effective_batch_size: int | None
    learning_rate: float | None
    optimizer_names: tuple[str, ...]
    budget_name: str | None = None


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
    epoch_batches: float,
    *,
    target_batch_size: int | None,
    multiple_of: int | None,
    lr_scaling: LearningRateScaling | None,
) -> OptimizerStep:
    """The optimizer steps at ``batch_size``; an epoch has ``epoch_batches`` batches then."""
    notes = []
    accumulate = setup.accumulate_grad_batches
    if target_batch_size is not None:
        micro = micro_batches(target_batch_size, setup.ranks, multiple_of)[batch_size]
        accumulate = micro.accumulate_grad_batches
        if micro.effective_batch_size != target_batch_size:
            rounding = sentences.rounded_target(
                micro.effective_batch_size,
                target_batch_size,
                accumulate,
                batch_size,
                setup.ranks,
                setup.budget_name,
            )
            notes.append(rounding)
    batches_per_step = accumulate
    # Lightning makes an optimizer step at the end of an epoch in any case.
    if epoch_batches < accumulate:
        batches_per_step = max(1, int(epoch_batches))
        notes.append(sentences.short_epoch(batches_per_step, accumulate))
    effective = batch_size * batches_per_step * setup.ranks
    before = setup.effective_batch_size
    rate = setup.learning_rate
    if before is not None and lr_scaling is not None and rate is not None:
        new_rate = rate * learning_rate_factor(lr_scaling, effective, before)
        return OptimizerStep(accumulate, effective, new_rate, rate, notes=tuple(notes))
    note = ""
    if before is not None:
        note = learning_rate_note(setup.optimizer_names, before, effective, setup.budget_name)
    return OptimizerStep(accumulate, effective, learning_rate_note=note, notes=tuple(notes))
