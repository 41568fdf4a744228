"""The batches of a loader that forms its own, at any budget: those that need most memory."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from lightning_batchmem.batches.byte_counts import count_bytes, without_views
from lightning_batchmem.batches.loaders import BudgetLoader
from lightning_batchmem.batches.reader import read_isolated
from lightning_batchmem.devices.foreign_values import error_text
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.devices.tensors import copied, samples_in, tensors_in
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.policy import ReadingPolicy


class BatchReading(NamedTuple):
    """The batches that a loader made at one budget, in numbers.

    ``num_batches`` is the number of batches in an epoch, or ``None`` where reading ended before.
    ``items`` counts the batch with most bytes. ``has_single_samples`` is true if a batch has one
    sample, as far as its tensors show this.
    """

    num_read: int
    num_batches: int | None
    largest_bytes: int
    items: float
    has_single_samples: bool


class WorstBatches(NamedTuple):
    """The batches that are kept: first the one with most bytes, then the others."""

    reading: BatchReading
    batches: list[Any]
    total_bytes: int


@dataclass(frozen=True)
class BatchReader:
    """Reads batches and keeps the worst of them.

    The worst are those with most bytes, with most items and with the longest sample. After them
    come the smallest one and the first ones, for steps with other shapes.

    Args:
        policy: how many batches are read, and how long.
        room_bytes: what the batches may hold in the process of the search; the first of them is
            kept in any case.
    """

    policy: ReadingPolicy
    room_bytes: float

    def read(self, loader: DataLoader[Any]) -> WorstBatches:
        """Read until there are enough batches, the time has passed, or the epoch ends.

        Raises:
            ValueError: if the loader makes no batch.
        """
        begin = time.monotonic()
        worst: dict[str, tuple[tuple[float, ...], Any]] = {}
        num_read = 0
        num_batches = None
        has_single_samples = False
        batches = iter(loader)
        while num_read < self.policy.budget.max_batches_read:
            if time.monotonic() - begin > self.policy.scan_seconds:
                break
            try:
                batch = next(batches)
            except StopIteration:
                num_batches = num_read
                break
            batch_bytes = count_bytes(batch)
            items = padded_items(batch)
            # Of batches with equally long samples, the one with most bytes is the worst.
            ranks: dict[str, tuple[float, ...]] = {
                "bytes": (batch_bytes, items),
                "items": (items, batch_bytes),
                "longest": (_longest_sample(batch), batch_bytes),
                "smallest": (-batch_bytes,),
            }
            if num_read < self.policy.budget.first_batches_kept:
                ranks[f"first {num_read}"] = ()
            for name, rank in ranks.items():
                if name not in worst or rank > worst[name][0]:
                    worst[name] = (rank, batch)
            has_single_samples |= samples_in(batch) == 1
            num_read += 1
        if not worst:
            raise ValueError("the loader must make at least one batch, got none")
        # The most important ones come first, as they do in `ranks`, and each of them once.
        ordered = list({id(batch): batch for _, batch in worst.values()}.values())
        (largest_bytes, items), _ = worst["bytes"]
        reading = BatchReading(num_read, num_batches, int(largest_bytes), items, has_single_samples)
        return self._within_room(reading, ordered)

    def _within_room(self, reading: BatchReading, ordered: list[Any]) -> WorstBatches:
        room_bytes = self.room_bytes
        chosen: list[Any] = []
        chosen_bytes = 0
        for batch in ordered:
            batch_bytes = count_bytes(batch)
            if not chosen or chosen_bytes + batch_bytes <= room_bytes:
                chosen.append(without_views(batch))
                chosen_bytes += batch_bytes
        return WorstBatches(reading, chosen, chosen_bytes)


def padded_items(batch: Any) -> float:
    """Elements of the largest integer tensor of a batch, or of its largest tensor without one.

    In a batch of texts these are its tokens, with the padding.
    """
    return float(max((tensor.numel() for tensor in _item_tensors(batch)), default=0))


def _longest_sample(batch: Any) -> float:
    """Elements of a row of the tensor that :func:`padded_items` counts."""
    largest = max(_item_tensors(batch), key=lambda tensor: tensor.numel(), default=None)
    if largest is None or largest.dim() < 2 or largest.shape[0] == 0:
        return 0.0
    return largest.numel() / largest.shape[0]


def _item_tensors(batch: Any) -> list[torch.Tensor]:
    tensors = tensors_in(batch)
    # A mask of booleans is not floating point either, and has no more elements than its tokens.
    whole_numbers = [t for t in tensors if not (t.is_floating_point() or t.is_complex())]
    return whole_numbers or tensors


def read_worst_batches(loader: DataLoader[Any], reader: BatchReader) -> WorstBatches:
    """Read batches of the loader at its budget, without a change of it.

    Raises:
        RuntimeError: if memory runs out.
    """
    timeout_seconds = reader.policy.scan_seconds + reader.policy.sample_seconds
    worst: WorstBatches = read_isolated(loader, reader.read, timeout_seconds=timeout_seconds)
    return worst


BUDGET_FACTOR = 4
"""The next smaller budget that is tried is the last one divided by this."""


class BudgetBatches:
    """The worst of the batches that one loader makes at a budget, read when they are needed.

    No share of the memory is left free for their shapes, since each size has few of them.

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
        self.is_ragged = False
        # Of made batches, which have each sample once.
        self.distinct_samples = None
        text = (
            f"Of up to {policy.budget.max_batches_read} batches that the loader made, the search"
            " used those with most bytes, most items and the longest sample."
        )
        self.notes = [Note("search", text)]
        self.sample_bytes = 0
        # Bytes of the largest batch at the budget where the search begins.
        self.longest_bytes = 0
        self._policy = policy
        self._reader = BatchReader(policy, share_bytes)
        self._readings: dict[int, BatchReading] = {}
        # The batches below were made at this budget. 0: there are none.
        self._budget = 0
        self._batches: list[Any] = []

    @property
    def num_other_batches(self) -> int:
        return len(self._batches) - 1

    def prepare(self, budget: int) -> None:
        """Read batches at a budget, unless this was the last one."""
        if budget == self._budget or (self._budget and not self.info.follows):
            return
        # Batches of another budget would take memory from the reader.
        self._budget = 0
        self._batches = []
        self.sample_bytes = 0
        try:
            with self.info.at_budget(budget) as loader:
                worst = read_worst_batches(loader, self._reader)
        # A sampler may raise any error at a budget that it was not made for.
        except Exception as error:
            if not self._readings or is_out_of_memory(error):
                raise
            raise ValueError(
                f"the loader must make batches at each budget, got {error_text(error)} at {budget}."
                " Pass a smaller max_batch_size, or compute what depends on the budget anew."
            ) from error
        self._budget = budget
        self._batches = worst.batches
        self.sample_bytes = worst.total_bytes
        self._readings[budget] = worst.reading
        self.longest_bytes = self.longest_bytes or worst.reading.largest_bytes
        self.info.learn(budget, worst.reading.num_batches)

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
            largest_bytes = self._policy.budget.shrinking_share * reading.largest_bytes
            if smaller_reading.largest_bytes > largest_bytes:
                break
            if needs_two_samples and smaller_reading.has_single_samples:
                break
            budget, reading = smaller, smaller_reading
        if not self._has_changed():
            # An error at another budget is a change too.
            with suppress(ValueError):
                self._read(BUDGET_FACTOR * budget)
                self.info.learn(budget, None, follows=self._has_changed())
        self.longest_bytes = reading.largest_bytes
        return budget

    def longest_sample_text(self, batch_size: int) -> str:
        """Empty: the loader has made these batches."""
        return ""

    def copies(self, batch_size: int) -> Any:
        """Raise a ValueError."""
        raise ValueError("batches within a budget have no copies of one sample")

    def has_constant_length(self, budget: int) -> bool:
        """Whether the loader follows the budget, but has as many batches with any of them."""
        larger_budget = BUDGET_FACTOR * budget
        return self.info.follows and self.info.has_constant_length(budget, larger_budget)

    def _has_changed(self) -> bool:
        """Whether the largest batches at the budgets that were read differ, beyond chance."""
        largest_bytes = [reading.largest_bytes for reading in self._readings.values()]
        return max(largest_bytes) > (1 + self._policy.budget.differing_share) * min(largest_bytes)

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
