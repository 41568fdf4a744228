"""Read the batches that a loader forms itself, and keep the worst of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from lightning_batchmem.batches.isolated import read_isolated
from lightning_batchmem.batches.sample_bytes import held_bytes, without_views
from lightning_batchmem.devices.tensors import samples_in, tensors_in
from lightning_batchmem.plan.policy import ReadingPolicy


class BatchReading(NamedTuple):
    """The batches that a loader made at one budget, in numbers.

    ``num_batches`` is the number of batches in an epoch, or ``None`` where reading ended before.
    ``items`` are those of the batch with most bytes. ``has_single_samples`` is true if a batch has
    one sample, as far as its tensors show this.
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
    held_bytes: int


class _Kept(NamedTuple):
    rank: tuple[float, ...]
    batch: Any


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
        kept: dict[str, _Kept] = {}
        num_read = 0
        num_batches = None
        has_single_samples = False
        batches = iter(loader)
        while num_read < self.policy.max_batches_read:
            if time.monotonic() - begin > self.policy.scan_seconds:
                break
            try:
                batch = next(batches)
            except StopIteration:
                num_batches = num_read
                break
            batch_bytes = held_bytes(batch)
            items = padded_items(batch)
            # Of batches with equally long samples, the one with most bytes is the worst.
            ranks: dict[str, tuple[float, ...]] = {
                "bytes": (batch_bytes, items),
                "items": (items, batch_bytes),
                "longest": (_longest_sample(batch), batch_bytes),
                "smallest": (-batch_bytes,),
            }
            if num_read < self.policy.first_batches_kept:
                ranks[f"first {num_read}"] = ()
            for name, rank in ranks.items():
                if name not in kept or rank > kept[name].rank:
                    kept[name] = _Kept(rank, batch)
            has_single_samples |= samples_in(batch) == 1
            num_read += 1
        if not kept:
            raise ValueError("the loader must make at least one batch, got none")
        # The most important ones come first, as they do in `ranks`, and each of them once.
        ordered = list({id(one.batch): one.batch for one in kept.values()}.values())
        largest_bytes, items = kept["bytes"].rank
        reading = BatchReading(num_read, num_batches, int(largest_bytes), items, has_single_samples)
        return self._within_room(reading, ordered)

    def _within_room(self, reading: BatchReading, ordered: list[Any]) -> WorstBatches:
        room_bytes = self.room_bytes
        chosen: list[Any] = []
        chosen_bytes = 0
        for batch in ordered:
            batch_bytes = held_bytes(batch)
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
    """Elements of a row of the tensor whose elements :func:`padded_items` counts."""
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
