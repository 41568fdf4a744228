"""Samples of a data set: read one at a time, measured, and chosen for the search."""

from __future__ import annotations

import math
import pickle
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from lightning_batchmem.batches.batch_sampler import JoinedSample, restored_sampler
from lightning_batchmem.batches.byte_counts import (
    batched_sizes,
    count_bytes,
    pickled,
    without_views,
)
from lightning_batchmem.batches.loader_size import COUNTED_BATCHES, check_count
from lightning_batchmem.batches.reader import (
    TIMED_OUT,
    arguments_of_worker,
    ends_reading,
    in_worker_or_here,
    read_here,
)
from lightning_batchmem.batches.sample_sizes import SampleSizes
from lightning_batchmem.devices.foreign_values import error_text
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.devices.tensors import copied
from lightning_batchmem.plan.options import WorstCase
from lightning_batchmem.plan.policy import ReadingPolicy

# A sample may have thousands of tensors, and most batches have fewer than ten.
_MOST_SIZES = 32


class MeasuredSample(NamedTuple):
    # Bytes of a batch of the sample, and lengths of its tensors. Nothing if the sample is None:
    # collate functions leave it out.
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
            # It is kept only until another sample comes.
            return MeasuredSample((), False, [] if self.largest else [self._sent(sample)])
        try:
            sizes = batched_sizes(self.collate, [sample])[:_MOST_SIZES]
        # A user's function may need more samples than one, and raise any exception for one.
        except Exception:  # noqa: BLE001
            sizes = (count_bytes(sample),)
        largest = tuple(map(max, zip_longest(sizes, self.largest, fillvalue=0)))
        is_needed = self.worst_case != "typical" and largest != self.largest
        self.is_ragged |= sizes != (self.largest or sizes)
        self.largest = largest
        # Of samples of one size, a batch needs no more. Of others, it needs the largest ones.
        needs_all = self.needs_all_sizes and self.is_ragged
        is_spread = self.room_bytes >= 0 and (needs_all or self.spread_count < self.most_samples)
        sent = [self._sent(sample)] if is_needed or is_spread else []
        if is_spread:
            self.room_bytes -= len(sent[0]) if type(sent[0]) is bytes else count_bytes(sent[0])
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
    sizes contain the bytes of each of the samples.
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
    indices = None
    if not isinstance(dataset, IterableDataset):
        indices = _indices(loader, measure.policy.max_sample_sizes, measure.reached)
    reader: Callable[..., DataLoader[Any]] = partial(
        DataLoader,
        dataset,
        batch_size=1,
        sampler=indices,
        collate_fn=measure,
        # The worker's seed must not be drawn from the generator of the process.
        generator=torch.Generator(),
    )
    is_plain = type(dataset) is TensorDataset and loader.collate_fn is default_collate
    # No code of the user runs where tensors are only indexed.
    if is_plain and all(type(tensor) is Tensor for tensor in dataset.tensors):
        return _scan(reader(), measure)

    def in_worker() -> tuple[list[Any], SampleSizes]:
        timeout_seconds = measure.policy.sample_seconds
        arguments = arguments_of_worker(loader, timeout_seconds=timeout_seconds)
        return _scan(reader(**arguments), measure)

    def here() -> tuple[list[Any], SampleSizes]:
        with read_here([("data set", dataset)]):
            return _scan(reader(), measure)

    return in_worker_or_here(loader, in_worker, here)


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
    # Samples with their sizes: samples that are spread over the data set, and the largest others.
    spread: list[tuple[tuple[int, ...], Any]] = []
    largest_ones: list[tuple[tuple[int, ...], Any]] = []
    sizes: list[float] = []
    largest: tuple[int, ...] = ()
    first: tuple[int, ...] = ()
    is_ragged = False
    is_complete = False
    start = time.monotonic()
    try:
        for num_read, measured in enumerate(_each_measured(reader, errors), 1):
            largest = tuple(map(max, zip_longest(largest, measured.sizes, fillvalue=0)))
            for sent in measured.samples:
                # It takes the place of samples that were the largest until now.
                largest_ones = [
                    one for one in largest_ones if _has_longest(one[0], largest, measured.sizes)
                ]
                # The bytes come from a child of this process.
                sample = pickle.loads(sent) if reader.num_workers else copied(sent)  # noqa: S301
                if measured.is_spread:
                    spread.append((measured.sizes, sample))
                else:
                    largest_ones.insert(0, (measured.sizes, sample))
            if num_read == 1:
                # The time begins anew here, since the start of a worker may take longer than all
                # samples.
                start = time.monotonic()
            if measured.sizes:
                sizes.append(float(measured.sizes[0]))
                first = first or measured.sizes
                is_ragged |= measured.sizes != first
            seconds = time.monotonic() - start
            if seconds > measure.policy.scan_seconds:
                break
            none_can_be_read = not spread and len(errors) >= measure.policy.equal_sizes
            if none_can_be_read or num_read >= _enough(measure, seconds, is_ragged=is_ragged):
                break
        else:
            is_complete = True
    except RuntimeError as error:
        if not sizes or TIMED_OUT not in str(error):
            raise
    finally:
        # The reset ends the worker now. The traceback of an error would keep it.
        CombinedLoader(reader).reset()
    available = spread + largest_ones
    if errors and not available:
        raise errors[0]
    left_out = ""
    if errors:
        left_out = (
            f"The search left out {len(errors):,} of {num_read:,} samples that could not be read"
            f" ({error_text(errors[0])}). A training that reaches them ends there."
        )
    parts = [of_sample for of_sample, _ in available]
    # Nothing is there if each sample is None.
    bytes_each = [sum(of_sample[:1]) for of_sample in parts]
    sizes_of_samples = SampleSizes(sizes, bytes_each, is_ragged, is_complete, left_out, parts)
    return [sample for _, sample in available], sizes_of_samples


def _has_longest(sizes: tuple[int, ...], largest: tuple[int, ...], newer: tuple[int, ...]) -> bool:
    """Whether a sample is the largest in some size in which a newer sample is smaller."""
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
            if ends_reading(error, TIMED_OUT):
                raise
            # Only the first one is raised, and a traceback would keep its sample.
            errors.append(error.with_traceback(None) if errors else error)
            measured = MeasuredSample((), False, [])
        yield measured


def _enough(measure: SampleMeasure, seconds: float, *, is_ragged: bool) -> int:
    """Number of samples after which no more are read."""
    policy = measure.policy
    if measure.worst_case == "typical":
        return policy.typical_samples
    if measure.worst_case is not None or is_ragged:
        return policy.max_sample_sizes
    return policy.equal_sizes if seconds > policy.equal_sizes_seconds else policy.equal_sizes_quick
