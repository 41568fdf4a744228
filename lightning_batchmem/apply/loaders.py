"""Sizes and lengths of a stage's dataloaders at any batch size.

The largest batch size that they allow follows from these.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from lightning_batchmem._lightning.data_source import batch_sampler_of, combined_mode
from lightning_batchmem.plan.options import UNBOUNDED_MAX_BATCH_SIZE, SearchOptions
from lightning_batchmem.plan.records import SizeLimit
from lightning_batchmem.plan.scaling import largest_where

# A bound is a largest size in samples, and the setting or data that limits it.
Bound = tuple[int, SizeLimit]


def count_samples(loader: DataLoader[Any]) -> int | None:
    """Number of samples in an epoch of ``loader``; ``None`` for a stream without a length."""
    if isinstance(loader.dataset, IterableDataset):
        return sized_len(loader.dataset)
    if loader.batch_size is not None:
        sampler: Any = loader.sampler
    else:
        sampler = getattr(loader.batch_sampler, "sampler", None)
    length = sized_len(sampler)
    return sized_len(loader.dataset) if length is None else length


def indices_to_draw(loader: DataLoader[Any], most: int) -> list[Any]:
    """Up to ``most`` indices of samples.

    They are spread over the whole data set, or are the first ones of the user's own sampler.
    """
    own_batches = loader.batch_size is None and loader.batch_sampler is not None
    data_sets = [loader.dataset, getattr(loader.dataset, "batched", None)]
    if isinstance(loader.sampler, SequentialSampler | RandomSampler) and not own_batches:
        length = len(loader.sampler.data_source)
        count = min(most, length)
        return [i * length // count for i in range(count)]
    source = loader.batch_sampler if own_batches else loader.sampler
    # The indices come from a copy, because the sampler may have a random generator.
    copied = copy.deepcopy(source, {id(one): one for one in data_sets})
    # mypy does not see that the sampler is not None, and that a batch sampler makes lists.
    indices = chain.from_iterable(copied) if own_batches else iter(copied)  # type: ignore[arg-type]
    return list(islice(indices, most))


def limited_batches(batches: float, limit_batches: int | float) -> float:
    """Number of batches of an epoch under Lightning's ``limit_*_batches``."""
    if isinstance(limit_batches, int):
        return min(batches, limit_batches)
    return batches if math.isinf(batches) else int(batches * limit_batches)


