"""Batches of any size for the search, made of a few real samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_batchmem.batches.collate import copied_collate
from lightning_batchmem.batches.loaders import LoaderInfo, StageLoaders
from lightning_batchmem.batches.sample_sizes import (
    LargestSum,
    LongestSample,
    SampleSizes,
    TypicalSamples,
)
from lightning_batchmem.batches.samples import (
    SampleMeasure,
    batched_bytes,
    held_bytes,
    read_samples,
)
from lightning_batchmem.devices.tensors import copied
from lightning_batchmem.plan.options import WorstCase
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.sentences import ragged_samples, scan_ended


class ProbeBatches:
    """Batches of any size, made of real samples that are read once.

    Where the samples differ in size, the worst batches are made. The samples of all loaders take at
    most a share of ``room_bytes``, the free memory of the process. The state of the ``restored``
    objects is restored after the search, so they may change.
    """

    def __init__(
        self,
        loaders: StageLoaders,
        worst_case: WorstCase = None,
        *,
        policy: SearchPolicy | None = None,
        room_bytes: int | None = None,
        restored: Sequence[object] = (),
    ) -> None:
        policy = policy or SearchPolicy()
        room = math.inf if room_bytes is None else room_bytes
        share_bytes = room * policy.samples_share / len(loaders.sized)
        self._loaders = loaders
        self._of_loaders = [
            _LoaderBatches(info, worst_case, policy, share_bytes, restored)
            for info in loaders.sized
        ]
        # The samples take these bytes in this process.
        self.held_bytes = sum(
            held_bytes(sample) for batches in self._of_loaders for sample in batches.samples
        )
        self.longest_bytes = [batches.choice.longest_bytes for batches in self._of_loaders]
        notes = [note for batches in self._of_loaders for note in batches.notes]
        self.notes = tuple(dict.fromkeys(notes))

    @property
    def loaders_in_turn(self) -> int:
        """Number of loaders that follow each other; 1 if each batch has samples of all of them."""
        return len(self._of_loaders) if self._loaders.mode == "sequential" else 1

    def batch(self, batch_size: int, index: int = 0) -> tuple[Any, int]:
        """The ``index``-th batch on the host, and its ``dataloader_idx``.

        All batches of one loader are alike.
        """
        return self._in_turn(index, lambda batches, turn: batches.batch(batch_size))

    def other_lengths(self, batch_size: int, index: int) -> tuple[Any, int]:
        """A batch that is no larger, with samples of other sizes if they differ.

        The batch is the ``index``-th one on the host; its ``dataloader_idx`` is returned too.
        """
        return self._in_turn(index, lambda batches, turn: batches.other_lengths(batch_size, turn))

    def batch_bytes(self, batch_size: int) -> list[tuple[LoaderInfo, int]]:
        """Bytes of the largest batch of each loader."""
        return [
            (batches.info, batches.choice.batch_bytes(batches.count(batch_size), longest_bytes))
            for batches, longest_bytes in zip(self._of_loaders, self.longest_bytes, strict=True)
        ]

    def worker_bytes(self, batch_size: int) -> int:
        """Bytes of the batches that loader workers make ahead, and of one that is being fetched."""
        return sum(
            _batches_ahead(info.loader) * size for info, size in self.batch_bytes(batch_size)
        )

    def agree(self, of_ranks: Sequence[tuple[list[int], tuple[str, ...]]]) -> None:
        """Use the longest samples and the notes of the rank that found the longest ones."""
        self.longest_bytes, self.notes = max(of_ranks)

    def _in_turn(self, index: int, make: Callable[[_LoaderBatches, int], Any]) -> tuple[Any, int]:
        turn, loader_index = divmod(index, self.loaders_in_turn)
        if self._loaders.mode == "sequential":
            return make(self._of_loaders[loader_index], turn), loader_index
        batches = [make(batches, turn) for batches in self._of_loaders]
        return self._loaders.in_structure(batches), loader_index


class _LoaderBatches:
    """The batches of one loader: its samples, and the choice of samples for a batch."""

    def __init__(
        self,
        info: LoaderInfo,
        worst_case: WorstCase,
        policy: SearchPolicy,
        share_bytes: float,
        restored: Sequence[object],
    ) -> None:
        self.info = info
        self._collate = copied_collate(info.loader.collate_fn, restored)
        measure = SampleMeasure(self._collate, worst_case, policy, share_bytes)
        self.samples, sizes = read_samples(info.loader, measure)
        self.notes: list[str] = []
        self.choice = TypicalSamples(sizes)
        if worst_case == "typical":
            return
        if worst_case is not None:
            self.choice = LongestSample(sizes)
        elif sizes.is_ragged:
            concatenates = self._concatenates(sizes)
            self.choice = LargestSum(sizes, policy) if concatenates else LongestSample(sizes)
            random_batches = policy.max_draws if concatenates else None
            self.notes.append(ragged_samples(sizes.measured, random_batches))
        if sizes.scan_seconds is not None:
            self.notes.append(scan_ended(len(sizes.measured), sizes.scan_seconds))

    def batch(self, batch_size: int) -> Any:
        return self._collated(self.choice.positions(self.count(batch_size)))

    def other_lengths(self, batch_size: int, index: int) -> Any:
        return self._collated(self.choice.other_positions(self.count(batch_size), index))

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
        return self._collate([copied(self.samples[i], share_tensors=share) for i in positions])

    def _concatenates(self, sizes: SampleSizes) -> bool:
        """Whether a batch of two samples is about as large as the sum of both.

        It also has to have as many tensors as a batch of one sample.
        """
        by_bytes = sizes.by_bytes
        smallest = by_bytes[0]
        largest = by_bytes[-1]
        try:
            # The samples are copies, since a collate function may write to them.
            _, tensor_count = batched_bytes(self._collate, [copied(self.samples[largest])])
            both = [copied(self.samples[largest]), copied(self.samples[smallest])]
            both_bytes, both_count = batched_bytes(self._collate, both)
        # A user's function may need samples of one length, of which the longest are safe. It may
        # raise any exception.
        except Exception:  # noqa: BLE001
            return False
        # The smallest sample adds its bytes if it is concatenated, and those of the largest one if
        # it is padded. The mean of the two separates these cases.
        added_bytes = both_bytes - sizes.sample_bytes[largest]
        is_sum = 2 * added_bytes < sizes.sample_bytes[largest] + sizes.sample_bytes[smallest]
        # If there are more tensors, or none, the model combines the samples and may pad them.
        return both_count == tensor_count > 0 and is_sum


def _batches_ahead(loader: DataLoader[Any]) -> int:
    if not loader.num_workers:
        return 0
    # Pinned memory comes in powers of two.
    # Source: `allocate` in pytorch/aten/src/ATen/core/CachingHostAllocator.h.
    copies = 2 if loader.pin_memory and torch.cuda.is_available() else 1
    return (loader.num_workers * (loader.prefetch_factor or 0) + 1) * copies
