"""Batches of any size for the search: made of a few real samples, or read from the loader."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch

# The name is private in torch 2.5.1 to 2.14.
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader, RandomSampler

from lightning_batchmem.batches.batch_sampler import joined_collate
from lightning_batchmem.batches.budget_batches import BudgetBatches
from lightning_batchmem.batches.byte_counts import batched_sizes, count_bytes
from lightning_batchmem.batches.loaders import BudgetLoader, LoaderInfo, StageLoaders
from lightning_batchmem.batches.sample_sizes import (
    LargestSum,
    LongestSample,
    SampleSizes,
    TypicalSamples,
)
from lightning_batchmem.batches.samples import SampleMeasure, read_samples
from lightning_batchmem.devices.tensors import copied
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.options import UNBOUNDED_MAX_BATCH_SIZE, WorstCase
from lightning_batchmem.plan.policy import ReadingPolicy


class ProbeBatches:
    """Batches of any size, made of real samples that are read once.

    Where the samples differ in size, the worst batches are made. Where a loader forms its own
    batches, some are read at each budget instead, and the worst of them are used. What is kept of
    all loaders takes at most a share of ``room_bytes``, the free memory of the process. Samples are
    kept for batches of up to ``largest_size``, and only the first ones are read of a loader, as
    many as ``reached`` returns for it. The collate functions of the project join them, and what
    these change is not restored here.
    """

    def __init__(
        self,
        loaders: StageLoaders,
        worst_case: WorstCase | None = None,
        *,
        policy: ReadingPolicy | None = None,
        largest_size: int = UNBOUNDED_MAX_BATCH_SIZE,
        room_bytes: int | None = None,
        reached: Callable[[LoaderInfo], float] = lambda _: math.inf,
    ) -> None:
        policy = policy or ReadingPolicy()
        room = math.inf if room_bytes is None else room_bytes
        share_bytes = room * policy.samples_share / len(loaders.sized)
        self._loaders = loaders
        self._of_loaders: list[_LoaderBatches | BudgetBatches] = []
        for info in loaders.sized:
            if isinstance(info, BudgetLoader):
                read = BudgetBatches(info, policy, share_bytes)
                self._of_loaders.append(read)
            else:
                made = _LoaderBatches(
                    info,
                    worst_case,
                    policy,
                    largest_size,
                    share_bytes,
                    reached(info),
                )
                self._of_loaders.append(made)
        # Whether batches of one size have other shapes again and again.
        self.is_ragged = any(batches.is_ragged for batches in self._of_loaders)
        # From the rank that found the longest samples.
        self._agreed_longest_bytes: list[int] | None = None
        notes = [note for batches in self._of_loaders for note in batches.notes]
        self.notes = tuple(dict.fromkeys(notes))

    @property
    def loaders_in_turn(self) -> int:
        """Number of loaders that follow each other; 1 if each batch has samples of all of them."""
        return len(self._of_loaders) if self._loaders.mode == "sequential" else 1

    @property
    def sample_bytes(self) -> int:
        """Bytes of the samples and batches that the search keeps in this process."""
        return sum(batches.sample_bytes for batches in self._of_loaders)

    @property
    def distinct_samples(self) -> int | None:
        """The fewest distinct samples of a loader whose last batch had some more than once."""
        counts = [batches.distinct_samples for batches in self._of_loaders]
        return min((count for count in counts if count is not None), default=None)

    @property
    def longest_bytes(self) -> list[int]:
        """Bytes of the longest sample of each loader, or of its largest batch within a budget."""
        if self._agreed_longest_bytes is not None:
            return self._agreed_longest_bytes
        return [batches.longest_bytes for batches in self._of_loaders]

    @property
    def num_other_batches(self) -> int:
        """How many batches of :meth:`other_lengths` may need more memory than :meth:`batch`.

        It is 0 if no loader forms its own batches.
        """
        return max(batches.num_other_batches for batches in self._of_loaders)

    def prepare(self, batch_size: int) -> None:
        """Read the batches of a budget, unless they are kept already."""
        for batches in self._of_loaders:
            batches.prepare(batch_size)

    def smallest_useful_budget(self, budget: int, *, needs_two_samples: bool = False) -> int:
        """The budget, divided until a smaller one no longer makes smaller batches.

        The loaders that form their own batches are found to follow the budget or not.

        Args:
            budget: the budget of the project.
            needs_two_samples: whether a batch of one sample is an error, as to BatchNorm.
        """
        smallest = [
            batches.smallest_useful_budget(budget, needs_two_samples=needs_two_samples)
            for batches in self._of_loaders
        ]
        return max(smallest) or budget

    def has_constant_length(self, budget: int) -> bool:
        """Whether a loader that follows the budget has as many batches at any budget."""
        return any(batches.has_constant_length(budget) for batches in self._of_loaders)

    def items(self, batch_size: int) -> float:
        """What the throughput counts in one batch: its samples, or items within a budget.

        All loaders count that a batch has samples of, as in MemoryProfiler.
        """
        samples = sum(batches.info.size_at(batch_size) for batches in self._of_loaders)
        items = [batches.items(batch_size) for batches in self._of_loaders]
        of_budgets = [count for count in items if count is not None]
        return of_budgets[0] if of_budgets else samples / self.loaders_in_turn

    def batch(self, batch_size: int, index: int = 0) -> tuple[Any, int]:
        """The ``index``-th batch on the host, and its ``dataloader_idx``.

        All batches of one loader are alike.
        """
        return self._in_turn(index, lambda batches, turn: batches.batch(batch_size))

    def other_lengths(self, batch_size: int, index: int) -> tuple[Any, int]:
        """A batch that is not larger, with samples of other sizes if they differ.

        The batch is the ``index``-th one on the host; its ``dataloader_idx`` is returned too.
        """
        return self._in_turn(index, lambda batches, turn: batches.other_lengths(batch_size, turn))

    def copies(self, batch_size: int) -> tuple[Any, int]:
        """A batch of copies of one sample on the host, and its ``dataloader_idx``.

        Raises:
            ValueError: if a loader forms its own batches.
        """
        (batches,) = self._of_loaders
        return self._loaders.in_structure([batches.copies(batch_size)]), 0

    def shared_bytes(self, batch_size: int) -> int:
        """Bytes of the batches that loader workers make ahead, and of one that is being fetched.

        They are in memory that processes share.
        """
        return sum(count_bytes for _, count_bytes in self._ahead(batch_size))

    def worker_bytes(self, batch_size: int) -> int:
        """The same with the copies in pinned memory."""
        # Pinned memory comes in powers of two.
        # Source: `allocate` in pytorch/aten/src/ATen/core/CachingHostAllocator.h.
        return sum(
            2 * count_bytes if loader.pin_memory and torch.cuda.is_available() else count_bytes
            for loader, count_bytes in self._ahead(batch_size)
        )

    def _ahead(self, batch_size: int) -> list[tuple[DataLoader[Any], int]]:
        """Each loader with workers, and the bytes of its batches that exist at a time."""
        ahead = []
        for batches, longest_bytes in zip(self._of_loaders, self.longest_bytes, strict=True):
            loader = batches.info.loader
            if loader.num_workers:
                made = loader.num_workers * (loader.prefetch_factor or 0) + 1
                # An epoch may have fewer batches than that.
                count = int(min(made, batches.info.batches(batch_size)))
                ahead.append((loader, count * batches.batch_bytes(batch_size, longest_bytes)))
        return ahead

    def longest_sample_text(self, batch_size: int) -> str:
        """A sentence about a size at which batches have the longest samples only; else empty."""
        notes = [one.longest_sample_text(batch_size) for one in self._of_loaders]
        return next((note for note in notes if note), "")

    def agree(self, of_ranks: Sequence[tuple[list[int], tuple[Note, ...]]]) -> None:
        """Use the longest samples and the notes of the rank that found the longest ones."""
        self._agreed_longest_bytes, self.notes = max(of_ranks)

    def _in_turn(
        self, index: int, make: Callable[[_LoaderBatches | BudgetBatches, int], Any]
    ) -> tuple[Any, int]:
        turn, loader_index = divmod(index, self.loaders_in_turn)
        if self._loaders.mode == "sequential":
            return make(self._of_loaders[loader_index], turn), loader_index
        batches = [make(batches, turn) for batches in self._of_loaders]
        return self._loaders.in_structure(batches), loader_index


class _LoaderBatches:
    """The batches of one loader: its samples, and the choice of samples for a batch."""

    num_other_batches = 0
    # The number of distinct samples in the last batch if it had some more than once.
    distinct_samples: int | None = None

    def __init__(
        self,
        info: LoaderInfo,
        worst_case: WorstCase | None,
        policy: ReadingPolicy,
        largest_size: int,
        share_bytes: float,
        reached: float,
    ) -> None:
        self.info = info
        loader = info.loader
        self._collate = partial(joined_collate, loader.collate_fn)
        # A random batch is hardly ever larger than the largest samples of many.
        is_random = isinstance(loader.sampler, RandomSampler)
        samples = math.inf if info.samples is None else info.samples
        may_be_complete = min(samples, reached) <= policy.max_sample_sizes
        measure = SampleMeasure(
            self._collate,
            worst_case,
            policy,
            # No more samples of one size are read while reading is quick.
            min(self.count(largest_size), policy.equal_sizes_quick),
            worst_case is None and (is_random or may_be_complete),
            share_bytes,
            reached,
        )
        self.samples, sizes = read_samples(loader, measure)
        self.notes: list[Note] = []
        self.choice = TypicalSamples(sizes)
        # Bytes of the longest sample, padded to the longest of each part.
        self.longest_bytes = self.choice.longest_bytes
        self.is_ragged = sizes.is_ragged
        # The samples take these bytes in this process.
        self.sample_bytes = sum(map(count_bytes, self.samples))
        if sizes.left_out:
            self.notes.append(Note("risk", sizes.left_out))
        if worst_case == "typical":
            return
        if sizes.is_ragged:
            joins = self._joins(sizes)
            has_largest = worst_case is None and (sizes.is_complete or is_random)
            choice: LongestSample | LargestSum = LongestSample(
                sizes,
                joins=joins != "nothing",
                # A batch sampler of the user may put samples of one length into a batch.
                is_sorted=loader.batch_size is None,
                has_largest=has_largest,
            )
            if worst_case is None and joins == "by their sum":
                choice = LargestSum(sizes, policy)
            self.choice = choice
            if worst_case is None:
                text = (
                    f"{sizes.difference} The search used batches {choice.text};"
                    ' worst_case="typical" uses average ones.'
                )
                self.notes.append(Note("search", text))
        # Fewer are read only where reading takes long.
        is_short = sizes.is_ragged or len(sizes.measured) < policy.equal_sizes
        if is_short and not sizes.is_complete:
            text = f"Only {len(sizes.measured):,} samples were read; larger ones may exist."
            self.notes.append(Note("risk", text))

    def prepare(self, batch_size: int) -> None:
        """Do nothing: the samples were read already."""

    def smallest_useful_budget(self, budget: int, *, needs_two_samples: bool) -> int:
        """Return 0: there is no budget."""
        return 0

    def has_constant_length(self, budget: int) -> bool:
        """Return False: there is no budget."""
        return False

    def items(self, batch_size: int) -> None:
        """Return ``None``: the samples are counted."""

    def batch_bytes(self, batch_size: int, longest_bytes: int) -> int:
        """Bytes of a batch; ``longest_bytes``: of the longest sample on any rank."""
        return self.choice.batch_bytes(self.count(batch_size), longest_bytes)

    def batch(self, batch_size: int) -> Any:
        return self._collated(self.choice.positions(self.count(batch_size)))

    def copies(self, batch_size: int) -> Any:
        return self._collated([0] * self.count(batch_size))

    def other_lengths(self, batch_size: int, index: int) -> Any:
        return self._collated(self.choice.other_positions(self.count(batch_size), index))

    def longest_sample_text(self, batch_size: int) -> str:
        """As in :class:`ProbeBatches`."""
        if not isinstance(self.choice, LongestSample):
            return ""
        sizes = self.choice.sizes
        typical = sizes.typical_count(self.count(batch_size)) * batch_size // self.count(batch_size)
        if typical <= batch_size:
            return ""
        return (
            f"{batch_size:,} fits even if every sample is the longest"
            f" ({max(sizes.measured):,.0f} bytes, median {statistics.median(sizes.measured):,.0f});"
            f' with typical batches about {typical:,}: worst_case="typical".'
        )

    def count(self, batch_size: int) -> int:
        """Number of samples in a batch."""
        size = self.info.size_at(batch_size)
        samples = self.info.samples
        # A small data set never makes a full batch.
        return size if samples is None else max(1, min(size, samples))

    def _collated(self, positions: list[int]) -> Any:
        # Without workers a fetch holds the samples of the batch in this process too. With workers
        # only the containers are new, since a collate function may take samples apart.
        share = self.info.loader.num_workers > 0
        num_distinct = len(set(positions))
        self.distinct_samples = num_distinct if num_distinct < len(positions) else None
        # No training has the samples that a search keeps, so the mode that counts live bytes must
        # not see them.
        with _disable_current_modes():
            samples = [copied(self.samples[i], share_tensors=share) for i in positions]
            if share:
                return self._collate(samples)
        return self._collate(samples)

    def _joins(self, sizes: SampleSizes) -> Literal["nothing", "by padding", "by their sum"]:
        """How batches join samples of two sizes.

        A batch of two samples that are concatenated is about as large as the sum of both. It also
        has as many tensors as a batch of one sample.
        """
        by_bytes = sizes.by_bytes
        smallest = by_bytes[0]
        largest = by_bytes[-1]
        try:
            # The samples are copies, since a collate function may write to them.
            longest = [copied(self.samples[i]) for i in sizes.longest]
            padded_bytes = batched_sizes(self._collate, longest)[0] // len(longest)
            self.longest_bytes = max(self.longest_bytes, padded_bytes)
            _, *lengths = batched_sizes(self._collate, [copied(self.samples[largest])])
            both = [copied(self.samples[largest]), copied(self.samples[smallest])]
            both_bytes, *both_lengths = batched_sizes(self._collate, both)
        # A user's function may need samples of one length, and the longest are safe. It may raise
        # any exception.
        except Exception:  # noqa: BLE001
            return "nothing"
        # The smallest sample adds its own bytes if it is concatenated, and as many as the largest
        # one if it is padded. The mean of the two separates these cases.
        added_bytes = both_bytes - sizes.bytes_each[largest]
        is_sum = 2 * added_bytes < sizes.bytes_each[largest] + sizes.bytes_each[smallest]
        # If there are more tensors, or none, the model combines the samples and may pad them.
        return "by their sum" if len(both_lengths) == len(lengths) > 0 and is_sum else "by padding"
