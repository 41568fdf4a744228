"""Read samples and measure their sizes in a worker process.

So the data set does not change in this process.
"""

from __future__ import annotations

import math
import multiprocessing
import pickle
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from lightning_batchmem.batches.batch_sampler import JoinedSample, restored_sampler
from lightning_batchmem.batches.loader_size import COUNTED_BATCHES, check_count
from lightning_batchmem.batches.sample_bytes import (
    batched_sizes,
    held_bytes,
    pickled,
    without_views,
)
from lightning_batchmem.batches.sample_sizes import SampleSizes
from lightning_batchmem.devices.foreign_values import attributes_of, error_text
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.devices.tensors import copied
from lightning_batchmem.plan.options import WorstCase
from lightning_batchmem.plan.policy import ReadingPolicy
from lightning_batchmem.state.snapshot import restored_parts

# Errors with these texts are raised again: a worker ended, or a spawned worker runs the user's
# script again.
# Source: torch/utils/data/dataloader.py, 2.5.1 to 2.14; multiprocessing/spawn.py.
FATAL_WORKER_ERRORS = ("DataLoader worker (pid", "bootstrapping phase")

_TIMED_OUT = "DataLoader timed out"

# A sample may have thousands of tensors, and most batches have fewer than ten.
_MOST_SIZES = 32


class MeasuredSample(NamedTuple):
    # Bytes of a batch of the sample, and lengths of its tensors. Nothing if there is no sample,
    # which collate functions leave out.
    sizes: tuple[int, ...]
    # Whether the sample is one of those that are spread over the data set.
    is_spread: bool
    # The list contains the sample, pickled by a worker, or nothing if the sample is not needed.
    samples: list[Any]


@dataclass
class SampleMeasure:
    """Collate function of the worker that reads samples one at a time.

    It returns the size of the sample, and the sample itself where it is needed, because it takes
    milliseconds to send a sample to another process.
    """

    collate: Callable[[list[Any]], Any]
    worst_case: WorstCase | None
    policy: ReadingPolicy
    # At most this many samples are kept; more only where sizes differ and all are needed.
    most_samples: int
    needs_all_sizes: bool
    # The samples may hold these bytes in the process of the search.
    room_bytes: float
    # A training reads no more than this many of the first samples; inf where their order is random.
    reached: float = math.inf
    spread_count: int = 0
    is_ragged: bool = False
    # The largest of the sizes until now, each of any sample.
    largest: tuple[int, ...] = ()

    def __call__(self, samples: Any) -> MeasuredSample:
        # A data set may fetch a list, of the one sample here, or a batch that it has joined.
        is_list = isinstance(samples, list) and len(samples) == 1
        sample = samples[0] if is_list else JoinedSample(samples)
        if sample is None:
            # It is only kept until there is another.
            return MeasuredSample((), False, [] if self.largest else [self._sent(sample)])
        try:
            sizes = batched_sizes(self.collate, [sample])[:_MOST_SIZES]
        # A user's function may need more samples than one, and raise any exception for one.
        except Exception:  # noqa: BLE001
            sizes = (held_bytes(sample),)
        largest = tuple(map(max, zip_longest(sizes, self.largest, fillvalue=0)))
        is_needed = self.worst_case != "typical" and largest != self.largest
        self.is_ragged |= sizes != (self.largest or sizes)
        self.largest = largest
        # Of samples of one size, a batch needs no more. Of others, it needs the largest ones.
        needs_all = self.needs_all_sizes and self.is_ragged
        is_spread = self.room_bytes >= 0 and (needs_all or self.spread_count < self.most_samples)
        sent = [self._sent(sample)] if is_needed or is_spread else []
        if is_spread:
            self.room_bytes -= len(sent[0]) if type(sent[0]) is bytes else held_bytes(sent[0])
            is_spread = self.room_bytes >= 0 or self.spread_count == 0
            self.spread_count += is_spread
        return MeasuredSample(sizes, is_spread, sent if is_needed or is_spread else [])

    def _sent(self, sample: Any) -> Any:
        """The sample as it is returned.

        A worker would share each tensor through a file descriptor, and where there are too few of
        them the sample would be lost without an error.
        """
        alone = without_views(sample)
        return alone if get_worker_info() is None else pickled(alone)


def read_samples(loader: DataLoader[Any], measure: SampleMeasure) -> tuple[list[Any], SampleSizes]:
    """Read samples one at a time, in a worker where possible, else in this process.

    Where reading them can change nothing, it needs no worker, and takes a quarter of the time. The
    samples are those whose bytes the sizes contain.
    """
    try:
        samples, sizes = _read(loader, measure)
    # Out of memory has many types. Every other error is raised again.
    except Exception as error:
        if is_out_of_memory(error):
            raise RuntimeError(
                "Memory ran out while BatchFinder read a single sample of"
                f" {type(loader.dataset).__name__}. Free memory or make the samples smaller."
            ) from error
        raise
    if not samples:
        raise ValueError("the data set must have at least one sample, got none")
    return samples, sizes


