"""The optimizer steps of a training before and after its size is chosen, and notes on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.options import LearningRateScaling, Unit
from lightning_batchmem.plan.records import Speed

RAISED_RATIO = 1.5
"""By default the size is raised to at most this multiple of the project's.

Source: `python -m benchmarks.no_harm_rules`. At an unchanged rate the losses of 0 of 16 small
trainings got worse by more than five seeds differ; at twice the size of 4 of 16.
"""

# Nobody minds a search of this time.
_SHORT_SECONDS = 2.0

# The rates of more groups of parameters are not listed.
_MOST_RATES = 3

SLOWER_SHARE = 0.15
"""A size is slower, or faster, than another one from this share of throughput on.

Source: the ratio of the medians of five steps is wrong by up to 11 % in nine of ten cases, on a
shared machine.
"""

COPIES = (2, 8)
"""The losses of this many copies of one sample are compared."""

# With dropout the losses of copies differ by less.
_SAME_LOSS_RATIO = 1.5

# A sum of 8 equal losses is four times that of 2. In-batch negatives have log(8) / log(2), or 3.
_LEAST_SUM_RATIO = 3.5

# Source: Goyal et al. 2017, arXiv 1706.02677, for SGD (with momentum too); Malladi et al. 2022,
# arXiv 2205.10287, for Adam and RMSprop. AdamW is Adam where it decays nothing, and torch
# multiplies its decay by the learning rate.
_RULES: dict[str, LearningRateScaling] = {
    "SGD": "linear",
    "Adam": "sqrt",
    "AdamW": "sqrt",
    "RMSprop": "sqrt",
}

MOST_RATIO = 32
"""A rule is named only up to this many times the samples, or as many times fewer.

