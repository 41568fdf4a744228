"""Allowed batch sizes, micro batches of an optimizer step, and learning rates."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from lightning_batchmem.plan import sentences
from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.records import LearningRateScaling

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


@dataclass(frozen=True)
class MicroBatch:
    """Division of an optimizer step: samples per rank, micro batches, and samples in all."""

    batch_size: int
    accumulate_grad_batches: int
    effective_batch_size: int


def micro_batch(
    target_batch_size: int, *, largest: int, ranks: int = 1, multiple_of: int | None = None
) -> MicroBatch:
    """Divide ``target_batch_size`` into micro batches of at most ``largest`` samples per rank.

    Up to twice as many micro batches as needed are accepted where they make exactly the target.
    Otherwise: as few as possible, of the size nearest to the target.
    """
    unit = multiple_of or 1
    fewest = math.ceil(target_batch_size / (ranks * (largest // unit * unit)))
    accumulate = fewest
    if target_batch_size % (ranks * unit) == 0:
        exact = _divisors(target_batch_size // (ranks * unit))
        smallest_exact = exact[bisect_left(exact, fewest)]
        if smallest_exact <= 2 * fewest:
            accumulate = smallest_exact
    # The size is rounded to the nearest unit, and half a unit up. It is never above `largest`,
    # because the share at `fewest` micro batches is at most the largest multiple.
    step_unit = accumulate * ranks * unit
    batch_size = unit * ((2 * target_batch_size + step_unit) // (2 * step_unit))
    return MicroBatch(batch_size, accumulate, batch_size * accumulate * ranks)


@cache
def _divisors(number: int) -> list[int]:
    """All divisors, the smallest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


@cache
def micro_batches(
    target_batch_size: int, ranks: int, multiple_of: int | None
) -> dict[int, MicroBatch]:
    """Every size that divides the target exactly or nearly so, largest first."""
    found: dict[int, MicroBatch] = {}
    largest = target_batch_size // ranks
    while largest >= (multiple_of or 1):
        micro = micro_batch(
            target_batch_size, largest=largest, ranks=ranks, multiple_of=multiple_of
        )
        found[micro.batch_size] = micro
        largest = micro.batch_size - 1
    return found


def accumulated_batches(batch_size: int, limits: SearchLimits) -> int:
    """Batches to an optimizer step in a training at ``batch_size`` samples."""
    target = limits.options.target_batch_size
    if target is None:
        return limits.accumulate_grad_batches
    micro = micro_batches(target, limits.ranks, limits.options.multiple_of)
    return micro[batch_size].accumulate_grad_batches


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
        learning_rate: the learning rate of the module; ``None`` if it is no number.
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


def size_range(limits: SearchLimits) -> tuple[int, int]:
    """Smallest and largest size that the rounding allows.

    The first is the larger one when there is no such size.
    """
    lowest = _nearest(max(1, limits.min_batch_size), limits, up=True)
    highest = rounded(limits.max_batch_size, limits)
    # The default rounding does not apply to the maximum: a cap of 100 is allowed as it is.
    options = limits.options
    if options.multiple_of is None and options.target_batch_size is None:
        highest = limits.max_batch_size
        while highest in limits.avoided_sizes and highest > lowest:
            highest -= 1
    return lowest, max(0, highest)


def rounded(size: int, limits: SearchLimits, up: bool = False) -> int:
    """Round down (or up) to an allowed size.

    :class:`.BatchFinder` explains ``multiple_of`` and ``target_batch_size``, and
    :class:`.SearchLimits` the ``avoided_sizes``.
    """
    nearest = _nearest(size, limits, up)
    other = nearest
    while other in limits.avoided_sizes:
        other = _nearest(other + 1 if up else other - 1, limits, up)
    return nearest if other < limits.min_batch_size else other


def _nearest(size: int, limits: SearchLimits, up: bool) -> int:
    """The same if no size is avoided."""
    options = limits.options
    if options.target_batch_size is not None:
        allowed = micro_batches(options.target_batch_size, limits.ranks, options.multiple_of)
        if up:
            return next(
                (micro for micro in reversed(allowed) if micro >= size), max([size, *allowed]) + 1
            )
        return next((micro for micro in allowed if micro <= size), 0)
    step = options.multiple_of or 2 ** max(0, (size // 64).bit_length() - 1)
    return -(-size // step) * step if up else size // step * step


def largest_where(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest size from ``low`` to ``high`` that fits, or ``low``, by bisection."""
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda size: not fits(size))
