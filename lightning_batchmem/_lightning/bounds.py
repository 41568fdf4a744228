"""The largest batch sizes that data and settings of a Trainer allow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from lightning.pytorch import Trainer
from torch.utils.data import RandomSampler, SequentialSampler

from lightning_batchmem._lightning.trainer_state import callbacks_of, in_every_package
from lightning_batchmem.batches.loaders import BudgetLoader, LoaderInfo, StageLoaders
from lightning_batchmem.plan.options import (
    UNBOUNDED_MAX_BATCH_SIZE,
    UNBOUNDED_MAX_BUDGET,
    SearchOptions,
)
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.recipe import RAISED_RATIO
from lightning_batchmem.plan.records import Bound, SizeLimit
from lightning_batchmem.plan.sizes import largest_where

# How often the batches within a budget are counted, at most, to find one bound.
_MOST_COUNTS = 12

# Budgets are searched until they differ by less than this share, as sizes are rounded.
_COUNTED_SHARE = 1 / 64


def why_not_accumulate(
    trainer: Trainer, loaders: StageLoaders | None = None, *, is_budget: bool = False
) -> str:
    """Why a search may not choose how many batches an optimizer step has; empty if it may.

    Args:
        trainer: the Trainer.
        loaders: the loaders of the training; ``None`` before they are made.
        is_budget: whether sizes are budgets.
    """
    if not trainer.lightning_module.automatic_optimization:
        return "your training_step steps the optimizers itself"
    if not steps_are_batches(trainer):
        return "a GradientAccumulationScheduler sets it"
    if trainer.strategy.handles_gradient_accumulation:
        return "DeepSpeed has accumulate_grad_batches of the Trainer, which a search cannot change"
    if is_budget:
        return "the batches are formed within a budget"
    if loaders is not None and len(loaders.sized) > 1:
        return "there are several training loaders"
    return ""


def limited_batches(batches: float, limit_batches: int | float) -> float:
    """Number of batches of an epoch under Lightning's ``limit_*_batches``."""
    if isinstance(limit_batches, int):
        return min(batches, limit_batches)
    return batches if math.isinf(batches) else int(batches * limit_batches)


def reached_samples(trainer: Trainer, stage: str, largest_size: int, info: LoaderInfo) -> float:
    """How many of the first samples of a loader a stage reads at any size up to the largest one.

    It is ``inf`` where the order of the samples is random, or unknown.
    """
    loader = info.loader
    # Under overfit_batches Lightning takes the samples in their order.
    is_overfitting = getattr(trainer, "overfit_batches", 0) > 0
    has_order = isinstance(loader.sampler, SequentialSampler) or (
        is_overfitting and isinstance(loader.sampler, RandomSampler)
    )
    if loader.batch_size is None or not has_order:
        return math.inf
    limit = getattr(trainer, f"limit_{stage}_batches")
    size = info.size_at(largest_size)
    reached: float = math.inf
    if isinstance(limit, int):
        reached = limit * size
    elif info.samples is not None:
        # The number of batches is rounded down, and the last one may not be full.
        reached = min(info.samples, math.ceil(limit * (info.samples + size)))
    if stage == "train" and trainer.max_steps > 0 and steps_are_batches(trainer):
        reached = min(reached, trainer.max_steps * trainer.accumulate_grad_batches * size)
    return max(1, reached * info.replicas)


def steps_are_batches(trainer: Trainer) -> bool:
    """Whether each optimizer step takes the batches that the Trainer accumulates."""
    scheduler = in_every_package("callbacks.GradientAccumulationScheduler")
    has_scheduler = any(isinstance(callback, scheduler) for callback in callbacks_of(trainer))
    return trainer.lightning_module.automatic_optimization and not has_scheduler


def stage_bounds(trainer: Trainer, stage: str, loaders: StageLoaders) -> list[Bound]:
    """The largest sizes that the data set and ``limit_*_batches`` allow.

    The data set must have a full batch of each loader, and the limit must leave a batch.
    """
    followers = [loader for loader in loaders.sized if loader.follows]
    data_bound = _bound(
        "dataset", loaders, lambda size: all(loader.has_full_batch(size) for loader in followers)
    )
    return [data_bound, _limit_bound(trainer, stage, loaders)]


