"""Sizes and lengths of a stage's dataloaders at any batch size.

The largest batch size that they allow follows from these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils._pytree import TreeSpec, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader

from lightning_batchmem.batches.loader_size import count_samples, set_loader_batch_size


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

    def has_full_batch(self, batch_size: int) -> bool:
        """Whether the data have enough samples for a full batch."""
        return self.samples is None or self.size_at(batch_size) <= self.samples

    def may_end_smaller(self, batch_size: int, batches_in_epoch: float) -> bool:
        """Whether an epoch of this many batches has a last one that may have fewer samples."""
        full_batches = self.batches(batch_size, full_only=True)
        num_batches = min(self.batches(batch_size), batches_in_epoch)
        return math.isinf(full_batches) or num_batches > full_batches

    def sizes_with_last_of_one(self) -> list[int]:
        """Batch sizes at which the samples of an epoch are full batches and one sample more."""
        if self.requested_at is None or not self.samples:
            return []
        others = self.samples - 1
        divisors = [size for size in range(1, math.isqrt(others) + 1) if others % size == 0]
        sizes = {size for divisor in divisors for size in (divisor, others // divisor)} - {1}
        batch_sizes = [(size * self.requested_at // self.size, size) for size in sizes]
        return [
            batch_size
            for batch_size, size in batch_sizes
            if batch_size > 0 and self.size_at(batch_size) == size
        ]


def forms_own_batches(loader: DataLoader[Any]) -> bool:
    """Whether a batch sampler of the project, or the data set, decides how large a batch is."""
    if loader.batch_size is not None:
        return False
    return type(loader.batch_sampler) is not BatchSampler


@dataclass(eq=False)
class BudgetLoader:
    """One loader of a stage that forms its own batches; it takes the place of a ``LoaderInfo``.

    Args:
        loader: the loader, as the project makes it.
        at_budget: sets a budget, gives the loader that the project makes with it, and restores the
            budget at its end.
        follows: whether the batches follow the budget.
        counts: batches in an epoch at the budgets at which they were counted.
    """

    # Samples of an epoch say nothing about the number of batches.
    samples = None

    loader: DataLoader[Any]
    at_budget: Callable[[int], AbstractContextManager[DataLoader[Any]]]
    follows: bool = True
    counts: dict[int, int] = field(default_factory=dict)

    def size_at(self, batch_size: int) -> int:
        return batch_size

    def has_full_batch(self, batch_size: int) -> bool:
        """Whether an epoch has a second batch. Otherwise a larger budget would change nothing."""
        return self.batches(batch_size) > 1

    def may_end_smaller(self, batch_size: int, batches_in_epoch: float) -> bool:
        """Never: other batches at the same budget take the place of a smaller last one."""
        return False

    def sizes_with_last_of_one(self) -> list[int]:
        return []

    def batches(self, batch_size: int, *, full_only: bool = False) -> float:
        """Batches in an epoch; ``inf`` where they were never counted.

        Beside the budgets at which they were counted, their number is in inverse proportion.
        """
        if not self.counts:
            return math.inf
        if not self.follows:
            return next(iter(self.counts.values()))
        nearest = min(self.counts, key=lambda budget: abs(math.log(budget / batch_size)))
        return max(1, math.ceil(self.counts[nearest] * nearest / batch_size))

    def has_constant_length(self, batch_size: int, larger_size: int) -> bool:
        """Whether the loader has as many batches in an epoch at both budgets."""
        lengths = []
        for budget in (batch_size, larger_size):
            with self.at_budget(budget) as loader:
                lengths.append(sized_len(loader))
        return lengths[0] == lengths[1] and (lengths[0] or 0) > 1

    def learn(self, batch_size: int, batches: int | None, *, follows: bool = True) -> None:
        """Keep what reading its batches at a budget has shown.

        Args:
            batch_size: the budget.
            batches: batches in an epoch; None if their end was not reached.
            follows: whether the batches follow the budget.
        """
        if batches is not None:
            self.counts[batch_size] = batches
        self.follows = self.follows and follows

    def count(self, batch_size: int) -> bool:
        """Count the batches at a budget, if the loader has a length; whether this was new."""
        if batch_size in self.counts or not self.follows:
            return False
        with self.at_budget(batch_size) as loader:
            length = sized_len(loader)
        if length is None:
            return False
        self.counts[batch_size] = length
        return True


@dataclass(frozen=True)
class StageLoaders:
    """The loaders of one stage, as Lightning combines them and one by one."""

    # Lightning's CombinedLoader, which only Lightning's loops read.
    combined: Any
    sized: tuple[LoaderInfo | BudgetLoader, ...]
    # How the loaders are combined: "min_size", "max_size", "max_size_cycle" or "sequential".
    mode: str
    # The collection of the loaders, in which a batch of several loaders has its parts.
    structure: TreeSpec
    # The hook of Lightning that returns such loaders, such as "train_dataloader".
    hook: str

    @property
    def stage(self) -> str:
        """The name of the stage in hooks: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``."""
        return self.hook.removesuffix("_dataloader")

    def in_structure(self, batches: Sequence[Any]) -> Any:
        """One batch per loader, in the collection of the loaders."""
        return tree_unflatten(list(batches), self.structure)

    @property
    def follows(self) -> bool:
        """Whether the size of at least one loader follows the batch size."""
        return any(loader.follows for loader in self.sized)

    def set_sizes(self, batch_size: int) -> None:
        """Set the size of each loader that follows, because the user's hooks may read it."""
        for loader, info in zip(self.combined.flattened, self.sized, strict=True):
            if info.follows and loader.batch_size is not None:
                set_loader_batch_size(loader, info.size_at(batch_size))

    def batches(self, batch_size: int, *, full_only: bool = False) -> float:
        """Batches in an epoch without ``limit_*_batches``.

        The number is ``inf`` if it depends on a stream without a length.
        """
        return self._combined_count(
            [loader.batches(batch_size, full_only=full_only) for loader in self.sized]
        )

    def _combined_count(self, counts: list[float]) -> float:
        """The number of batches or samples of the stage; ``counts`` has one for each loader."""
        combine: dict[str, Callable[[list[float]], float]] = {"min_size": min, "sequential": sum}
        return combine.get(self.mode, max)(counts)

    def samples(self, batch_size: int) -> float:
        """Samples in an epoch, in the unit of the batch size; ``inf`` if they are unknown."""
        counts = [
            info.samples * batch_size / info.size_at(batch_size)
            for info in self.sized
            if info.follows and info.samples
        ]
        return self._combined_count(counts) if counts else math.inf

    def last_batch_size(self, batch_size: int) -> int:
        """Samples in the last batch of an epoch at ``batch_size``.

        Where the last batch is full or unknown, half of ``batch_size`` is returned.
        """
        half = max(1, batch_size // 2)
        infos = [info for info in self.sized if info.follows and info.samples]
        if not infos:
            return half
        ends_epoch = infos[-1]
        if self.mode != "sequential":
            choose = min if self.mode == "min_size" else max
            ends_epoch = choose(infos, key=lambda info: info.batches(batch_size))
        size = ends_epoch.size_at(batch_size)
        remaining = (ends_epoch.samples or 0) % size
        return remaining * batch_size // size or half
