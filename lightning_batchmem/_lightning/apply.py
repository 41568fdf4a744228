"""Batch size, accumulation and learning rate of a training: checked, recorded, and applied."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from functools import partial
from numbers import Real
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_batchmem._lightning.clean_start import ProjectSnapshot
from lightning_batchmem._lightning.data_source import discard_train_loader
from lightning_batchmem._lightning.places import ProjectAttribute
from lightning_batchmem._lightning.schedules import schedule_notes
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.strategies import configure_optimizers_again, wrap_again
from lightning_batchmem._lightning.trainer_state import callbacks_of, in_every_package, replaced
from lightning_batchmem.devices.foreign_values import error_text
from lightning_batchmem.plan.learning_rate import learning_rate_note
from lightning_batchmem.plan.notes import Note, in_order
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.recipe import Recipe


def check_training(trainer: Trainer, module: LightningModule, options: SearchOptions) -> None:
    """Raise a ValueError where training cannot be searched with these options."""
    check_step(module, "training_step")
    if any(
        isinstance(callback, in_every_package("callbacks.BatchSizeFinder"))
        for callback in callbacks_of(trainer)
    ):
        raise ValueError(
            "callbacks must have one BatchFinder or one BatchSizeFinder of Lightning, got both."
            " Remove the BatchSizeFinder"
        )
    if options.target_batch_size is None:
        return
    if not module.automatic_optimization:
        raise ValueError(
            "target_batch_size must be None under manual optimization: your training_step steps the"
            " optimizers itself"
        )
    scheduler = in_every_package("callbacks.GradientAccumulationScheduler")
    if any(isinstance(callback, scheduler) for callback in callbacks_of(trainer)):
        raise ValueError(
            "target_batch_size must be None with a GradientAccumulationScheduler, which sets it too"
        )


def check_step(module: LightningModule, name: str) -> None:
    """Raise a ValueError where a step fetches its batches itself, or does not run when called."""
    step = getattr(module, name)
    if inspect.isgeneratorfunction(step) or inspect.iscoroutinefunction(step):
        raise ValueError(f"{name} must be an ordinary method, got a generator or a coroutine")
    if "dataloader_iter" in inspect.signature(step).parameters:
        raise ValueError(
            f"{name} must take a batch for BatchFinder, got one that takes dataloader_iter. Set the"
            " batch size by hand."
        )


def project_recipe(
    setting: BatchSizeSetting,
    options: SearchOptions,
    learning_rate: float | None,
    earlier: Plan | None,
) -> Recipe:
    """What the optimizer steps of the project are made of, before the first search.

    Args:
        setting: the batch size of the project, and where it is set.
        options: the arguments of BatchFinder.
        learning_rate: that of :func:`learning_rate_to_scale`.
        earlier: the plan of a fit in this process that has set this size; ``None`` for none.

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
        learning_rates=_learning_rates(trainer),
        optimizer_names=_optimizer_names(trainer),
        learning_rate=learning_rate,
    )
    if earlier is None or earlier.project_recipe is None:
        return recipe
    # What still is as the earlier plan has set it was something else in the project.
    of_project = {
        name: getattr(earlier.project_recipe, name)
        for name in ("batch_size", "accumulate_grad_batches", "learning_rates", "learning_rate")
        if getattr(recipe, name) == getattr(earlier.recipe, name)
    }
    return replace(recipe, **of_project)


def learning_rate_to_scale(setting: BatchSizeSetting, options: SearchOptions) -> float | None:
    """The learning rate of the module; ``None`` without ``lr_scaling``.

    Raises:
        ValueError: if the module has none.
    """
    if options.lr_scaling is None:
        return None
    return _learning_rate(_learning_rate_attribute(setting), options.lr_scaling)


