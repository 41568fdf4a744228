"""Read the batches that a loader forms itself, in a worker process, and keep the worst of them.

So data set and samplers do not change in this process.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, IterableDataset

from lightning_batchmem.batches.samples import (
    FATAL_WORKER_ERRORS,
    arguments_of_worker,
    deep_copy,
    held_bytes,
    may_start_worker,
    without_views,
)
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
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


@dataclass
class BatchReader(IterableDataset[bytes]):
    """Data set of the worker: it reads batches, and has one item, the pickled worst batches.

    The worst are those with most bytes, with most items and with the longest sample. After them
    come the smallest one and the first ones, for steps with other shapes.

    Args:
        loader: the loader at the budget.
        policy: how many batches are read, and how long.
        room_bytes: what the batches may hold in the process of the search; the first of them is
            kept in any case.
    """

    loader: DataLoader[Any]
    policy: ReadingPolicy
    room_bytes: float

    def __iter__(self) -> Iterator[bytes]:
        # A worker would share each tensor through a file descriptor, so it is pickled instead.
        yield pickle.dumps(self.read(), protocol=pickle.HIGHEST_PROTOCOL)

    def read(self) -> WorstBatches:
        """Read until there are enough batches, the time has passed, or the epoch ends.

        Raises:
            ValueError: if the loader makes no batch.
        """
        begin = time.monotonic()
        kept: dict[str, _Kept] = {}
        num_read = 0
        num_batches = None
        has_single_samples = False
        batches = iter(_in_this_process(self.loader))
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


def read_worst_batches(
    loader: DataLoader[Any], make_reader: Callable[[DataLoader[Any]], BatchReader]
) -> WorstBatches:
    """Read batches in a worker where possible, else from a copy of the loader.

    Args:
        loader: the loader at the budget.
        make_reader: makes the reader of a loader.

    Raises:
        RuntimeError: if memory runs out.
    """
    if may_start_worker(loader):
        try:
            return _read_in_worker(loader, make_reader(loader))
        # A worker may fail in any way. A copy of the loader may still be read in this process.
        except Exception as error:
            # The same batch would end this process, or be waited for here too.
            messages = (*FATAL_WORKER_ERRORS, "DataLoader timed out")
            if any(message in str(error) for message in messages) or is_out_of_memory(error):
                raise
            rank_zero_info(
                f"BatchFinder reads a copy of the loader, since a worker could not read it: {error}"
            )
    # A sampler may refer to the data set, so all of them are copied at once.
    parts = {name: vars(loader).get(name) for name in ("dataset", "sampler", "batch_sampler")}
    view = copy.copy(loader)
    # DataLoader.__setattr__ raises an error for these attributes (torch 2.5.1 to 2.14).
    vars(view).update(deep_copy(parts))
    # The sampler may draw from the random generators of the process.
    with isolate_rng():
        return make_reader(view).read()


def _read_in_worker(loader: DataLoader[Any], batch_reader: BatchReader) -> WorstBatches:
    timeout_seconds = batch_reader.policy.scan_seconds + batch_reader.policy.sample_seconds
    reader: DataLoader[Any] = DataLoader(
        batch_reader,
        batch_size=None,
        # The worker's seed must not be drawn from the generator of the process.
        generator=torch.Generator(),
        **arguments_of_worker(loader, timeout_seconds=timeout_seconds),
    )
    try:
        # The bytes are those of a child of this process.
        worst: WorstBatches = pickle.loads(next(iter(reader)))  # noqa: S301
        return worst
    finally:
        # The reset ends the worker now. The traceback of an error would keep it.
        CombinedLoader(reader).reset()


def _in_this_process(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A view of the loader that makes its batches without workers, and without pinned memory."""
    view = copy.copy(loader)
    # DataLoader.__setattr__ raises an error for some of these attributes (torch 2.5.1 to 2.14).
    vars(view).update(
        num_workers=0,
        prefetch_factor=None,
        persistent_workers=False,
        pin_memory=False,
        timeout=0,
        worker_init_fn=None,
        _iterator=None,
    )
    return view
