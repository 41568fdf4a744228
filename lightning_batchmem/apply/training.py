"""Make a run that has been searched the run it would have been with the chosen size hard-coded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr

from lightning_batchmem._lightning.data_source import forget_train_loader, set_initial_hparam
from lightning_batchmem._lightning.module_state import (
    Loop,
    ModuleState,
    RandomStates,
    TrainerState,
    configure_optimizers_again,
)
from lightning_batchmem._lightning.run_step import mute_callbacks_and_loggers
from lightning_batchmem.apply.batch_size import BatchSizeSetting
from lightning_batchmem.devices.select import device_name
from lightning_batchmem.measure.step_runner import PhaseCallback
from lightning_batchmem.plan.learning_rate import advice, scaled_learning_rate
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.sizes import micro_batches

LEARNING_RATE_NAMES = ("lr", "learning_rate")
"""Attributes in which a module keeps its learning rate, as Lightning's LearningRateFinder knows them too."""


@contextmanager
def restoring(
    trainer: Trainer,
    settings: Sequence[BatchSizeSetting],
    random: RandomStates,
    module_state: ModuleState,
    watcher: PhaseCallback,
    loop: Loop,
) -> Iterator[TrainerState]:
    """Lend trainer and module to probing steps; put back everything on the way out, whatever happened.

    Args:
        trainer: before its loop runs.
        settings: where batch sizes live; they get their old values back.
        random: the generators' states to rewind to.
        module_state: the module, and what goes with it, as they are to be again.
        watcher: the only callback that the steps reach.
        loop: the loop that is about to run.
    """
    with ExitStack() as undo:  # in the reverse order, each of them whatever became of the others
        undo.callback(random.restore)
        for setting in settings:
            undo.callback(setting.keep())
        undo.callback(module_state.restore)  # with the batch size, where an attribute holds it
        trainer_state = TrainerState(trainer, loop, module_state.schedulers)
        undo.callback(trainer_state.restore)
        mute_callbacks_and_loggers(trainer, watcher)
        yield trainer_state


@dataclass(frozen=True)
class TrainingSetup:
    """A run before its search.

    Args:
        accumulate_grad_batches: batches to an optimizer step.
        effective_batch_size: samples to an optimizer step over all ranks; ``None`` when the project has no size yet.
        learning_rate: of the module; ``None`` when it has none.
    """

    accumulate_grad_batches: int
    effective_batch_size: int | None
    learning_rate: float | None


def record_training_setup(
    trainer: Trainer, setting: BatchSizeSetting, options: SearchOptions, previous: Plan | None
) -> TrainingSetup:
    """Note what the project has before the search.

    Args:
        trainer: in ``on_fit_start``.
        setting: where the batch size lives.
        options: of the user.
        previous: the plan of an earlier ``fit``, whose learning rate is not to be scaled twice.

    Raises:
        ValueError: when the learning rate is to be scaled, and it or the size it was chosen for is not known.
    """
    accumulate, size = trainer.accumulate_grad_batches, setting.size
    effective = options.base_batch_size or (size * accumulate * trainer.world_size if size else None)
    learning_rate = learning_rate_of(setting.module)
    if options.lr_scaling is not None and learning_rate is None:
        raise ValueError(
            f"lr_scaling must be None for a module without `lr` or `learning_rate`, got {options.lr_scaling!r}; add one"
            " and use it in configure_optimizers"
        )
    if options.lr_scaling is not None and effective is None:
        raise ValueError("base_batch_size must be given with lr_scaling where the project has no size yet, got None")
    scaled_already = previous is not None and learning_rate is not None and learning_rate == previous.learning_rate
    if previous is not None and scaled_already and options.base_batch_size is not None:
        learning_rate = previous.learning_rate_before
    return TrainingSetup(accumulate, effective, learning_rate)


