"""The batches of a loader at any size, read from the loader itself (the gate of issue 58)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from lightning_batchmem.batches.isolated import read_isolated
from lightning_batchmem.batches.loader_size import set_loader_batch_size
from lightning_batchmem.batches.loaders import LoaderInfo
from lightning_batchmem.batches.read_batches import (
    BatchReader,
    WorstBatches,
    held_bytes,
    padded_items,
    without_views,
)
from lightning_batchmem.devices.tensors import copied
from lightning_batchmem.plan.policy import ReadingPolicy

READ_SECONDS = 5.0
MOST_BATCHES = 256


class SizeReading(NamedTuple):
    largest_bytes: int
    num_read: int
    is_ragged: bool


@dataclass(frozen=True)
class SizeReader:
    """Sets the size of its view of a loader, and reads until the batches are known well enough."""

    size: int
    most_batches: int
    room_bytes: float
    reader: BatchReader

    def __call__(self, loader: DataLoader[Any]) -> tuple[SizeReading, list[Any]]:
        if loader.batch_size is not None or getattr(loader.batch_sampler, "batch_size", None):
            set_loader_batch_size(loader, self.size)
        begin = time.monotonic()
        first_bytes = None
        is_ragged = False
        num_read = 0
        kept: dict[str, tuple[tuple[float, ...], Any]] = {}
        for batch in loader:
            num_read += 1
            batch_bytes = held_bytes(batch)
            items = padded_items(batch)
            first_bytes = batch_bytes if first_bytes is None else first_bytes
            is_ragged |= batch_bytes != first_bytes
            ranks: dict[str, tuple[float, ...]] = {
                "bytes": (batch_bytes, items),
                "items": (items, batch_bytes),
                "smallest": (-batch_bytes,),
            }
            if num_read <= 2:
                ranks[f"first {num_read}"] = ()
            for name, rank in ranks.items():
                if name not in kept or rank > kept[name][0]:
                    kept[name] = (rank, batch)
            if num_read >= self.most_batches or (num_read >= 2 and not is_ragged):
                break
            if time.monotonic() - begin > READ_SECONDS:
                break
        if not kept:
            raise ValueError("the data set must have at least one sample, got none")
        ordered = list({id(batch): batch for _, batch in kept.values()}.values())
        chosen: list[Any] = []
        chosen_bytes = 0
        for batch in ordered if is_ragged else ordered[:1]:
            batch_bytes = held_bytes(batch)
            if not chosen or chosen_bytes + batch_bytes <= self.room_bytes:
                chosen.append(without_views(batch))
                chosen_bytes += batch_bytes
        return SizeReading(int(kept["bytes"][0][0]), num_read, is_ragged), chosen


class SizeBatches:
    """Takes the place of ``_LoaderBatches``."""

    def __init__(self, info: LoaderInfo, policy: ReadingPolicy, share_bytes: float) -> None:
        self.info = info
        self.notes: list[str] = []
        self._share_bytes = share_bytes
        self._reader = BatchReader(policy, share_bytes)
        self._readings: dict[int, SizeReading] = {}
        self._kept: dict[int, list[Any]] = {}
        self.longest_bytes = max(1, self._read(self.count(2)).largest_bytes)

    @property
    def num_other_batches(self) -> int:
        return 0

    @property
    def held_bytes(self) -> int:
        return sum(held_bytes(batch) for batches in self._kept.values() for batch in batches)

    def count(self, batch_size: int) -> int:
        size = self.info.size_at(batch_size)
        samples = self.info.samples
        return size if samples is None else max(1, min(size, samples))

    def batch(self, batch_size: int) -> Any:
        return copied(self._batches(self.count(batch_size))[0])

    def other_lengths(self, batch_size: int, index: int) -> Any:
        batches = self._batches(self.count(batch_size))
        others = batches[1:] or batches
        return copied(others[index % len(others)])

    def batch_bytes(self, batch_size: int, longest_bytes: int) -> int:
        count = self.count(batch_size)
        nearest = min(self._readings, key=lambda read: max(read / count, count / read))
        return self._readings[nearest].largest_bytes * count // nearest

    def _batches(self, count: int) -> list[Any]:
        if count not in self._kept:
            self._read(count)
        # The one that was used last is evicted last.
        self._kept[count] = self._kept.pop(count)
        return self._kept[count]

    def _read(self, count: int) -> SizeReading:
        # The last batch of an epoch is smaller than the full ones.
        is_last = bool(self._kept) and (self.info.samples or 0) % next(reversed(self._kept)) == count
        while len(self._kept) > 1:
            del self._kept[next(iter(self._kept))]
        view = SizeReader(
            count, 2 if is_last else MOST_BATCHES, self._share_bytes, self._reader
        )
        begin = time.monotonic()
        reading, batches = read_isolated(self.info.loader, view, timeout_seconds=600)
        self._readings[count] = reading
        self._kept[count] = batches
        self.seconds = time.monotonic() - begin
        return reading
