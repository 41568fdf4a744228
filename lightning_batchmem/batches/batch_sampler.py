"""Loaders with a batch sampler, also where it is passed as ``sampler`` of a loader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from lightning_batchmem.state.snapshot import restored_parts


def batch_sampler_of(loader: DataLoader[Any]) -> Any:
    """The sampler that makes the indices of a batch.

    It may also be passed as ``sampler``, with ``batch_size=None``.
    """
    is_sampler = loader.batch_size is None and hasattr(loader.sampler, "batch_size")
    return loader.sampler if is_sampler and loader.batch_sampler is None else loader.batch_sampler


@contextmanager
def restored_sampler(sampler: Any, dataset: object) -> Iterator[Any]:
    """The sampler, which is restored at the end; its data set is left alone.

    A sampler with an iterator or a thread cannot be restored. A random sampler of the whole data
    set takes its place.
    """
    source: Any = dataset.batched if isinstance(dataset, SingleSamples) else dataset
    with restored_parts([("sampler", sampler)], [source]) as restored:
        if not restored.not_restorable:
            yield sampler
            return
        # A new generator always has the same seed.
        other: Any = RandomSampler(source, generator=torch.Generator())
        batch_size = getattr(sampler, "batch_size", None)
        if batch_size is not None:
            other = BatchSampler(other, batch_size, drop_last=False)
        yield other


def single_samples(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader, or a view of it that reads single samples.

    The view is for a loader whose data set reads whole batches.
    """
    sampler = batch_sampler_of(loader)
    if sampler is loader.batch_sampler:
        return loader
    view = copy.copy(loader)
    # DataLoader.__setattr__ raises an error for these attributes (torch 2.5.1 to 2.14).
    vars(view).update(
        batch_sampler=sampler,
        dataset=SingleSamples(loader.dataset),
        collate_fn=partial(_collated, loader.collate_fn),
    )
    return view


@dataclass(eq=False)
class SingleSamples(Dataset[Any]):
    """Batches of one sample each, of a data set that is indexed with a list."""

    batched: Any

    def __len__(self) -> int:
        return len(self.batched)

    def __getitem__(self, index: Any) -> Any:
        return self.batched[[index]]


@dataclass(frozen=True)
class JoinedSample:
    """A batch of one sample, which ``__getitems__`` of a data set has joined."""

    batch: Any


def joined_collate(collate_fn: Callable[[Any], Any], samples: list[Any]) -> Any:
    """Collate as the project does; batches of a data set are joined to one before."""
    if isinstance(samples[0], JoinedSample):
        return collate_fn(tree_map(_join, *(sample.batch for sample in samples)))
    return collate_fn(samples)


def _collated(collate_fn: Callable[[Any], Any], samples: list[Any]) -> Any:
    """Join batches of one sample each to one batch, and then collate it as the project does."""
    # A list of one item has one sample. A longer list has the tensors of one batch.
    is_list = isinstance(samples[0], list) and len(samples[0]) == 1
    return collate_fn(list(chain(*samples)) if is_list else tree_map(_join, *samples))


def _join(*parts: Any) -> Any:
    if isinstance(parts[0], Tensor):
        longest = max(parts, key=Tensor.numel)
        # The data set pads them to the longest.
        is_padded = any(part.shape[1:] != longest.shape[1:] for part in parts)
        return torch.cat([longest] * len(parts) if is_padded else parts)
    if hasattr(parts[0], "to"):
        raise ValueError(
            "a batch that the data set makes must consist of tensors and arrays, got"
            f" {type(parts[0]).__name__}. Let the collate function join the samples."
        )
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else parts[0]