def _read(loader: DataLoader[Any], measure: SampleMeasure) -> tuple[list[Any], SampleSizes]:
    dataset: Any = loader.dataset
    is_plain = type(dataset) is TensorDataset and loader.collate_fn is default_collate
    # No code of the user runs where tensors are only indexed.
    if is_plain and all(type(tensor) is Tensor for tensor in dataset.tensors):
        return _scan(_reader(loader, dataset, measure, num_workers=0), measure)
    if may_start_worker(loader):
        reader = _reader(loader, loader.dataset, measure, num_workers=1)
        try:
            return _scan(reader, measure)
        # A worker may fail in any way. The data set may still be read in this process.
        except Exception as error:
            # The same sample would end this process, or memory would run out here too.
            if any(message in str(error) for message in FATAL_WORKER_ERRORS) or is_out_of_memory(
                error
            ):
                raise
            rank_zero_info(
                "BatchFinder reads the data set in this process, since a worker could not read it:"
                f" {error_text(error)}"
            )
    with read_here([("data set", dataset)]):
        return _scan(_reader(loader, dataset, measure, num_workers=0), measure)


@contextmanager
def read_here(named: Iterable[tuple[str, object]]) -> Iterator[None]:
    """Restore parts of a loader that are read in this process, and warn of what cannot be."""
    with restored_parts(named) as restored:
        if restored.not_restorable:
            rank_zero_warn(
                "BatchFinder cannot restore these if reading the data set in this process changes"
                f" them: {'; '.join(restored.not_restorable[:10])}"
            )
        yield


def _reader(
    loader: DataLoader[Any], dataset: Any, measure: SampleMeasure, *, num_workers: int
) -> DataLoader[Any]:
    arguments: dict[str, Any] = {"batch_size": 1, "num_workers": num_workers, "collate_fn": measure}
    if not isinstance(dataset, IterableDataset):
        arguments["sampler"] = _indices(loader, measure.policy.max_sample_sizes, measure.reached)
    if num_workers:
        arguments |= arguments_of_worker(loader, timeout_seconds=measure.policy.sample_seconds)
    # The worker's seed must not be drawn from the generator of the process.
    return DataLoader(dataset, generator=torch.Generator(), **arguments)


def may_start_worker(loader: DataLoader[Any]) -> bool:
    """Whether a search may start a worker process for this loader.

    A spawned worker runs the user's script again unless the script is guarded, so one is spawned
    only if the loader does the same. No forked worker can read a device.
    """
    if _is_on_device(loader.dataset):
        return False
    # The first of all methods is the default, and `allow_none` returns None rather than choose it.
    start_method = (
        multiprocessing.get_start_method(allow_none=True)
        or multiprocessing.get_all_start_methods()[0]
    )
    return loader.num_workers > 0 or start_method == "fork"


def _is_on_device(data: object) -> bool:
    """Whether a data set has tensors of a device in its attributes, or in a data set in them."""
    # A data set may refer to itself.
    seen: set[int] = set()
    pending = [data]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return True
        if isinstance(value, Dataset) and id(value) not in seen:
            seen.add(id(value))
            for attribute in attributes_of(value).values():
                pending += [attribute, *_parts(attribute)]
    return False


def _parts(value: object) -> list[object]:
    """The tensors and data sets in a container. It may have millions of items, such as paths."""
    if not isinstance(value, dict | list | tuple):
        return []
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if isinstance(item, Tensor | Dataset)]


def arguments_of_worker(loader: DataLoader[Any], *, timeout_seconds: float) -> dict[str, Any]:
    """Arguments of a DataLoader whose one worker starts as those of ``loader`` do."""
    return {
        "num_workers": 1,
        "multiprocessing_context": loader.multiprocessing_context,
        # It may need workers of its own training, such as their number.
        "worker_init_fn": loader.worker_init_fn if loader.num_workers else None,
        "timeout": timeout_seconds,
        # Only persistent workers can be ended with a public function.
        "persistent_workers": True,
        # At most one item waits in shared memory.
        "prefetch_factor": 1,
    }


def _indices(loader: DataLoader[Any], most: int, reached: float) -> list[Any]:
    """Up to ``most`` indices of samples in random order, of the first ones that are ``reached``.

    They are spread over the whole data set, or are the first ones of the user's own sampler.
    Wherever the scan ends, it has read samples from everywhere, and no period of the data hides
    its longest samples.
    """
    # The generator has a fixed seed, so that a search can be repeated.
    generator = random.Random(0)  # noqa: S311
    if loader.batch_size is None:
        indices = _indices_of_batches(loader, most)
    elif isinstance(loader.sampler, SequentialSampler | RandomSampler):
        length = int(min(len(loader.sampler.data_source), reached))
        return generator.sample(range(length), min(most, length))
    else:
        with restored_sampler(loader.sampler, loader.dataset) as sampler:
            indices = list(islice(sampler, most))
    generator.shuffle(indices)
    return indices