Source: Goyal et al. 2017 keep the accuracy from 256 to 8,192 samples, and lose some at 16,384.
"""


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
        # Without a batch there is no step, and any size may be meant.
        return int(min(batches * batch_size, self.samples or math.inf))


@dataclass(frozen=True)
class Recipe:
    """What the optimizer steps of a training are made of.

    Args:
        batch_size: samples of a batch on each rank; ``None`` where it is not known.
        accumulate_grad_batches: batches to an optimizer step.
        ranks: processes that train together.
        effective_batch_size: samples to an optimizer step over all ranks; ``None`` where they are
            not known, and in an evaluation.
        num_steps: optimizer steps of the whole training; ``None`` where they are not known.
        counts_batches: whether ``num_steps`` counts batches, because the project decides in which
            of them its optimizers step.
        learning_rates: the different learning rates of the optimizers at the start.
        optimizer_names: the classes of the optimizers.
        learning_rate: the learning rate of the module under ``lr_scaling``; otherwise ``None``.
        trainer_settings: settings of the Trainer that count batches, where the training has other
            values because of its accumulation, such as ``limit_train_batches``.
    """

    batch_size: int | None = None
    accumulate_grad_batches: int = 1
    ranks: int = 1
    effective_batch_size: int | None = None
    num_steps: int | None = None
    counts_batches: bool = False
    learning_rates: tuple[float, ...] = ()
    optimizer_names: tuple[str, ...] = ()
    learning_rate: float | None = None
    trainer_settings: Mapping[str, int] = field(default_factory=dict)

    @property
    def batches_of_step(self) -> int:
        """Batches to an optimizer step, which an epoch may end before it has all of them."""
        samples = (self.effective_batch_size or math.inf) / self.ranks
        return math.ceil(min(self.accumulate_grad_batches, samples / (self.batch_size or 1)))


def step_ratio(before: Recipe, after: Recipe) -> float:
    """By how much the samples of a step grow; 1 where they are about the same, or not known."""
    if not before.effective_batch_size or not after.effective_batch_size:
        return 1.0
    # The samples of a prime size make no equal batches.
    return round(after.effective_batch_size / before.effective_batch_size, 2)


def training_text(before: Recipe, after: Recipe, unit: Unit) -> str:
    """What changes in the training: samples and number of its steps, and the learning rate."""
    step = "batch" if after.counts_batches else "step"
    samples = f"{_samples(before, after, unit)} a {step}"
    numbers = (before.num_steps, after.num_steps)
    ratio = step_ratio(before, after)
    if None not in numbers and numbers[0] != numbers[1]:
        parts = [samples, f"{numbers[0]:,} -> {_counted(numbers[1], step)}"]
    elif ratio != 1:
        # The number of steps does not depend on the size.
        parts = [
            f"{_counted(after.num_steps, step)} of {_samples(before, after, unit)}: {ratio:.3g}"
            " times the samples"
        ]
    else:
        parts = [samples]
        if after.num_steps is not None:
            parts.append(_counted(after.num_steps, step))
    parts.append(_rates(before, after))
    return ", ".join(part for part in parts if part)


def rounded_step_text(after: Recipe, samples_per_step: int | None, whose: str, unit: Unit) -> str:
    """A sentence about steps that cannot have exactly these samples; empty where they have them.

    Args:
        after: the optimizer steps at the chosen size.
        samples_per_step: the samples that an optimizer step was to have; ``None`` for no number.
        whose: where this number comes from.
        unit: what the sizes count.
    """
    samples = after.effective_batch_size or 0
    if samples_per_step in (None, samples):
        return ""
    parts = _made_of(after)
    made_of = "" if parts == f"{samples:,}" else f": {parts}"
    return (
        f"An optimizer step has {unit.size(samples)}, not the {samples_per_step:,} of {whose}"
        f"{made_of}."
    )


def longer_search_text(search_seconds: float, training_seconds: float | None) -> str:
    """A sentence about a search that took longer than the training takes; empty for others."""
    if training_seconds is None or search_seconds <= max(_SHORT_SECONDS, training_seconds):
        return ""
    return (
        f"The search took {search_seconds:.0f} s, longer than the steps of the training. Write size"
        " and accumulation into your code to search no more."
    )


def _counted(count: int | None, step: str) -> str:
    """A number of steps, or of batches; only the word where it is not known."""
    words = "batches" if step == "batch" else "steps"
    if count is None:
        return words
    return f"1 {step}" if count == 1 else f"{count:,} {words}"


def _samples(before: Recipe, after: Recipe, unit: Unit) -> str:
    """The samples of a step before and after, and the batches that they are made of."""
    known = [
        (f"{recipe.effective_batch_size:,}", _made_of(recipe))
        for recipe in (before, after)
        if recipe.effective_batch_size
    ]
    made_of = dict.fromkeys(parts for _, parts in known)
    if len(dict(known)) < len(made_of):
        arrow = f"{known[0][0]} ({' -> '.join(made_of)})"
    else:
        texts = (size if size == parts else f"{size} ({parts})" for size, parts in known)
        arrow = " -> ".join(dict.fromkeys(texts))
    if unit.budget_name:
        return f"{unit.budget_name} {arrow}"
    return f"{arrow} sample{'s' * (arrow != '1')}"


def _made_of(recipe: Recipe) -> str:
    """The parts of a step, such as ``"2 ranks x 4 x 8"``; its samples for one batch on one rank."""
    batches = recipe.batches_of_step
    if batches == recipe.ranks == 1 or not recipe.batch_size:
        return f"{recipe.effective_batch_size or 0:,}"
    ranks = [f"{recipe.ranks} ranks"] * (recipe.ranks > 1)
    return " x ".join([*ranks, *[str(batches)] * (batches > 1), f"{recipe.batch_size:,}"])


def _rates(before: Recipe, after: Recipe) -> str:
    if not after.learning_rates or len(after.learning_rates) > _MOST_RATES:
        return ""
    name = "learning rate" if len(after.learning_rates) == 1 else "learning rates"
    new = " and ".join(f"{rate:.6g}" for rate in after.learning_rates)
    if before.learning_rates in ((), after.learning_rates):
        return f"{name} {new} unchanged"
    old = " and ".join(f"{rate:.6g}" for rate in before.learning_rates)
    return f"{name} {old} -> {new}"


def learning_rate_factor(
    scaling: LearningRateScaling, effective_batch_size: int, effective_batch_size_before: int
) -> float:
    """By how much the learning rate grows for another effective batch size."""
    ratio = effective_batch_size / effective_batch_size_before
    return ratio if scaling == "linear" else math.sqrt(ratio)


def learning_rate_text(before: Recipe, after: Recipe, unit: Unit) -> str:
    """A note for a run whose samples per optimizer step changed and whose learning rates did not.

    It is empty for any other run.
    """
    old_size = before.effective_batch_size
    size = after.effective_batch_size
    names = list(dict.fromkeys(after.optimizer_names))
    # Those of another run are not known.
    is_kept = before.learning_rates in ((), after.learning_rates)
    ratio = step_ratio(before, after)
    if ratio == 1 or not (old_size and size and names and is_kept):
        return ""
    step = "A batch" if after.counts_batches else "An optimizer step"
    text = f"{step} has {unit.size(size)} instead of {old_size:,} at the same learning rate"
    if ratio > 1:
        text += ', so the training may end worse. objective="recipe" keeps your own size'
    if not 1 / MOST_RATIO <= size / old_size <= MOST_RATIO:
        return f"{text}. No rule is known for such a step: tune the learning rate by hand."
    listed = " and ".join(names)
    rule = _RULES.get(names[0])
    if rule is None or any(_RULES.get(name) != rule for name in names):
        return f"{text}. No single rule is known for {listed}: tune the learning rate by hand."
    factor = learning_rate_factor(rule, size, old_size)
    return f'{text}. lr_scaling="{rule}" multiplies the rate by {factor:,.4g} ({listed}).'


def slower_text(speeds: Sequence[Speed], batch_size: int, limits: SearchLimits) -> str:
    """A sentence about a chosen size that is slower than the project's; empty for any other."""
    if len(speeds) < 2:
        return ""
    own, other = speeds
    ratio = other.samples_per_s / own.samples_per_s
    if batch_size != other.batch_size or ratio >= 1 - SLOWER_SHARE:
        return ""
    return (
        f"{limits.unit.size(batch_size)} are slower than your {own.batch_size:,}:"
        f" {ratio:.0%} of the {limits.unit.items} a second."
        ' objective="throughput" looks for the fastest size.'
    )


def loss_text(losses: Sequence[float | None]) -> str:
    """A sentence about a loss with which accumulation does not go; empty for any other.

    Copies of a sample show it: the mean of their losses is the same for any number of them.

    Args:
        losses: the losses of :data:`COPIES`; ``None`` where one is not known.
    """
    few, many = losses
    if not few or not many or 1 / _SAME_LOSS_RATIO < many / few < _SAME_LOSS_RATIO:
        return ""
    if many / few >= _LEAST_SUM_RATIO:
        return (
            "Your loss is a sum over the batch, and Lightning divides it by the number of"
            " accumulated batches, so the gradients are smaller than with your own size. Return the"
            " mean, or multiply the learning rate by that number."
        )
    return (
        "Your loss compares the samples of a batch with each other, and accumulation does not: each"
        " of its batches has fewer of them than your own size."
    )
