"""The optimizer steps of a training, before and after its size is chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_batchmem.plan.options import Unit

RAISED_RATIO = 1.5
"""By default the size is raised to at most this multiple of that of the project.

Source: `python -m benchmarks.no_harm_rules`. At an unchanged rate the losses of 0 of 16 small
trainings got worse by more than those of five seeds differ; at twice the size of 4 of 16.
"""

# Nobody minds a search of this time.
_SHORT_SECONDS = 2.0

# The rates of more groups of parameters are not listed.
_MOST_RATES = 3


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


def rounded_step_note(after: Recipe, samples_per_step: int | None, whose: str, unit: Unit) -> str:
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
    return (
        f"An optimizer step has {unit.size(samples)}, not the {samples_per_step:,} of {whose}:"
        f" {_made_of(after)}."
    )


def longer_search_note(search_seconds: float, training_seconds: float | None) -> str:
    """A sentence about a search that took longer than the training takes; empty for others."""
    if training_seconds is None or search_seconds <= max(_SHORT_SECONDS, training_seconds):
        return ""
    return (
        f"The search took {search_seconds:.0f} s, and the steps of the training take about"
        f" {training_seconds:.0f} s. Write the size into your code to search no more."
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