def _indices_of_batches(loader: DataLoader[Any], most: int) -> list[Any]:
    """Indices of the first batches; a ValueError if these have not the size of the loader."""
    indices: list[Any] = []
    counts = []
    with restored_sampler(loader.batch_sampler, loader.dataset) as batches:
        for batch in batches:
            begin = len(indices)
            indices.extend(batch)
            counts.append(len(indices) - begin)
            if len(indices) >= most:
                break
    check_count(loader, max(counts[:COUNTED_BATCHES], default=0))
    return indices[:most]


def _scan(reader: DataLoader[Any], measure: SampleMeasure) -> tuple[list[Any], SampleSizes]:
    """Read until there are enough samples, the time has passed, or all samples were read.

    Samples that raise an error are left out, unless no sample can be read.
    """
    errors: list[Exception] = []
    # First the samples that are spread over the data set.
    kept: list[tuple[tuple[int, ...], Any]] = []
    sizes: list[float] = []
    largest: tuple[int, ...] = ()
    spread_count = 0
    is_ragged = False
    is_complete = False
    start = time.monotonic()
    try:
        for num_read, measured in enumerate(_each_measured(reader, errors), 1):
            largest = tuple(map(max, zip_longest(largest, measured.sizes, fillvalue=0)))
            for sent in measured.samples:
                # The sample takes the place of those that were the largest until now.
                kept[spread_count:] = [
                    one
                    for one in kept[spread_count:]
                    if _has_longest(one[0], largest, measured.sizes)
                ]
                # The bytes are those of a child of this process.
                sample = pickle.loads(sent) if reader.num_workers else copied(sent)  # noqa: S301
                kept.insert(spread_count, (measured.sizes, sample))
                spread_count += measured.is_spread
            if num_read == 1:
                # The time begins anew here, since the start of a worker may take longer than all
                # samples.
                start = time.monotonic()
            if measured.sizes:
                sizes.append(float(measured.sizes[0]))
                is_ragged |= measured.sizes != kept[0][0]
            seconds = time.monotonic() - start
            if seconds > measure.policy.scan_seconds:
                break
            none_can_be_read = not kept and len(errors) >= measure.policy.equal_sizes
            if none_can_be_read or num_read >= _enough(measure, seconds, is_ragged=is_ragged):
                break
        else:
            is_complete = True
    except RuntimeError as error:
        if not sizes or _TIMED_OUT not in str(error):
            raise
    finally:
        # The reset ends the worker now. The traceback of an error would keep it.
        CombinedLoader(reader).reset()
    if errors and not kept:
        raise errors[0]
    left_out = ""
    if errors:
        left_out = (
            f"The search left out {len(errors):,} of {num_read:,} samples that could not be read"
            f" ({error_text(errors[0])}). A training that reaches them ends there."
        )
    parts = [of_sample for of_sample, _ in kept]
    # Nothing is there if each sample is None.
    sample_bytes = [sum(of_sample[:1]) for of_sample in parts]
    sizes_of_samples = SampleSizes(sizes, sample_bytes, is_ragged, is_complete, left_out, parts)
    return [sample for _, sample in kept], sizes_of_samples


def _has_longest(sizes: tuple[int, ...], largest: tuple[int, ...], newer: tuple[int, ...]) -> bool:
    """Whether a sample has the largest of some size, which a newer sample has not."""
    each = zip_longest(sizes, largest, newer, fillvalue=0)
    return any(size == most > other for size, most, other in each)


def _each_measured(reader: DataLoader[Any], errors: list[Exception]) -> Iterator[MeasuredSample]:
    """Yield each sample; one that raises an error, which is added to ``errors``, has no size."""
    iterator = iter(reader)
    while True:
        try:
            measured = next(iterator)
        except StopIteration:
            return
        # A data set may raise any error.
        except Exception as error:
            if _ends_reading(error):
                raise
            # Only the first one is raised, and a traceback would keep its sample.
            errors.append(error.with_traceback(None) if errors else error)
            measured = MeasuredSample((), False, [])
        yield measured


def _ends_reading(error: Exception) -> bool:
    """Whether no other sample can be read after this error."""
    texts = (*FATAL_WORKER_ERRORS, _TIMED_OUT)
    return is_out_of_memory(error) or any(text in str(error) for text in texts)


def _enough(measure: SampleMeasure, seconds: float, *, is_ragged: bool) -> int:
    """Number of samples after which no more are read."""
    policy = measure.policy
    if measure.worst_case == "typical":
        return policy.typical_samples
    if measure.worst_case is not None or is_ragged:
        return policy.max_sample_sizes
    return policy.equal_sizes if seconds > policy.equal_sizes_seconds else policy.equal_sizes_quick
