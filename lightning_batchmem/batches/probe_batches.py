"""Batches of any size for the search, made of a few real samples."""

from __future__ import annotations

import math
import random
import statistics
import types
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lightning_batchmem.batches.loaders import LoaderInfo, StageLoaders
from lightning_batchmem.batches.samples import (
    batched_bytes,
    copy_or_warn,
    draw_samples,
    held_bytes,
)
from lightning_batchmem.devices.tensors import copied
from lightning_batchmem.plan.options import WorstCase

# The samples of all loaders take at most this share of the free memory.
_SHARE_OF_ROOM = 0.25
_MAX_DRAWS = 1_000
# Large batches are drawn less often, since their sums hardly differ.
_MAX_DRAWN_SIZES = 1_000_000


class ProbeBatches:
    """Batches of any size, made of real samples that are read once.

    Where the samples differ in size, the worst batches are made.
    """

    def __init__(
        self, loaders: StageLoaders, worst_case: WorstCase = None, *, room_bytes: int | None = None
    ) -> None:
        share = math.inf if room_bytes is None else room_bytes * _SHARE_OF_ROOM / len(loaders.sized)
        self._loaders = loaders
        self._each = [_LoaderBatches(one, worst_case, share) for one in loaders.sized]
        # The samples take these bytes in this process.
        self.held_bytes = sum(one.held_bytes for one in self._each)
        self.longest_bytes = [one.longest_bytes for one in self._each]
        self.notes = tuple(dict.fromkeys(note for one in self._each for note in one.notes))

    @property
    def loaders_in_turn(self) -> int:
        """Number of loaders that follow each other; 1 if each batch has samples of all of them."""
        return len(self._each) if self._loaders.mode == "sequential" else 1

    def batch(self, batch_size: int, index: int = 0, *, varied: bool = False) -> tuple[Any, int]:
        """The ``index``-th batch on the host, and its ``dataloader_idx``.

        Batches of one loader are alike. A ``varied`` one is no larger, and has samples of other
        sizes if they differ.
        """
        if self._loaders.mode == "sequential":
            turn, loader_index = divmod(index, len(self._each))
            loader = self._each[loader_index]
            return loader.batch(batch_size, turn if varied else None), loader_index
        batches = [one.batch(batch_size, index if varied else None) for one in self._each]
        return self._loaders.in_structure(batches), 0

    def other_lengths(self, batch_size: int, index: int) -> tuple[Any, int]:
        return self.batch(batch_size, index, varied=True)

    def worker_bytes(self, batch_size: int) -> int:
        return sum(_batches_ahead(info) * size for info, size in self.batch_bytes(batch_size))

    def batch_bytes(self, batch_size: int) -> list[tuple[LoaderInfo, int]]:
        """Bytes of the largest batch of each loader."""
        longest = zip(self._each, self.longest_bytes, strict=True)
        return [
            (one.info, one.batch_bytes(batch_size, longest_bytes)) for one, longest_bytes in longest
        ]

    def agree(self, of_ranks: Sequence[tuple[list[int], tuple[str, ...]]]) -> None:
        """Use the longest samples and the notes of the rank that found the longest ones."""
        self.longest_bytes, self.notes = max(of_ranks)


