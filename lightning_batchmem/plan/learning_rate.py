"""The learning rate of a training at another batch size."""

from __future__ import annotations

import math

from lightning_batchmem.plan.options import LearningRateScaling, Unit
from lightning_batchmem.plan.recipe import Recipe, step_ratio

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


def learning_rate_factor(
    scaling: LearningRateScaling, effective_batch_size: int, effective_batch_size_before: int
) -> float:
    """By how much the learning rate grows for another effective batch size."""
    ratio = effective_batch_size / effective_batch_size_before
    return ratio if scaling == "linear" else math.sqrt(ratio)


def learning_rate_note(before: Recipe, after: Recipe, unit: Unit) -> str:
    """A note for a run whose samples per optimizer step changed and whose learning rates did not.

    It is empty for any other run.
    """
    old_size = before.effective_batch_size
    size = after.effective_batch_size
    names = list(dict.fromkeys(after.optimizer_names))
    is_kept = before.learning_rates == after.learning_rates
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
    return (
        f'{text}. For {listed}, lr_scaling="{rule}" multiplies the rate by {factor:,.4g}:'
        ' see "Choosing a batch size" in the documentation.'
    )
