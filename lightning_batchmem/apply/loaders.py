"""What the batch size makes of a stage's loaders: their own sizes, how many batches, and how large it can be."""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Callable, Sized
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_batchmem._lightning.data_source import combined_mode


def count_samples(loader: DataLoader[Any]) -> int | None:
    """How many samples an epoch of ``loader`` has as it is; ``None`` for a stream without a length."""
    if isinstance(loader.dataset, IterableDataset):
        return _length(loader.dataset)
    sampler = loader.sampler if loader.batch_size is not None else getattr(loader.batch_sampler, "sampler", None)
    length = _length(sampler)
    return _length(loader.dataset) if length is None else length


def indices_to_draw(loader: DataLoader[Any], most: int) -> list[Any]:
    """Up to ``most`` indices: spread over the whole set, or the first ones that a sampler of the user's own names."""
    own_batches = loader.batch_size is None and loader.batch_sampler is not None
    if isinstance(loader.sampler, SequentialSampler | RandomSampler) and not own_batches:
        length = len(loader.sampler.data_source)
        count = min(most, length)
        return [i * length // count for i in range(count)]
    source = loader.batch_sampler if own_batches else loader.sampler
    copied = copy.deepcopy(source, {id(loader.dataset): loader.dataset})  # a copy: it may have a generator of its own
    named = chain.from_iterable(copied) if own_batches else iter(copied)  # type: ignore[arg-type]
    return list(islice(named, most))


def limited_batches(batches: float, limit_batches: int | float) -> float:
    """What Lightning's ``limit_*_batches`` leaves of the batches of an epoch."""
    if isinstance(limit_batches, int):
        return min(batches, limit_batches)
    return batches if math.isinf(batches) else int(batches * limit_batches)


def _length(value: object) -> int | None:
    try:
        return len(value) if isinstance(value, Sized) else None
    except (TypeError, NotImplementedError):  # as Lightning takes it: there is a __len__, and it does not know
        return None


@dataclass(frozen=True)
class LoaderInfo:
    """One loader of a stage, and what the batch size makes of its own size.

    Args:
        loader: as it was requested.
        size: samples in each of its batches then.
        requested_at: the batch size then, which ``size`` is in proportion to; ``None`` where it has its own.
        replicas: among how many ranks Lightning will divide its samples.
    """

    loader: DataLoader[Any]
    size: int
    requested_at: int | None
    replicas: int = 1

    @property
    def samples(self) -> int | None:
        """How many samples an epoch has on this rank; ``None`` for a stream without a length."""
        samples = count_samples(self.loader)
        return None if samples is None else -(-samples // self.replicas)  # the last ranks get some twice

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
        """The data set's bound, as :meth:`StageLoaders.largest_batch_size` says."""
        samples = self.samples
        if samples is None or self.requested_at is None:
            return None

        def too_large(batch_size: int) -> bool:
            # an int keeps up to so many batches; a fraction of too few is none, which Lightning refuses
            none_left = isinstance(limit_batches, float) and int(self.batches(batch_size) * limit_batches) == 0
            return self.size_at(batch_size) > samples or none_left

        sizes = range(1, self.requested_at * (samples + 1) + 1)
        return max(1, bisect_left(sizes, True, key=too_large))


@dataclass(frozen=True)
class StageLoaders:
    """The loaders of one stage, as the project itself makes them.

    Args:
        combined: all of them, as Lightning combines them.
        sized: each of them, with its size.
    """

    combined: CombinedLoader
    sized: tuple[LoaderInfo, ...]

    @property
    def follows(self) -> bool:
        """Whether the size of at least one loader follows the batch size."""
        return any(one.requested_at is not None for one in self.sized)

    def batches(self, batch_size: int) -> float:
        """Batches in an epoch at ``batch_size``, before Lightning's ``limit_*_batches``.

        Returns:
            The shortest loader's for ``min_size``, the longest's for ``max_size`` and ``max_size_cycle``, the sum for
            ``sequential``; ``inf`` where that depends on a stream without a length.
        """
        combine: dict[str, Callable[[list[float]], float]] = {"min_size": min, "sequential": sum}
        return combine.get(combined_mode(self.combined), max)([one.batches(batch_size) for one in self.sized])

    def last_batch_size(self, batch_size: int) -> int:
        """Samples in the last batch of an epoch at ``batch_size``; half of it where that is a full batch or unknown."""
        samples = next((one.samples for one in self.sized if one.requested_at is not None), None)
        return (samples % batch_size if samples else 0) or max(1, batch_size // 2)

    def largest_batch_size(self, limit_batches: int | float) -> int | None:
        """The largest batch size that the data leave a full batch of, in every loader that follows.

        Args:
            limit_batches: the Trainer's ``limit_*_batches``, not 0: an int keeps up to so many batches of an epoch, a
                float that fraction of them, and Lightning refuses to keep none.

        Returns:
            Samples, on this rank, and at least 1, where Lightning says itself what is wrong; ``None`` for streams
            without a length, and where nothing follows.
        """
        search_limits = [one.largest_batch_size(limit_batches) for one in self.sized]
        return min((bound for bound in search_limits if bound is not None), default=None)
