"""What the workers of data loaders hold in host memory: finished batches that wait, and memory of each worker's own."""

from __future__ import annotations

import math
import multiprocessing
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_batchmem._lightning.trainer_state import RandomStates
from lightning_batchmem.apply.loaders import indices_to_draw
from lightning_batchmem.devices.workers import own_bytes, weigh

_TIMEOUT_SECONDS = 60
"""A forked worker that waits for a thread of its parent waits for ever. For loaders that name no timeout themselves."""

_SETTLE_SECONDS = 10
"""How long a worker's heap may take to settle; what it would grow by after that is extrapolated."""

_SETTLING_STORAGES = 256
"""A worker keeps a small block for each of the last 128 storages that it shared, and these keep its heap from closing
up: with glibc 2.36 and samples of 1 MiB it grew by 130 MiB, whatever the batch size, until as many had been shared. A
forked worker's record may be part full already: after twice as many, one round of it was the worker's own.

Source: measured, torch 2.13; ``SharedCache.limit`` in torch/multiprocessing/reductions.py (2.5.1 to 2.13)."""


@dataclass(frozen=True)
class WorkerMemory:
    """What all loader workers of a stage add to the host's memory, as an upper bound that is linear in the batch size.

    Args:
        points: batch size in samples -> bytes, as measured.
        least_bytes_per_sample: what each sample adds at least, at the largest size: to every batch that waits, and in
            each worker to the samples that the next one is made of.
    """

    points: Mapping[int, int]
    least_bytes_per_sample: float

    def bytes_at(self, batch_size: int) -> int:
        """Bytes at ``batch_size`` samples: the steepest line from the smallest size through one of the others.

        With a single size, all of it counts as growing with the batch.
        """
        first, *others = sorted(self.points)
        start_bytes = self.points[first]
        slopes = [(self.points[size] - start_bytes) / (size - first) for size in others] or [start_bytes / first]
        slope = max(self.least_bytes_per_sample, *slopes)
        return start_bytes + math.ceil(slope * max(0, batch_size - first))


def measure_workers(loaders: Sequence[DataLoader[Any]], batch_sizes: Sequence[int]) -> WorkerMemory | None:
    """Measure what the workers of ``loaders`` hold at most when all of them run at once and stay ahead of the training.

    For each loader and size, workers are started as the loader would start its own, and make as many batches as they
    may be ahead (``num_workers * prefetch_factor``); at the smallest size they go on until their heaps have settled.
    Counted are

    - so many batches, and one more that Lightning fetches ahead of a stream: storages of tensors once and in whole
      pages, with pinned memory twice; all else as it waits in the worker, as objects or pickled. The largest batch
      that was seen stands for all.
    - for each worker the memory that it shares with nobody, at its peak, less the batch in the making.

    Neither the loaders, their samplers and data sets nor any random generator move in this process. Not counted is
    what comes later: caches of the data set that keep growing, pages that are copied when the training writes to what
    a forked worker shares with it. Heaps do not repeat themselves: samples of 1 MiB were once 2 % above the bound.

    Args:
        loaders: those whose workers are alive at the same time.
        batch_sizes: in samples, small ones; at least two, so that fixed and growing parts can be told apart.

    Returns:
        The bound; ``None`` when no loader has workers, or, with a warning, when they could not be measured.

    Raises:
        ValueError: when ``batch_sizes`` is empty or has a size below 1.
    """
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"batch_sizes must be one or more sizes of at least 1, got {batch_sizes!r}")
    loaders = [loader for loader in loaders if loader.num_workers]
    if not loaders:
        return None
    random = RandomStates()  # a sampler without a generator of its own draws from the process's
    try:
        with warnings.catch_warnings():  # the loader's own warnings come with the loader itself
            warnings.filterwarnings("ignore", "This DataLoader will create|Got pickle error when attempting to start")
            sizes = sorted(set(batch_sizes))
            held = {size: [_measure(one, size, settle=size == sizes[0]) for one in loaders] for size in sizes}
    except Exception as error:  # whatever a worker may raise: what is the user's own recurs in training
        if "bootstrapping phase" in str(error):
            raise  # this is a spawned worker, in which an unguarded script runs once more: that has to end here
        rank_zero_warn(
            "what loader workers hold in host memory could not be measured, and is not counted; leave room for it with"
            f" memory_limit: {_reason(error)}"
        )
        return None
    finally:
        random.restore()
    growth_bytes = sum(one.growth_bytes for one in held[sizes[0]])
    return WorkerMemory(
        {size: growth_bytes + sum(one.all_bytes for one in ones) for size, ones in held.items()},
        sum(one.samples_bytes for one in held[sizes[-1]]) / sizes[-1],
    )


