"""The optimizer steps of a training before and after a search, and what does not go with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from numbers import Real
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_batchmem._lightning.bounds import (
    limited_batches,
    steps_are_batches,
    why_not_accumulate,
)
from lightning_batchmem._lightning.places import ProjectAttribute
from lightning_batchmem._lightning.program import TrainingProgram
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.strategies import has_batch_norm
from lightning_batchmem.batches.loaders import StageLoaders
from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.recipe import Epoch, Recipe, learning_rate_factor, rounded_step_text
from lightning_batchmem.search.ranks import Ranks

# The attributes of torch's schedulers that are a number of steps, or several. Milestones are those
# of MultiStepLR and of SequentialLR, whose name is private in torch 2.5.1 to 2.14.
_LENGTHS = ("total_steps", "T_max", "total_iters", "milestones", "_milestones")

# Lengths that differ by at most this share are the same: an epoch may end with a part of a step.
_SAME_SHARE = 0.1


def project_recipe(
    setting: BatchSizeSetting,
    loaders: StageLoaders,
    options: SearchOptions,
    learning_rate: float | None,
    earlier: Plan | None,
    ranks: Ranks,
) -> Recipe:
    """What the optimizer steps of the project are made of, before the first search.

    Args:
        setting: the batch size of the project, and where it is set.
        loaders: the loaders of the training.
        options: the arguments of BatchFinder.
        learning_rate: the result of :func:`learning_rate_to_scale`.
        earlier: the plan of a fit in this process that has set this size; ``None`` for none.
        ranks: the processes that train together.

    Raises:
        ValueError: if ``lr_scaling`` has no batch size to scale from.
    """
    trainer = setting.trainer
    if setting.project_size is None and (
        options.lr_scaling is not None or options.objective == "recipe"
    ):
        raise ValueError(
            f"`{setting.name}` must be a positive whole number for lr_scaling and"
            ' objective="recipe". Set it to the batch size that the learning rate was chosen for.'
        )
    recipe = Recipe(
        batch_size=setting.project_size,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        ranks=trainer.world_size,
        learning_rates=learning_rates(trainer),
        optimizer_names=optimizer_names(trainer),
        learning_rate=learning_rate,
    )
    if earlier is not None and earlier.project_recipe is not None:
        # What still is as the earlier plan has set it was something else in the project.
        of_project = {
            name: getattr(earlier.project_recipe, name)
            for name in ("batch_size", "accumulate_grad_batches", "learning_rates", "learning_rate")
            if getattr(recipe, name) == getattr(earlier.recipe, name)
        }
        recipe = replace(recipe, **of_project)
    now = trainer.accumulate_grad_batches
    # For a target the limits of the Trainer stay as they are.
    if options.target_batch_size is not None:
        now = recipe.accumulate_grad_batches
    ratio = Fraction(recipe.accumulate_grad_batches, now)
    return in_training(trainer, ranks, recipe, loaders, ratio)[0]


def learning_rate_to_scale(setting: BatchSizeSetting, options: SearchOptions) -> float | None:
    """The learning rate of the module; ``None`` without ``lr_scaling``.

    Raises:
        ValueError: if the module has none.
    """
    if options.lr_scaling is None:
        return None
    return _learning_rate(learning_rate_attribute(setting), options.lr_scaling)


def in_training(
    trainer: Trainer, ranks: Ranks, recipe: Recipe, loaders: StageLoaders, ratio: Fraction
) -> tuple[Recipe, Epoch]:
    """The recipe with its samples and steps, and an epoch on the rank with the least of both.

    Args:
        trainer: the Trainer.
        ranks: the processes that train together.
        recipe: the optimizer steps.
        loaders: the loaders of the training.
        ratio: by how much more batches make a step than for the limits of the Trainer.
    """
    size = recipe.batch_size or 1
    accumulate = recipe.accumulate_grad_batches
    of_ranks = ranks.exchange(epoch_at(trainer, loaders, size, ratio))
    batches, samples = zip(*of_ranks, strict=True)
    epoch = Epoch(min(batches), min(samples))
    of_step = epoch.samples_of_step(size, accumulate) * recipe.ranks
    return replace(
        recipe,
        effective_batch_size=of_step if recipe.batch_size else None,
        num_steps=num_steps(trainer, epoch.batches, accumulate),
        counts_batches=not steps_are_batches(trainer),
    ), epoch


def epoch_at(trainer: Trainer, loaders: StageLoaders, batch_size: int, ratio: Fraction) -> Epoch:
    """An epoch of the training on this rank at a batch size, under ``limit_train_batches``.

    A limit that is a number of batches is multiplied by the ratio.
    """
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        limit = math.ceil(limit * ratio)
    batches = limited_batches(loaders.batches(batch_size), limit)
    return Epoch(batches, min(loaders.samples(batch_size), batches * batch_size))


def num_steps(
    trainer: Trainer, batches_in_epoch: float, accumulate_grad_batches: int
) -> int | None:
    """Optimizer steps of the whole training; batches where the project steps its optimizers.

    ``None`` where their number is not known.
    """
    steps: float = math.inf
    max_epochs = trainer.max_epochs
    if max_epochs is not None and max_epochs >= 0:
        in_epoch = batches_in_epoch
        if steps_are_batches(trainer) and math.isfinite(batches_in_epoch):
            in_epoch = math.ceil(batches_in_epoch / accumulate_grad_batches)
        steps = in_epoch * max(1, max_epochs - trainer.current_epoch)
    if trainer.max_steps > 0 and steps_are_batches(trainer):
        steps = min(steps, trainer.max_steps)
    return int(steps) if math.isfinite(steps) else None


def with_recipe(
    plan: Plan, before: Recipe, program: TrainingProgram, options: SearchOptions, ranks: Ranks
) -> Plan:
    """The plan with the optimizer steps of the training, and what cannot go with them.

    Args:
        plan: the plan of a search in ``program``.
        before: the optimizer steps of the project.
        program: the training.
        options: the arguments of BatchFinder.
        ranks: the processes that train together.
    """
    trainer = program.trainer
    loaders = program.training.loaders
    accumulate = plan.accumulate_grad_batches
    target = options.target_batch_size
    # Settings that count batches go with the accumulation that keeps the project's own step.
    now = trainer.accumulate_grad_batches
    if program.samples_per_step is not None and now == before.accumulate_grad_batches:
        now = before.batches_of_step
    ratio = Fraction(1) if target is not None else Fraction(accumulate, now)
    after, epoch = in_training(trainer, ranks, plan.recipe, loaders, ratio)
    samples = after.effective_batch_size
    if (
        options.lr_scaling
        and before.learning_rate is not None
        and samples
        and before.effective_batch_size
    ):
        factor = learning_rate_factor(options.lr_scaling, samples, before.effective_batch_size)
        after = replace(after, learning_rate=before.learning_rate * factor)
    settings = settings_in_batches(
        trainer, ratio, epoch.batches, follows_validation=program.follows_validation
    )
    missed = rounded_step_text(
        after,
        program.samples_per_step,
        "your own size" if target is None else "target_batch_size",
        options.unit,
    )
    of_settings = [
        Note(
            "settings",
            f"{name} is {count:,} instead of {getattr(trainer, name):,}, because it counts"
            " batches.",
        )
        for name, count in settings.items()
    ]
    plan = replace(plan, recipe=replace(after, trainer_settings=settings), project_recipe=before)
    return plan.with_notes(
        Note("training", missed),
        Note("training", accumulation_text(trainer, loaders, options, before, after)),
        *of_settings,
    )


def settings_in_batches(
    trainer: Trainer,
    ratio: Fraction,
    batches_in_epoch: float,
    *,
    follows_validation: bool,
) -> dict[str, int]:
    """The settings of the Trainer that count batches, where they go with another accumulation.

    Args:
        trainer: the Trainer, before the plan is applied.
        ratio: by how much more batches make an optimizer step in the training.
        batches_in_epoch: batches of an epoch in the training.
        follows_validation: whether the batches of the validation have the batch size too.
    """
    names = ["limit_train_batches", "val_check_interval"]
    names += ["limit_val_batches"] * follows_validation
    settings = {}
    for name in names:
        # A Trainer that validates by time, as lightning 2.6 can, does not have each of them.
        count = getattr(trainer, name, None)
        if not (isinstance(count, int) and count):
            continue
        settings[name] = math.ceil(count * ratio)
    is_in_epoch = trainer.check_val_every_n_epoch is not None
    if "val_check_interval" in settings and is_in_epoch and batches_in_epoch >= 1:
        # A longer interval is an error in Lightning.
        settings["val_check_interval"] = int(min(settings["val_check_interval"], batches_in_epoch))
    return {name: count for name, count in settings.items() if count != getattr(trainer, name)}


def schedule_texts(trainer: Trainer, before: Recipe, after: Recipe) -> list[str]:
    """A sentence for each schedule in steps whose length does not go with the training any more.

    Args:
        trainer: the Trainer, whose optimizers are configured for the training.
        before: the optimizer steps of the project before the search.
        after: the optimizer steps of the training.
    """
    if before.num_steps is None or after.num_steps is None:
        return []
    notes = []
    for config in trainer.lr_scheduler_configs:
        if config.interval != "step":
            continue
        lengths = value_or_none("The length of a schedule", _lengths, config.scheduler) or []
        for scheduler, name, length in lengths:
            steps = config.frequency * length
            if why := _why_stale(steps, before, after):
                notes.append(
                    f"{scheduler} has {name}={length:,}, {why}. Compute it in configure_optimizers"
                    " from trainer.estimated_stepping_batches."
                )
    return notes


def _why_stale(steps: float, before: Recipe, after: Recipe) -> str:
    """Why a schedule of this many steps does not go with the training; empty if it does."""
    old = before.num_steps or 0
    new = after.num_steps or 0
    training = f"but the training has {new:,} steps now, and not {old:,}"
    if new < (1 - _SAME_SHARE) * steps <= old:
        return f"{training}: its end is not reached"
    if abs(steps - old) <= _SAME_SHARE * old and steps < (1 - _SAME_SHARE) * new:
        return f"{training}: it ends too early"
    accumulate = after.accumulate_grad_batches
    is_in_batches = abs(steps - accumulate * new) <= _SAME_SHARE * steps
    if is_in_batches and accumulate > before.accumulate_grad_batches:
        return (
            f"which is the number of batches, but the scheduler steps once in {accumulate} of them:"
            " its end is not reached"
        )
    return ""


def _lengths(scheduler: Any) -> list[tuple[str, str, int]]:
    """The class of a scheduler, and the name and the value of each length in it."""
    found = []
    for part in _parts(scheduler):
        kind = type(part).__name__
        for name in _LENGTHS:
            length = getattr(part, name, None)
            if isinstance(length, Iterable):
                length = max(length, default=0)
            if isinstance(length, int):
                found.append((kind, name.removeprefix("_"), length))
    return found


def _parts(scheduler: Any) -> Iterator[Any]:
    """The scheduler, and those that it is made of."""
    yield scheduler
    # The name is private in torch 2.5.1 to 2.14.
    for part in getattr(scheduler, "_schedulers", []):
        yield from _parts(part)


def accumulation_text(
    trainer: Trainer,
    loaders: StageLoaders,
    options: SearchOptions,
    before: Recipe,
    after: Recipe,
) -> str:
    """What cannot go with the accumulation, or why it does not keep the optimizer steps."""
    if after.accumulate_grad_batches != before.accumulate_grad_batches:
        text = (
            f"BatchNorm normalizes each batch of {after.batch_size:,} by itself, and not the"
            f" {before.batch_size:,} of your own size."
        )
        return text if has_batch_norm(trainer.lightning_module) else ""
    if (after.effective_batch_size or 0) >= (before.effective_batch_size or 0):
        return ""
    why = why_not_accumulate(trainer, loaders, is_budget=options.budget)
    if not why or options.objective not in ("auto", "recipe"):
        return ""
    return (
        f"Accumulation does not keep the {before.effective_batch_size:,} samples of a step, because"
        f" {why}."
    )


def learning_rate_attribute(setting: BatchSizeSetting) -> ProjectAttribute:
    rate = ProjectAttribute(setting.trainer, setting.module, "lr")
    # Lightning's LearningRateFinder uses the same order.
    return rate if rate.exists else replace(rate, path="learning_rate")


def _learning_rate(attribute: ProjectAttribute, scaling: str) -> float:
    value = attribute.value
    if not attribute.exists:
        raise ValueError(
            "lr_scaling must be None for a module without `lr` or `learning_rate`, got"
            f" {scaling!r}. Add one and use it in configure_optimizers."
        )
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(
            f"`{attribute.path}` must be a number for lr_scaling, got {value!r:.80} of"
            f" {type(value).__name__}"
        )
    return float(value)


def learning_rates(trainer: Trainer) -> tuple[float, ...]:
    """The different learning rates of the optimizers, before a schedule has changed them."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rates = [group.get("initial_lr", group.get("lr")) for group in groups]
    # A rate may be a tensor, or None where an optimizer has its own schedule.
    return tuple(dict.fromkeys(float(rate) for rate in rates if isinstance(rate, Real | Tensor)))


def optimizer_names(trainer: Trainer) -> tuple[str, ...]:
    return tuple(type(optimizer).__name__ for optimizer in trainer.optimizers)
