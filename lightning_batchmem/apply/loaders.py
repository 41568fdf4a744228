"""Sizes and lengths of a stage's dataloaders at a given batch size."""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_batchmem._lightning.data_source import combined_mode


def count_samples(loader: DataLoader[Any]) -> int | None:
    """Number of samples in an epoch of ``loader``; ``None`` for a stream without a length."""
    if isinstance(loader.dataset, IterableDataset):
        return sized_len(loader.dataset)
    sampler = loader.sampler if loader.batch_size is not None else getattr(loader.batch_sampler, "sampler", None)
    length = sized_len(sampler)
    return sized_len(loader.dataset) if length is None else length


def indices_to_draw(loader: DataLoader[Any], most: int) -> list[Any]:
    """Up to ``most`` indices: spread over the whole data set, or the first ones of the user's own sampler."""
    own_batches = loader.batch_size is None and loader.batch_sampler is not None
    if isinstance(loader.sampler, SequentialSampler | RandomSampler) and not own_batches:
        length = len(loader.sampler.data_source)
        count = min(most, length)
        return [i * length // count for i in range(count)]
    source = loader.batch_sampler if own_batches else loader.sampler
    copied = copy.deepcopy(source, {id(loader.dataset): loader.dataset})  # it may hold a random generator
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
    size: int  # samples per batch as it was requested
    requested_at: int | None  # the batch size then, to which `size` is proportional; None where it does not follow
    replicas: int = 1  # ranks among which Lightning divides its samples

    @property
    def samples(self) -> int | None:
        """Number of samples in an epoch on this rank; ``None`` for a stream without a length."""
        samples = count_samples(self.loader)
        return None if samples is None else -(-samples // self.replicas)  # the last ranks get some samples twice

    def size_at(self, batch_size: int) -> int:
        """Samples in each batch of this loader at ``batch_size``."""
        return self.size if self.requested_at is None else max(1, self.size * batch_size // self.requested_at)

    def batches(self, batch_size: int) -> float:
        """Batches in an epoch of this loader; ``inf`` for a stream without a length."""
        samples = self.samples
        if samples is None:
            return math.inf
        own_batches = self.loader.batch_size is None
        drop_last = getattr(self.loader.batch_sampler, "drop_last", False) if own_batches else self.loader.drop_last
        size = self.size_at(batch_size)
        return samples // size if drop_last else -(-samples // size)

    def largest_batch_size(self, limit_batches: int | float) -> int | None:
        """The largest batch size with a full batch under ``limit_*_batches``; ``None`` if it is not limited."""
        samples = self.samples
        if samples is None or self.requested_at is None:
            return None

        def too_large(batch_size: int) -> bool:
            # Lightning raises an error if a fraction leaves no batch
            is_empty = isinstance(limit_batches, float) and int(self.batches(batch_size) * limit_batches) == 0
            return self.size_at(batch_size) > samples or is_empty

        sizes = range(1, self.requested_at * (samples + 1) + 1)
        return max(1, bisect_left(sizes, True, key=too_large))


@dataclass(frozen=True)
class StageLoaders:
    """The loaders of one stage, as Lightning combines them and one by one."""

    combined: CombinedLoader
    sized: tuple[LoaderInfo, ...]

    @property
    def follows(self) -> bool:
        """Whether the size of at least one loader follows the batch size."""
        return any(one.requested_at is not None for one in self.sized)

    def batches(self, batch_size: int) -> float:
        """Batches in an epoch without ``limit_*_batches``; ``inf`` if that depends on a stream without a length."""
        combine: dict[str, Callable[[list[float]], float]] = {"min_size": min, "sequential": sum}
        return combine.get(combined_mode(self.combined), max)([one.batches(batch_size) for one in self.sized])

    def last_batch_size(self, batch_size: int) -> int:
        """Samples in the last batch of an epoch at ``batch_size``; half of it where that is a full batch or unknown."""
        samples = next((one.samples for one in self.sized if one.requested_at is not None), None)
        return (samples % batch_size if samples else 0) or max(1, batch_size // 2)

    def largest_batch_size(self, limit_batches: int | float) -> int | None:
        """The largest batch size on this rank at which every loader that follows it has a full batch, if any does."""
        sizes = [one.largest_batch_size(limit_batches) for one in self.sized]
        return min((size for size in sizes if size is not None), default=None)