def apply_to_training(setting: BatchSizeSetting, plan: Plan, undo: ExitStack) -> Plan:
    """Apply ``plan`` and configure the optimizers again, as if the size had always been there.

    Args:
        setting: the place of the size.
        plan: the plan.
        undo: what is undone at the end of the run.

    Returns:
        The plan, with the learning rates of the new optimizers, and notes about them.
    """
    trainer = setting.trainer
    _set_logged(setting.place.attribute, plan.project_batch_size, plan.batch_size, undo)
    setting.write(plan.batch_size)
    trainer.accumulate_grad_batches = plan.accumulate_grad_batches
    for name, count in plan.recipe.trainer_settings.items():
        setattr(trainer, name, count)
    if plan.learning_rate is not None:
        attribute = _learning_rate_attribute(setting)
        _set_logged(attribute, attribute.value, plan.learning_rate, undo)
        attribute.set(plan.learning_rate)
    discard_train_loader(trainer)
    configure_optimizers_again(trainer)
    rates = _learning_rates(trainer)
    recipe = replace(plan.recipe, learning_rates=rates, optimizer_names=_optimizer_names(trainer))
    before = plan.project_recipe
    if before is None:
        return replace(plan, recipe=recipe)
    pairs = list(zip(before.learning_rates, rates, strict=False))
    old_rate = before.learning_rate or 0.0
    # Without an optimizer there are no rates.
    if (
        plan.learning_rate
        and pairs
        and not any(math.isclose(new * old_rate, old * plan.learning_rate) for old, new in pairs)
    ):
        changes = ", ".join(f"{old:.6g} -> {new:.6g}" for old, new in pairs)
        rank_zero_warn(
            f"lr_scaling changed the learning rate of the module, {old_rate:.6g} ->"
            f" {plan.learning_rate:.6g}, but those of the optimizers changed otherwise, {changes}."
            " Let configure_optimizers use it as it is, or leave lr_scaling out."
        )
    rate = Note("training", learning_rate_note(before, recipe, plan.unit))
    schedules = [Note("training", text) for text in schedule_notes(trainer, before, recipe)]
    # A resumed run has the notes of its checkpoint.
    return replace(plan, recipe=recipe, notes=in_order([rate, *plan.notes, *schedules]))


def _set_logged(
    attribute: ProjectAttribute | None, before: object, value: float, undo: ExitStack
) -> None:
    """Let the loggers have the new value of a hyperparameter, or both values."""
    if attribute is None:
        return
    attribute.set_logged(value)
    for logger in attribute.trainer.loggers:
        log = _Guard(_log_hyperparams, logger.log_hyperparams, attribute, before, value)
        undo.enter_context(replaced(logger, log_hyperparams=log))


class _Guard(partial[None]):
    """Takes the place of the method of a logger whose copies have the method itself."""

    def __reduce__(self) -> Any:
        return partial, self.args[:1]


def _log_hyperparams(
    log: Callable[..., object],
    attribute: ProjectAttribute,
    before: object,
    value: float,
    params: Any = None,
    *arguments: Any,
    **keywords: Any,
) -> None:
    """Log hyperparameters; a new value that the logger refuses gets another name.

    In a run of MLflow, a name keeps its first value: from the script, or from an earlier training.
    """
    name = attribute.path.rpartition(".")[2]
    other_name = f"{name}_of_training"
    errors: list[Exception] = []
    for added in (None, {other_name: value}, {}):
        try:
            log(
                params if added is None else attribute.without(params) | added,
                *arguments,
                **keywords,
            )
        # The package of a logger may raise any error.
        except Exception as error:  # noqa: BLE001
            errors.append(error)
        else:
            break
    else:
        raise errors[-1]
    if errors:
        # Each later stage logs the hyperparameters of the module again.
        attribute.drop_logged()
        rank_zero_warn(
            f"BatchFinder: a logger refuses another `{name}` ({error_text(errors[0])}). The"
            f" training has {value} instead of {before},"
            f" {'not logged' if errors[1:] else f'logged as `{other_name}`'}."
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


def start_without_search(trainer: Trainer, snapshot: ProjectSnapshot) -> None:
    """Let the training start as without a search, after one that has failed."""
    snapshot.restore_or_warn()
    discard_train_loader(trainer)
    wrap_again(trainer)
    configure_optimizers_again(trainer)


def _learning_rate_attribute(setting: BatchSizeSetting) -> ProjectAttribute:
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


def _learning_rates(trainer: Trainer) -> tuple[float, ...]:
    """The different learning rates of the optimizers, before a schedule has changed them."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rates = [group.get("initial_lr", group.get("lr")) for group in groups]
    # A rate may be a tensor, or None where an optimizer has its own schedule.
    return tuple(dict.fromkeys(float(rate) for rate in rates if isinstance(rate, Real | Tensor)))


def _optimizer_names(trainer: Trainer) -> tuple[str, ...]:
    return tuple(type(optimizer).__name__ for optimizer in trainer.optimizers)
