"""Batch size, accumulation and learning rate of a training: checked, recorded, and applied."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_batchmem._lightning.bounds import why_not_accumulate
from lightning_batchmem._lightning.clean_start import ProjectSnapshot
from lightning_batchmem._lightning.data_source import discard_train_loader
from lightning_batchmem._lightning.optimizer_steps import (
    learning_rate_attribute,
    learning_rates,
    optimizer_names,
    schedule_texts,
    settings_in_batches,
)
from lightning_batchmem._lightning.places import ProjectAttribute
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.strategies import configure_optimizers_again, wrap_again
from lightning_batchmem._lightning.trainer_state import callbacks_of, in_every_package, replaced
from lightning_batchmem.devices.foreign_values import error_text
from lightning_batchmem.plan.notes import Note, in_order
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.recipe import learning_rate_text
from lightning_batchmem.search.earlier_plan import changes_since


def check_training(trainer: Trainer, module: LightningModule, options: SearchOptions) -> None:
    """Raise a ValueError where training cannot be searched with these options."""
    check_step(module, "training_step")
    if any(
        isinstance(callback, in_every_package("callbacks.BatchSizeFinder"))
        for callback in callbacks_of(trainer)
    ):
        raise ValueError(
            "callbacks must have one BatchFinder or one BatchSizeFinder of Lightning, got both."
            " Remove the BatchSizeFinder, or do not call Tuner.scale_batch_size."
        )
    if options.target_batch_size is not None and (why := why_not_accumulate(trainer)):
        raise ValueError(f"target_batch_size must be None, because {why}")


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
    apply_before_optimizers(setting, plan, undo)
    discard_train_loader(trainer)
    configure_optimizers_again(trainer)
    return with_learning_rates(trainer, plan)


def apply_before_optimizers(setting: BatchSizeSetting, plan: Plan, undo: ExitStack) -> None:
    """Set size, accumulation and learning rate, before loaders and optimizers exist.

    Args:
        setting: the place of the size.
        plan: the plan.
        undo: what is undone at the end of the run.

    Raises:
        ValueError: if the size or the rate cannot be set.
    """
    trainer = setting.trainer
    _set_logged(setting.place.attribute, plan.project_batch_size, plan.batch_size, undo)
    setting.write(plan.batch_size)
    if plan.learning_rate is not None:
        attribute = learning_rate_attribute(setting)
        _set_logged(attribute, attribute.value, plan.learning_rate, undo)
        attribute.set(plan.learning_rate)
    trainer.accumulate_grad_batches = plan.accumulate_grad_batches
    for name, count in plan.recipe.trainer_settings.items():
        setattr(trainer, name, count)


def with_learning_rates(trainer: Trainer, plan: Plan) -> Plan:
    """The plan with the learning rates of the optimizers that exist now, and notes about them."""
    rates = learning_rates(trainer)
    recipe = replace(plan.recipe, learning_rates=rates, optimizer_names=optimizer_names(trainer))
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
    rate = Note("training", learning_rate_text(before, recipe, plan.unit))
    schedules = [Note("training", text) for text in schedule_texts(trainer, before, recipe)]
    # A resumed run has the notes of its checkpoint.
    return replace(plan, recipe=recipe, notes=in_order([rate, *plan.notes, *schedules]))


def _set_logged(
    attribute: ProjectAttribute | None, before: object, value: float, undo: ExitStack
) -> None:
    """Log the new value of a hyperparameter, or both values."""
    if attribute is None:
        return
    attribute.set_logged(value)
    for logger in attribute.trainer.loggers:
        log = _Guard(_log_hyperparams, logger.log_hyperparams, attribute, before, value)
        undo.enter_context(replaced(logger, log_hyperparams=log))


class _Guard(partial[None]):
    """Takes the place of a method of a logger. A copy of it is the method itself."""

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


def start_without_search(trainer: Trainer, snapshot: ProjectSnapshot) -> None:
    """Restore everything after a search that failed, so that the training starts without one."""
    snapshot.restore_or_warn()
    discard_train_loader(trainer)
    wrap_again(trainer)
    configure_optimizers_again(trainer)


@dataclass(frozen=True)
class CheckpointPlan:
    """The plan in the state of a BatchFinder.

    Args:
        plan: the plan.
        limit_bytes: the limit now, of the rank with the least.
        changes: how device and limit differ from the plan's.
    """

    plan: Plan
    limit_bytes: int
    changes: list[str]

    def continued(self, trainer: Trainer, target_batch_size: int | None) -> Plan:
        """The plan for the ranks of this Trainer; a warning has all changes."""
        plan = self.plan
        settings = plan.recipe.trainer_settings
        batch_size = plan.batch_size
        ranks = trainer.world_size
        accumulate = trainer.accumulate_grad_batches
        before = plan.project_recipe or plan.recipe
        has_changed = plan.accumulate_grad_batches != before.accumulate_grad_batches
        is_kept = has_changed and target_batch_size is None
        if target_batch_size is not None or has_changed:
            # An optimizer step has as nearly the same samples as whole batches allow.
            accumulate = max(1, round(plan.accumulate_grad_batches * plan.ranks / ranks))
        ratio = Fraction(accumulate, before.batches_of_step) if is_kept else Fraction(1)
        text = f"BatchFinder continues with batch size {batch_size} of the checkpoint"
        if self.changes:
            rank_zero_warn(
                f"{text}, although {', and '.join(self.changes)}. search_on_resume=True searches"
                " again."
            )
        else:
            rank_zero_info(text)
        recipe = replace(
            plan.recipe,
            batch_size=batch_size,
            accumulate_grad_batches=accumulate,
            ranks=ranks,
            effective_batch_size=batch_size * accumulate * ranks,
            # The Trainer may have other limits than the checkpoint's.
            trainer_settings=settings_in_batches(
                trainer,
                ratio,
                # The length of an epoch is not known, but it has at least as many batches.
                max(
                    settings.get("val_check_interval", 0),
                    int((getattr(trainer, "val_check_interval", 0) - 1) * ratio) + 1,
                ),
                follows_validation="limit_val_batches" in settings,
            ),
        )
        return replace(plan, recipe=recipe)


def plan_to_continue(
    state: dict[str, Any], devices_and_limits: Sequence[tuple[str, int]], *, may_search_again: bool
) -> CheckpointPlan | None:
    """The plan of a checkpoint; ``None`` if it belongs to another device and may be replaced.

    Args:
        state: the state of a BatchFinder.
        devices_and_limits: the device of each rank, and its limit in bytes.
        may_search_again: whether another device or limit is a reason for a new search.

    Raises:
        ValueError: if the plan is damaged.
    """
    try:
        plan = Plan.from_json(json.dumps(state["plan"]))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the plan of BatchFinder in the checkpoint cannot be read ({error})."
            " search_on_resume=True searches again."
        ) from error
    # One rank may differ, and the limit in a plan is the lowest of all ranks.
    devices, limits_bytes = zip(*devices_and_limits, strict=True)
    limit_bytes = min(limits_bytes)
    changes = changes_since(plan, devices[0], limit_bytes)
    if may_search_again and changes:
        rank_zero_info(f"BatchFinder searches again: {', and '.join(changes)}")
        return None
    return CheckpointPlan(plan, limit_bytes, changes)
