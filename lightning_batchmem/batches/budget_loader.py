"""Loaders that form their own batches within a budget, such as a number of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import BatchSampler, DataLoader


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
