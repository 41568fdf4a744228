"""The batches of a loader that forms its own batches, at any budget."""

from __future__ import annotations

from typing import Any

from lightning_batchmem.batches.budget_loader import BudgetLoader
from lightning_batchmem.batches.read_batches import BatchReader, BatchReading, read_worst_batches
from lightning_batchmem.devices.tensors import copied
from lightning_batchmem.plan.policy import ReadingPolicy

BUDGET_FACTOR = 4
"""The next smaller budget that is tried is the last one divided by this."""


class BudgetBatches:
    """The worst of the batches that one loader makes at a budget, read when they are needed.

    Args:
        info: the loader at any budget.
        policy: how many batches are read, and how long.
        share_bytes: what the batches that are kept may hold.
    """

    def __init__(
        self,
        info: BudgetLoader,
        policy: ReadingPolicy,
        share_bytes: float,
    ) -> None:
        self.info = info
        self.notes = [
            f"Of up to {policy.max_batches_read} batches that the loader made, the search used"
            " those with most bytes, most items and the longest sample."
        ]
        self.held_bytes = 0
        # Bytes of the largest batch at the budget where the search begins.
        self.longest_bytes = 0
        self._policy = policy
        self._reader = BatchReader(policy, share_bytes)
        self._readings: dict[int, BatchReading] = {}
        # The batches that are kept are those of this budget. 0: of none.
        self._budget = 0
        self._batches: list[Any] = []

    @property
    def num_other_batches(self) -> int:
        return len(self._batches) - 1

    def prepare(self, budget: int) -> None:
        """Read batches at a budget, unless those that are kept have it."""
        if budget == self._budget or (self._budget and not self.info.follows):
            return
        # Batches of another budget would take memory from the reader.
        self._budget = 0
        self._batches = []
        self.held_bytes = 0
        with self.info.at_budget(budget) as loader:
            worst = read_worst_batches(loader, self._reader)
        self._budget = budget
        self._batches = worst.batches
        self.held_bytes = worst.held_bytes
        self._readings[budget] = worst.reading
        self.longest_bytes = self.longest_bytes or worst.reading.largest_bytes
        if worst.reading.num_batches is not None:
            self.info.counts[budget] = worst.reading.num_batches

    def smallest_useful_budget(self, budget: int, *, needs_two_samples: bool) -> int:
        """The budget, divided until a smaller one no longer makes smaller batches.

        Below it a batch is one sample. The loader is found to follow the budget or not.

        Args:
            budget: the budget of the project.
            needs_two_samples: whether a batch of one sample is an error.
        """
        reading = self._read(budget)
        while (smaller := budget // BUDGET_FACTOR) > 0:
            try:
                smaller_reading = self._read(smaller)
            # A sampler may raise any exception if a sample is larger than the budget.
            except Exception:  # noqa: BLE001
                break
            largest_bytes = self._policy.shrinking_share * reading.largest_bytes
            if smaller_reading.largest_bytes > largest_bytes:
                break
            if needs_two_samples and smaller_reading.has_single_samples:
                break
            budget, reading = smaller, smaller_reading
        if not self._has_changed():
            self._read(BUDGET_FACTOR * budget)
            self.info.follows = self._has_changed()
        self.longest_bytes = reading.largest_bytes
        return budget

    def has_constant_length(self, budget: int) -> bool:
        """Whether the loader follows the budget, but has as many batches with any of them."""
        larger_budget = BUDGET_FACTOR * budget
        return self.info.follows and self.info.has_constant_length(budget, larger_budget)

    def _has_changed(self) -> bool:
        """Whether the largest batches at the budgets that were read differ, beyond chance."""
        largest_bytes = [reading.largest_bytes for reading in self._readings.values()]
        return max(largest_bytes) > (1 + self._policy.differing_share) * min(largest_bytes)

    def items(self, budget: int) -> float:
        """Items of the batch with most bytes, in which steps are timed."""
        self.prepare(budget)
        return self._reading.items

    def batch(self, budget: int) -> Any:
        """A copy of the batch with most bytes."""
        self.prepare(budget)
        return copied(self._batches[0])

    def other_lengths(self, budget: int, index: int) -> Any:
        """A copy of one of the other batches in turn, or of the only one."""
        self.prepare(budget)
        others = self._batches[1:] or self._batches
        return copied(others[index % len(others)])

    def batch_bytes(self, budget: int, longest_bytes: int) -> int:
        """Bytes of the largest batch, in proportion to the nearest budget that was read."""
        nearest = min(self._readings, key=lambda read: max(read / budget, budget / read))
        largest_bytes = self._readings[nearest].largest_bytes
        return largest_bytes * budget // nearest if self.info.follows else largest_bytes

    @property
    def _reading(self) -> BatchReading:
        return self._readings[self._budget]

    def _read(self, budget: int) -> BatchReading:
        self.prepare(budget)
        return self._reading