class _LoaderBatches:
    def __init__(self, info: LoaderInfo, worst_case: WorstCase, share_bytes: float) -> None:
        loader = self._loader = info.loader
        self.info = info
        self._collate = loader.collate_fn
        # A method is not copied, since its owner would be too: a module, whose state is restored
        # anyway, or a data set.
        if not isinstance(self._collate, types.MethodType):
            self._collate = copy_or_warn(self._collate, "collate_fn")
        drawn = draw_samples(loader, self._collate, worst_case, share_bytes)
        self._sizes = drawn.sizes
        self._all_sizes_known = drawn.is_complete
        self._typical = range(len(drawn.samples))
        self._samples = drawn.samples
        self._bytes = drawn.sample_bytes
        if worst_case != "typical" and all(one is not drawn.largest for one in drawn.samples):
            self._samples = [*drawn.samples, drawn.largest]
            self._bytes = [*drawn.sample_bytes, drawn.largest_bytes]
        self._by_bytes = sorted(range(len(self._bytes)), key=self._bytes.__getitem__)
        self.held_bytes = sum(held_bytes(sample) for sample in self._samples)
        is_ragged = max(drawn.sizes) > min(drawn.sizes)
        self._is_typical = worst_case == "typical" or (worst_case is None and not is_ragged)
        self._is_sum = worst_case is None and is_ragged and self._concatenates()
        self._largest = next((i for i, one in enumerate(self._samples) if one is drawn.largest), 0)
        self.longest_bytes = max(self._bytes) if self._is_typical else drawn.largest_bytes
        self._draws: dict[int, int] = {}
        self.notes = () if worst_case == "typical" else drawn.notes
        if worst_case is None and is_ragged:
            self.notes = (self._ragged_note(), *self.notes)

    def batch(self, batch_size: int, turn: int | None) -> Any:
        """A batch of the largest samples, or with a ``turn`` of others."""
        count = self._count(batch_size)
        chosen = self._worst(count)
        if turn is not None and not self._is_typical:
            chosen = self._varied(count, turn, chosen)
        # Without workers a fetch holds the samples of the batch in this process too. With workers
        # only the containers are new, since a collate function may take samples apart.
        share = self._loader.num_workers > 0
        return self._collate([copied(self._samples[i], share_tensors=share) for i in chosen])

    def batch_bytes(self, batch_size: int, longest_bytes: int) -> int:
        count = self._count(batch_size)
        return self._largest_draw(count) if self._is_sum else count * longest_bytes

    def _count(self, batch_size: int) -> int:
        size = self.info.size_at(batch_size)
        samples = self.info.samples
        # A small data set never makes a full batch.
        return size if samples is None else max(1, min(size, samples))

    def _worst(self, count: int) -> list[int]:
        if self._is_typical:
            return [self._typical[i % len(self._typical)] for i in range(count)]
        if not self._is_sum:
            return [self._largest] * count
        chosen = []
        remaining = self._largest_draw(count)
        # Each pass adds the smallest sample that is at least as large as the missing samples are on
        # average.
        for left in range(count, 0, -1):
            position = bisect_left(self._by_bytes, remaining / left, key=self._bytes.__getitem__)
            chosen.append(self._by_bytes[min(position, len(self._by_bytes) - 1)])
            remaining -= self._bytes[chosen[-1]]
        return chosen

    def _varied(self, count: int, turn: int, worst: list[int]) -> list[int]:
        if not self._is_sum:
            return [turn % len(self._samples)] * count
        # The random choice protects no secret.
        chosen = random.Random(turn).choices(self._typical, k=count)  # noqa: S311
        total = sum(self._bytes[i] for i in chosen)
        return chosen if total <= sum(self._bytes[i] for i in worst) else worst

    def _largest_draw(self, count: int) -> int:
        """Bytes of the largest of 1,000 random batches, as the sum of the sizes of its samples."""
        if count not in self._draws:
            generator = np.random.default_rng(0)
            sizes = np.asarray(self._sizes)
            is_repeated = count > len(sizes) or not self._all_sizes_known
            draws = max(1, min(_MAX_DRAWS, _MAX_DRAWN_SIZES // count))
            sums = [generator.choice(sizes, count, replace=is_repeated).sum() for _ in range(draws)]
            self._draws[count] = int(max(sums))
        return self._draws[count]

    def _concatenates(self) -> bool:
        """Whether a batch of two samples is about as large as the sum of both.

        It also has to have as many tensors as a batch of one sample.
        """
        small, large = (self._samples[i] for i in (self._by_bytes[0], self._by_bytes[-1]))
        small_bytes = self._bytes[self._by_bytes[0]]
        large_bytes = self._bytes[self._by_bytes[-1]]
        try:
            # The samples are copies, since a collate function may write to them.
            _, tensor_count = batched_bytes(self._collate, [copied(large)])
            both_bytes, both_count = batched_bytes(self._collate, [copied(large), copied(small)])
        # A user's function may need samples of one length, of which the longest are safe.
        except Exception:  # noqa: BLE001
            return False
        # If there are more tensors, or none, the model combines the samples and may pad them.
        return both_count == tensor_count > 0 and both_bytes < 1.5 * large_bytes + 0.5 * small_bytes

    def _ragged_note(self) -> str:
        batches = "of the largest sample only"
        if self._is_sum:
            batches = "as large as the largest of 1,000 random ones"
        return (
            f"Samples differ in size: of {len(self._sizes):,} the largest has"
            f" {max(self._sizes):,.0f} bytes in a batch and the median"
            f" {statistics.median(self._sizes):,.0f}. The search used batches {batches};"
            ' worst_case="typical" uses average ones.'
        )


def _batches_ahead(info: LoaderInfo) -> int:
    loader = info.loader
    if not loader.num_workers:
        return 0
    # Pinned memory comes in powers of two.
    # Source: `allocate` in pytorch/aten/src/ATen/core/CachingHostAllocator.h.
    copies = 2 if loader.pin_memory and torch.cuda.is_available() else 1
    return (loader.num_workers * (loader.prefetch_factor or 0) + 1) * copies
