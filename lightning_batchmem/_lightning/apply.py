"""Use the trainer for the search, then apply batch size, accumulation and learning rate."""

from __future__ import annotations

import inspect
from dataclasses import replace
from numbers import Real

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.data_source import (
    DataSource,
    discard_train_loader,
    validation_source,
)
from lightning_batchmem._lightning.hooks import (
    configure_optimizers_again,
)
from lightning_batchmem._lightning.module_state import ModuleState
from lightning_batchmem._lightning.packages import lightning_name
from lightning_batchmem._lightning.project_attribute import ProjectAttribute
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.trainer_state import (
    RandomStates,
    callbacks_of,
    datamodules_of,
)
from lightning_batchmem.batches.loaders import state_of
from lightning_batchmem.devices import device_name
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.scaling import learning_rate_factor, learning_rate_note, micro_batches


def check_training(trainer: Trainer, module: LightningModule, options: SearchOptions) -> None:
    """Raise a ValueError where training cannot be searched with these options."""
    check_step(module, "training_step")
    if options.target_batch_size is None:
        return
    if not module.automatic_optimization:
        raise ValueError(
            "target_batch_size must be None under manual optimization, which steps by itself"
        )
    scheduler = lightning_name(trainer, "callbacks.GradientAccumulationScheduler")
    if any(isinstance(callback, scheduler) for callback in callbacks_of(trainer)):
        raise ValueError(
            "target_batch_size must be None with a GradientAccumulationScheduler, which sets it too"
        )


def current_state(
    trainer: Trainer, module: LightningModule, source: DataSource
) -> tuple[RandomStates, ModuleState]:
    """Everything outside the trainer that a search may change.

    Configuring the optimizers twice may change it too.
    """
    random_states = RandomStates()
    others = [state_of(source.passed_loaders()), *datamodules_of(trainer)]
    return random_states, ModuleState(module, others)


def check_step(module: LightningModule, name: str) -> None:
    """Raise a ValueError where a step fetches its batches itself."""
    if "dataloader_iter" in inspect.signature(getattr(module, name)).parameters:
        raise ValueError(
            f"{name} must take a batch for BatchFinder, got one that takes dataloader_iter. Set the"
            " batch size by hand."
        )


TrainingSetup = tuple[int | None, float | None]
"""Samples per optimizer step over all ranks, and learning rate of a run before its search."""


def record_training_setup(
    trainer: Trainer, setting: BatchSizeSetting, options: SearchOptions, previous: Plan | None
) -> TrainingSetup:
    """Record the setup before a search.

    ``previous`` is the plan of an earlier ``fit``; its learning rate is not scaled twice.
    """
    size = setting.size
    attribute = _learning_rate_attribute(trainer, setting.module)
    batches = trainer.accumulate_grad_batches * trainer.world_size
    effective = options.base_batch_size or (size * batches if size else None)
    value = attribute.value
    learning_rate = (
        float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
    )
    if options.lr_scaling is not None:
        if not attribute.exists:
            raise ValueError(
                "lr_scaling must be None for a module without `lr` or `learning_rate`, got"
                f" {options.lr_scaling!r}. Add one and use it in configure_optimizers."
            )
        if learning_rate is None:
            raise ValueError(
                f"`{attribute.path}` must be a number for lr_scaling, got {value!r:.80} of"
                f" {type(value).__name__}"
            )
        if effective is None:
            raise ValueError(
                f"base_batch_size must be given with lr_scaling where `{setting.name}` is no"
                f" positive whole number, got {setting.name}={setting.value!r:.80}"
            )
    if (
        previous is not None
        and options.base_batch_size is not None
        and learning_rate == previous.learning_rate
    ):
        learning_rate = previous.learning_rate_before
    return effective, learning_rate


def complete_plan(
    trainer: Trainer,
    plan: Plan,
    options: SearchOptions,
    before: TrainingSetup,
    epoch_batches: float,
) -> Plan:
    """Add accumulation, samples per optimizer step and learning rate to ``plan``.

    An epoch has ``epoch_batches`` at the batch size of the plan.
    """
    notes = list(plan.notes)
    accumulate = trainer.accumulate_grad_batches
    if options.target_batch_size is not None:
        target = options.target_batch_size
        micro_by_size = micro_batches(target, trainer.world_size, options.multiple_of)
        micro = micro_by_size[plan.batch_size]
        accumulate = micro.accumulate_grad_batches
        notes += [micro.rounding] if micro.rounding else []
    batches_per_step = accumulate
    # Lightning makes an optimizer step at the end of an epoch in any case.
    if epoch_batches < accumulate:
        batches_per_step = max(1, int(epoch_batches))
        notes.append(
            f"an epoch ends after {batches_per_step} of {accumulate} batches per optimizer step"
        )
    effective = plan.batch_size * batches_per_step * trainer.world_size
    base, rate_before = before
    learning_rate = None
    if base is not None and options.lr_scaling is not None and rate_before is not None:
        learning_rate = rate_before * learning_rate_factor(options.lr_scaling, effective, base)
    elif base is not None:
        names = [type(optimizer).__name__ for optimizer in trainer.optimizers]
        note = learning_rate_note(names, effective_batch_size=effective, base_batch_size=base)
        # This note comes first, because the console shows only one.
        notes = [note, *notes] if note else notes
    return replace(
        plan,
        device=device_name(trainer.strategy.root_device),
        ranks=trainer.world_size,
        accumulate_grad_batches=accumulate,
        effective_batch_size=effective,
        learning_rate=learning_rate,
        learning_rate_before=None if learning_rate is None else rate_before,
        notes=tuple(notes),
    )


def apply_to_training(
    trainer: Trainer, setting: BatchSizeSetting, plan: Plan, options: SearchOptions
) -> None:
    """Apply ``plan`` and configure the optimizers again, as if the size had always been there."""
    setting.write(plan.batch_size, also_logged=True)
    if plan.evaluation is not None and options.eval_batch_arg_name is not None:
        validation = replace(
            setting, name=options.eval_batch_arg_name, source=validation_source(trainer)
        )
        validation.write(plan.evaluation.batch_size, also_logged=True)
    trainer.accumulate_grad_batches = plan.accumulate_grad_batches
    attribute = _learning_rate_attribute(trainer, setting.module)
    changes = plan.learning_rate is not None and plan.learning_rate != attribute.value
    if plan.learning_rate is not None:
        attribute.set(plan.learning_rate, also_logged=True)
    discard_train_loader(trainer)
    before = _optimizer_learning_rates(trainer)
    configure_optimizers_again(trainer)
    if changes and before == _optimizer_learning_rates(trainer):
        rank_zero_warn(
            f"lr_scaling set the learning rate of the module to {plan.learning_rate:.6g}, but"
            " configure_optimizers does not use it. Pass it to the optimizers there."
        )


def _learning_rate_attribute(trainer: Trainer, module: LightningModule) -> ProjectAttribute:
    lr = ProjectAttribute(trainer, module, "lr")
    learning_rate = ProjectAttribute(trainer, module, "learning_rate")
    # Lightning's LearningRateFinder uses the same order.
    return lr if lr.exists else learning_rate


def _optimizer_learning_rates(trainer: Trainer) -> list[float]:
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return [float(group["lr"]) for group in groups if "lr" in group]