@dataclass(frozen=True)
class LoaderInfo:
    """One loader of a stage, and its size at any batch size."""

    loader: DataLoader[Any]
    # The size is the number of samples per batch when the loader was requested.
    size: int
    # This is the batch size at that time, to which `size` is proportional. It is None where `size`
    # does not follow the batch size.
    requested_at: int | None
    # Lightning divides the samples of the loader among this number of ranks.
    replicas: int = 1

    @property
    def follows(self) -> bool:
        return self.requested_at is not None

    @property
    def samples(self) -> int | None:
        """Number of samples in an epoch on this rank; ``None`` for a stream without a length."""
        samples = count_samples(self.loader)
        # The quotient is rounded up, because the last ranks get some samples twice.
        return None if samples is None else -(-samples // self.replicas)

    def size_at(self, batch_size: int) -> int:
        if self.requested_at is None:
            return self.size
        return max(1, self.size * batch_size // self.requested_at)

    def batches(self, batch_size: int, *, full_only: bool = False) -> float:
        """Batches in an epoch of this loader; ``inf`` for a stream without a length."""
        samples = self.samples
        if samples is None:
            return math.inf
        if self.loader.batch_size is None:
            drop_last = getattr(self.loader.batch_sampler, "drop_last", False)
        else:
            drop_last = self.loader.drop_last
        size = self.size_at(batch_size)
        return samples // size if full_only or drop_last else -(-samples // size)


@dataclass(frozen=True)
class StageLoaders:
    """The loaders of one stage, as Lightning combines them and one by one."""

    combined: CombinedLoader
    sized: tuple[LoaderInfo, ...]

    @property
    def follows(self) -> bool:
        """Whether the size of at least one loader follows the batch size."""
        return any(one.follows for one in self.sized)

    def batches(self, batch_size: int, *, full_only: bool = False) -> float:
        """Batches in an epoch without ``limit_*_batches``.

        The number is ``inf`` if it depends on a stream without a length.
        """
        combine: dict[str, Callable[[list[float]], float]] = {"min_size": min, "sequential": sum}
        return combine.get(combined_mode(self.combined), max)(
            [one.batches(batch_size, full_only=full_only) for one in self.sized]
        )

    def last_batch_size(self, batch_size: int) -> int:
        """Samples in the last batch of an epoch at ``batch_size``.

        Where the last batch is full or unknown, half of ``batch_size`` is returned.
        """
        samples = next((one.samples for one in self.sized if one.follows), None)
        return (samples % batch_size if samples else 0) or max(1, batch_size // 2)


def stage_bounds(trainer: Trainer, stage: str, loaders: StageLoaders) -> list[Bound]:
    """The largest sizes that the data set and ``limit_*_batches`` allow.

    The data set must have a full batch of each loader, and the limit must leave a batch.
    """
    infos = [info for info in loaders.sized if info.follows]

    def is_full(size: int) -> bool:
        return all(info.samples is None or info.size_at(size) <= info.samples for info in infos)

    return [_bound("dataset", is_full), _limit_bound(trainer, stage, loaders)]


def training_bounds(
    trainer: Trainer,
    loaders: StageLoaders,
    validation: StageLoaders | None,
    options: SearchOptions,
    project_size: int | None,
) -> list[Bound]:
    """The largest sizes that the data and each setting of the trainer allow.

    Without these bounds Lightning raises errors.
    """
    bounds = stage_bounds(trainer, "train", loaders)
    if validation is not None:
        bounds.append(_limit_bound(trainer, "val", validation))
    every = trainer.val_check_interval
    limit = trainer.limit_train_batches
    if isinstance(every, int) and trainer.check_val_every_n_epoch is not None:
        interval_bound = _bound(
            "val_check_interval",
            lambda size: limited_batches(loaders.batches(size), limit) >= every,
        )
        bounds.append(interval_bound)
    if (
        options.min_steps_per_epoch
        and options.max_batch_size is None
        and options.target_batch_size is None
    ):
        fewest = options.min_steps_per_epoch * trainer.accumulate_grad_batches
        # A limit that is a number of batches does not depend on the batch size.
        share = limit if isinstance(limit, float) else 1.0
        largest, _ = _bound(
            "min_steps_per_epoch",
            lambda size: limited_batches(loaders.batches(size, full_only=True), share) >= fewest,
        )
        bounds.append((max(largest, project_size or 0, options.first_size), "min_steps_per_epoch"))
    return bounds


def _bound(reason: SizeLimit, fits: Callable[[int], bool]) -> Bound:
    return largest_where(fits, 0, UNBOUNDED_MAX_BATCH_SIZE), reason


def _limit_bound(trainer: Trainer, stage: str, loaders: StageLoaders) -> Bound:
    """The largest size that leaves a batch, which Lightning requires of a share of them."""
    limit = getattr(trainer, f"limit_{stage}_batches")
    reason = (
        f"limit_{stage}_batches" if isinstance(limit, float) and limit < 1 else "validation data"
    )
    if limit == getattr(trainer, "overfit_batches", 0):
        reason = "overfit_batches"
    follow = [one for one in loaders.sized if one.follows and one.samples]
    return _bound(
        cast("SizeLimit", reason),
        lambda size: all(limited_batches(one.batches(size), limit) for one in follow),
    )


def single_samples(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader, or a view of it that reads single samples.

    The view is for a loader whose data set reads whole batches.
    """
    sampler = batch_sampler_of(loader)
    if sampler is loader.batch_sampler:
        return loader
    view = copy.copy(loader)
    vars(view).update(batch_sampler=sampler, dataset=_SingleSamples(loader.dataset))
    vars(view).update(collate_fn=partial(_collated, loader.collate_fn))
    return view


@dataclass(frozen=True)
class _SingleSamples(Dataset[Any]):
    """Batches of one sample each, of a data set that is indexed with a list."""

    batched: Any

    def __len__(self) -> int:
        return len(self.batched)

    def __getitem__(self, index: Any) -> Any:
        return self.batched[[index]]


def _collated(collate_fn: Callable[[Any], Any], samples: list[Any]) -> Any:
    """Join batches of one sample each to one batch, and then collate it as the project does."""
    # A list of one item has one sample. A longer list has the tensors of one batch.
    is_list = isinstance(samples[0], list) and len(samples[0]) == 1
    return collate_fn(list(chain(*samples)) if is_list else tree_map(_join, *samples))


def _join(*parts: Any) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else parts[0]