@dataclass(frozen=True)
class _Held:
    all_bytes: int  # batches in flight and the workers' own memory
    samples_bytes: int  # of these, samples: batches in flight and in the making
    growth_bytes: int  # what the workers' heaps gain until they settle


def _measure(loader: DataLoader[Any], batch_size: int, *, settle: bool) -> _Held:
    prefetch_factor = loader.prefetch_factor or 0
    ahead = loader.num_workers * prefetch_factor
    drawing = _drawing_loader(loader, batch_size, ahead)
    others = set(multiprocessing.active_children())
    try:
        batches = iter(drawing)
    except BaseException:  # interrupted half-way: there is no iterator yet that would end the first workers
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
            worker.join()
        raise
    try:
        workers = [worker.pid for worker in set(multiprocessing.active_children()) - others]
        weights = [weigh(batch) for batch in islice(batches, ahead)]
        weights += [weigh(batch) for batch in islice(iter(drawing), ahead)]  # what is imported or mapped once is there
        batch_bytes = max((count_bytes for count_bytes, _ in weights), default=0)
        other_bytes = grown_bytes = own_bytes(workers, batch_bytes)
        storages = prefetch_factor * max((count for _, count in weights), default=0)
        rounds = _SETTLING_STORAGES // storages + 1 if settle and storages else 0
        done, end = 0, time.monotonic() + _SETTLE_SECONDS
        while done < rounds and time.monotonic() < end:
            for _ in islice(iter(drawing), ahead):  # the same workers, persistent as they are, on the same samples
                pass
            done += 1
        if done:
            grown_bytes = max(other_bytes, own_bytes(workers, batch_bytes))
    finally:
        CombinedLoader(drawing).reset()  # ends persistent workers, whatever state they are in
    # Pinned memory comes in powers of two. Source: CachingHostAllocator.h in pytorch/aten/src/ATen/core, `allocate`
    pinned = 2 if loader.pin_memory and torch.cuda.is_available() else 1
    growth_bytes = math.ceil((grown_bytes - other_bytes) * rounds / max(1, done))
    in_flight_bytes = (ahead + 1) * batch_bytes * pinned
    return _Held(in_flight_bytes + other_bytes, in_flight_bytes + loader.num_workers * batch_bytes, growth_bytes)


def _drawing_loader(loader: DataLoader[Any], batch_size: int, count: int) -> DataLoader[Any]:
    """A loader with workers like those of ``loader``, which draws ``count`` batches, a stream as many as it has."""
    arguments: dict[str, Any] = {}
    batched = loader.batch_sampler is not None
    if isinstance(loader.dataset, IterableDataset):
        arguments["batch_size"] = batch_size if batched else None
    elif batched:
        indices = _indices(loader, count * batch_size)
        arguments["batch_sampler"] = [indices[at : at + batch_size] for at in range(0, len(indices), batch_size)]
    else:
        arguments.update(batch_size=None, sampler=_indices(loader, count))
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        timeout=loader.timeout or _TIMEOUT_SECONDS,
        persistent_workers=True,  # they are still there to be looked at when all is drawn
        generator=torch.Generator(),
        **arguments,
    )


def _indices(loader: DataLoader[Any], count: int) -> list[Any]:
    """``count`` indices, over again where there are fewer."""
    return list(islice(cycle(indices_to_draw(loader, count)), count))


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    # torch puts the traceback of a worker into the message: the user's own error is its last line
    return lines[-1] if len(lines) > 1 else f"{type(error).__name__}: {lines[0]}"