def training_bounds(
    trainer: Trainer,
    loaders: StageLoaders,
    validation: StageLoaders | None,
    options: SearchOptions,
    policy: SearchPolicy,
    project_size: int | None,
    *,
    keeps_step: bool = False,
) -> list[Bound]:
    """The largest sizes that the data and each setting of the trainer allow.

    Without most of these bounds Lightning raises errors.

    Args:
        trainer: the Trainer.
        loaders: the loaders of the training.
        validation: the loaders of the validation; ``None`` for none.
        options: the arguments of BatchFinder.
        policy: the numbers that steer the search.
        project_size: the size of the project; ``None`` where it is not known, or a placeholder.
        keeps_step: whether accumulation keeps the samples of an optimizer step.
    """
    bounds = stage_bounds(trainer, "train", loaders)
    if validation is not None:
        bounds.append(_limit_bound(trainer, "val", validation))
    # A Trainer that validates by time, as lightning 2.6 can, does not have this attribute.
    every = getattr(trainer, "val_check_interval", None)
    limit = trainer.limit_train_batches
    if keeps_step:
        # The samples of a step bound the size, and the interval goes with the accumulation.
        return bounds
    if isinstance(every, int) and _must_fit_in_epoch(trainer):
        interval_bound = _bound(
            "val_check_interval",
            loaders,
            lambda size: limited_batches(loaders.batches(size), limit) >= every,
        )
        bounds.append(interval_bound)
    fewest = options.least_steps_per_epoch
    # The smallest multiple may be larger than the size of the project.
    smallest = max(project_size or 0, options.first_size(policy.first_size))
    if project_size is not None and options.objective == "recipe":
        bounds.append((max(project_size, options.first_size(1)), "recipe"))
    elif project_size is not None and options.bounds_the_raise:
        bounds.append((max(int(RAISED_RATIO * project_size), smallest), "recipe"))
    elif fewest:
        batches = fewest * trainer.accumulate_grad_batches
        reason: SizeLimit = "min_steps_per_epoch"
        share: int | float = limit
        if isinstance(limit, int):
            # The number of batches is the same at each size, as long as the data have as many.
            share = 1.0
            if limit < batches:
                batches = limit
                reason = _reason_of_limit(trainer, "train")
        largest, _ = _bound(
            reason,
            loaders,
            lambda size: limited_batches(loaders.batches(size, full_only=True), share) >= batches,
        )
        bounds.append((max(largest, smallest), reason))
    return bounds


def _must_fit_in_epoch(trainer: Trainer) -> bool:
    """Whether an interval of validation that is longer than an epoch is an error in Lightning."""
    # Without validation it is none any more in lightning 2.6, whose Trainers have this attribute.
    is_without_effect = trainer.limit_val_batches == 0 and hasattr(
        trainer, "_val_check_time_interval"
    )
    return trainer.check_val_every_n_epoch is not None and not is_without_effect


def _bound(reason: SizeLimit, loaders: StageLoaders, fits: Callable[[int], bool]) -> Bound:
    """The largest size for which ``fits`` is true."""
    budget_loaders = [loader for loader in loaders.sized if isinstance(loader, BudgetLoader)]
    if not budget_loaders:
        return largest_where(fits, 0, UNBOUNDED_MAX_BATCH_SIZE), reason
    return _largest_budget(budget_loaders, fits), reason


def _largest_budget(loaders: list[BudgetLoader], fits: Callable[[int], bool]) -> int:
    """The largest budget for which ``fits`` is true, from batches that are counted near it.

    Where no loader has a length, it is estimated.
    """
    budget = largest_where(fits, 0, UNBOUNDED_MAX_BUDGET)
    low = 0
    for _ in range(_MOST_COUNTS):
        if budget == UNBOUNDED_MAX_BUDGET:
            return budget
        counts_are_new = [loader.count(budget) for loader in loaders]
        if not any(counts_are_new):
            return budget
        counted = {size for loader in loaders for size in loader.counts}
        too_large = min((size for size in counted if not fits(size)), default=math.inf)
        low = max((size for size in counted if size < too_large), default=0)
        if too_large - low <= max(1, _COUNTED_SHARE * low):
            break
        # The estimate was not exact, so the budget is searched near it, in equal ratios.
        budget = (
            2 * low if too_large == math.inf else max(low + 1, math.isqrt(low * int(too_large)))
        )
    return low


def _reason_of_limit(trainer: Trainer, stage: str) -> SizeLimit:
    """The setting that has set ``limit_*_batches``."""
    name = f"limit_{stage}_batches"
    is_overfitting = getattr(trainer, name) == getattr(trainer, "overfit_batches", 0)
    return cast("SizeLimit", "overfit_batches" if is_overfitting else name)


def _limit_bound(trainer: Trainer, stage: str, loaders: StageLoaders) -> Bound:
    """The largest size that leaves a batch, which Lightning requires of a share of them."""
    limit = getattr(trainer, f"limit_{stage}_batches")
    reason = _reason_of_limit(trainer, stage)
    if (isinstance(limit, int) or limit == 1) and reason != "overfit_batches":
        reason = "validation data"
    followers = [loader for loader in loaders.sized if loader.follows and loader.batches(1) > 0]
    return _bound(
        reason,
        loaders,
        lambda size: all(limited_batches(loader.batches(size), limit) for loader in followers),
    )