def complete_plan(
    trainer: Trainer, plan: Plan, options: SearchOptions, before: TrainingSetup, epoch_batches: float
) -> Plan:
    """Add to ``plan`` what follows from its size: accumulation, samples to an optimizer step, learning rate.

    Args:
        trainer: as it was before the search.
        plan: of the search.
        options: of the user.
        before: what :func:`record_training_setup` noted.
        epoch_batches: batches of an epoch at the plan's size; ``inf`` when unknown.
    """
    notes, accumulate = list(plan.notes), before.accumulate_grad_batches
    if options.target_batch_size is not None:
        micro = micro_batches(options.target_batch_size, trainer.world_size, options.multiple_of)[plan.batch_size]
        accumulate = micro.accumulate_grad_batches
        notes += [micro.rounding] if micro.rounding else []
    together = accumulate
    if epoch_batches < accumulate:  # Lightning steps at the end of an epoch in any case
        together = max(1, int(epoch_batches))
        notes.append(
            f"an epoch has {together} of the {accumulate} batches that make an optimizer step, which ends with it"
        )
    effective, base = plan.batch_size * together * trainer.world_size, before.effective_batch_size
    learning_rate = None
    if base is not None and options.lr_scaling is not None and before.learning_rate is not None:
        learning_rate = scaled_learning_rate(
            before.learning_rate, rule=options.lr_scaling, effective_batch_size=effective, base_batch_size=base
        )
    elif base is not None:
        names = [type(optimizer).__name__ for optimizer in trainer.optimizers]
        said = advice(names, effective_batch_size=effective, base_batch_size=base, learning_rate=before.learning_rate)
        notes += [said] if said else []
    return replace(
        plan,
        device=device_name(trainer.strategy.root_device),
        ranks=trainer.world_size,
        accumulate_grad_batches=accumulate,
        effective_batch_size=effective,
        learning_rate=learning_rate,
        learning_rate_before=None if learning_rate is None else before.learning_rate,
        notes=tuple(notes),
    )


def apply_to_training(
    trainer: Trainer, setting: BatchSizeSetting, plan: Plan, *, validation_setting: BatchSizeSetting | None
) -> None:
    """Set what ``plan`` says and let optimizers and schedulers be configured as if it had always been there.

    Args:
        trainer: in ``on_fit_start``, its generators where they were before ``configure_optimizers`` first ran.
        setting: where the batch size lives.
        plan: batch size, accumulation, learning rate, and validation's own size where it has one.
        validation_setting: where that lives; ``None`` when validation has no size of its own.
    """
    setting.commit(plan.batch_size)
    if plan.evaluation is not None and validation_setting is not None:
        validation_setting.commit(plan.evaluation.batch_size)
    trainer.accumulate_grad_batches = plan.accumulate_grad_batches
    changes = plan.learning_rate is not None and plan.learning_rate != learning_rate_of(setting.module)
    if plan.learning_rate is not None:
        set_learning_rate(setting.module, plan.learning_rate)
    forget_train_loader(trainer)
    before = _learning_rates(trainer)
    configure_optimizers_again(trainer)
    if changes and before == _learning_rates(trainer):
        rank_zero_warn(
            f"lr_scaling set the module's learning rate to {plan.learning_rate:.6g}, and configure_optimizers does not"
            " use it: the optimizers have the rates that they had before"
        )


def learning_rate_of(module: LightningModule) -> float | None:
    """The module's own learning rate, from its attributes or hyperparameters; ``None`` when it has none."""
    name = _learning_rate_name(module)
    value = lightning_getattr(module, name) if name else None
    return float(value) if isinstance(value, int | float) else None


def set_learning_rate(module: LightningModule, learning_rate: float) -> None:
    """Set the module's learning rate where it lives, and in the hyperparameters that Lightning is about to log."""
    name = _learning_rate_name(module)
    if name is not None:
        lightning_setattr(module, name, learning_rate)
        set_initial_hparam(module, name, learning_rate)


def _learning_rates(trainer: Trainer) -> list[float]:
    return [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups if "lr" in group]


def _learning_rate_name(module: LightningModule) -> str | None:
    return next((name for name in LEARNING_RATE_NAMES if lightning_hasattr(module, name)), None)
