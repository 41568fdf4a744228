"""Sentences about what does not go with other optimizer steps: schedules, and accumulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch import Trainer
from torch.nn import Module

from lightning_batchmem._lightning.bounds import why_not_accumulate
from lightning_batchmem._lightning.strategies import has_batch_norm
from lightning_batchmem.batches.loaders import StageLoaders
from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.recipe import Recipe

# The attributes of torch's schedulers that are a number of steps, or several. Milestones are those
# of MultiStepLR and of SequentialLR, whose name is private in torch 2.5.1 to 2.14.
_LENGTHS = ("total_steps", "T_max", "total_iters", "milestones", "_milestones")

# Lengths that differ by at most this share are the same: an epoch may end with a part of a step.
_SAME_SHARE = 0.1


def schedule_notes(trainer: Trainer, before: Recipe, after: Recipe) -> list[str]:
    """A sentence for each schedule in steps whose length does not go with the training any more.

    Args:
        trainer: the Trainer, whose optimizers are configured for the training.
        before: the optimizer steps of the project before the search.
        after: those of the training.
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


def accumulation_note(
    trainer: Trainer,
    module: Module,
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
        return text if has_batch_norm(module) else ""
    if (after.effective_batch_size or 0) >= (before.effective_batch_size or 0):
        return ""
    why = why_not_accumulate(trainer, loaders, is_budget=options.budget)
    if not why or options.objective not in ("auto", "recipe"):
        return ""
    return (
        f"Accumulation does not keep the {before.effective_batch_size:,} samples of a step, because"
        f" {why}."
    )
