"""Draw samples and their sizes in a worker process.

So the data set does not change in this process.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_batchmem.batches.loaders import indices_to_draw
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.devices.tensors import copied, plain_tensors, tensors_in
from lightning_batchmem.plan.options import WorstCase, number_from

# So many samples are kept for batches: enough for several lengths, few enough to be read quickly.
MAX_SAMPLES = 32
# At most so many samples are measured.
MAX_SIZES = 10_000

# So many samples of one size count as a data set of one size. While they are read quickly, more are
# measured first, since one long sample in 64 is missed in a third of the cases.
_EQUAL_SIZES = 64
_EQUAL_SIZES_QUICK = 512
_EQUAL_SECONDS = 2.0

_SCAN_SECONDS = 20.0
# A worker that waits for a thread of its parent process waits forever.
_SAMPLE_SECONDS = 60.0

# Errors with these texts are raised again: a worker ended, or a spawned worker runs the user's
# script again.
# Source: torch/utils/data/dataloader.py, 2.5.1 to 2.13; multiprocessing/spawn.py.
_FATAL = ("DataLoader worker (pid", "bootstrapping phase")


@dataclass
class DrawnSamples:
    # The samples are spread over the data set.
    samples: list[Any] = field(default_factory=list)
    # Each of these samples takes so many bytes in a batch.
    sample_bytes: list[int] = field(default_factory=list)
    # All measured samples have these sizes: bytes, or the values of the user's callable.
    sizes: list[float] = field(default_factory=list)
    largest: Any = None
    largest_bytes: int = 0
    # Whether all samples of the data set were measured.
    is_complete: bool = False
    # The notes say why samples were not measured; there are none if no more samples were needed.
    notes: tuple[str, ...] = ()


class _ByteCounter(pickle.Pickler):
    """Pickler that counts bytes and writes nothing; tensors count separately."""

    def __init__(self, value: object) -> None:
        # A pickler only calls the method `write` of its file.
        super().__init__(self, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensor_bytes = self.tensor_count = self.other_bytes = 0
        self.dump(value)

    def write(self, pickled: Any) -> None:
        self.other_bytes += memoryview(pickled).nbytes

    def persistent_id(self, found: Any) -> str | None:
        # Tensors of other layouts contain strided tensors, which are counted.
        if isinstance(found, Tensor) and found.layout is torch.strided:
            self.tensor_bytes += found.nbytes
            self.tensor_count += 1
            return "tensor"
        return None


def held_bytes(samples: object) -> int:
    """Bytes that samples hold, pickled where they are no tensors."""
    try:
        counter = _ByteCounter(samples)
    # A user's object may refuse to be pickled in any way.
    except Exception:  # noqa: BLE001
        return sum(tensor.nbytes for tensor in tensors_in(samples))
    return counter.tensor_bytes + counter.other_bytes


def batched_bytes(collate: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[int, int]:
    """Bytes of a batch and the number of its tensors.

    Names and paths count only in a batch without tensors.
    """
    # The containers are new, since a collate function may take its samples apart.
    counter = _ByteCounter(collate([copied(sample, share_tensors=True) for sample in samples]))
    return counter.tensor_bytes or counter.other_bytes, counter.tensor_count


class _Measured(NamedTuple):
    size: float
    batch_bytes: int
    is_kept: bool
    # The list contains the measured sample, or nothing if the sample is not needed.
    samples: list[Any]


class _Measure:
    """Collate function of the reading worker.

    It returns the size of one sample, and the sample itself where it is needed.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any], worst_case: WorstCase, share_bytes: float
    ) -> None:
        self._collate = collate
        self._size_of = worst_case if callable(worst_case) else None
        self._share_bytes = share_bytes
        self._kept = 0
        self._largest = -math.inf

    def __call__(self, samples: list[Any]) -> _Measured:
        sample = samples[0]
        try:
            batch_bytes, _ = batched_bytes(self._collate, samples)
        # A user's function may need more samples than one.
        except Exception:  # noqa: BLE001
            batch_bytes = held_bytes(sample)
        size = float(batch_bytes)
        if self._size_of is not None:
            size = number_from("worst_case", self._size_of(sample))
        is_kept = self._kept < MAX_SAMPLES and self._fits(sample)
        is_needed = is_kept or size > self._largest
        self._kept += is_kept
        self._largest = max(size, self._largest)
        return _Measured(size, batch_bytes, is_kept, [_without_views(sample)] if is_needed else [])

    def _fits(self, sample: Any) -> bool:
        if self._share_bytes >= 0:
            self._share_bytes -= held_bytes(sample)
        return self._share_bytes >= 0 or self._kept == 0


def draw_samples(
    loader: DataLoader[Any],
    collate: Callable[[list[Any]], Any],
    worst_case: WorstCase,
    share_bytes: float,
) -> DrawnSamples:
    """Read samples one at a time, in a worker where possible, else from a copy of the data set.

    They hold at most ``share_bytes`` in this process, but at least one is read; ``collate`` may be
    called here.
    """
    try:
        drawn = _draw(loader, collate, worst_case, share_bytes)
    # Out of memory has many types. Every other error is raised again.
    except Exception as error:
        if is_out_of_memory(error):
            raise RuntimeError(
                "Memory ran out while BatchFinder read a single sample of"
                f" {type(loader.dataset).__name__}. Free memory or make the samples smaller."
            ) from error
        raise
    if not drawn.sizes:
        raise ValueError("the data set must have at least one sample, got none")
    return drawn


def _draw(
    loader: DataLoader[Any],
    collate: Callable[[list[Any]], Any],
    worst_case: WorstCase,
    share_bytes: float,
) -> DrawnSamples:
    # A spawned worker runs the user's script again unless the script is guarded, so one is spawned
    # only if the loader does the same. The first of all methods is the default, and `allow_none`
    # returns None rather than choose it.
    start_method = (
        multiprocessing.get_start_method(allow_none=True)
        or multiprocessing.get_all_start_methods()[0]
    )
    if loader.num_workers or start_method == "fork":
        try:
            measure = _Measure(loader.collate_fn, worst_case, share_bytes)
            return _scan(_reader(loader, loader.dataset, measure, num_workers=1), worst_case)
        # A worker may fail in any way. A copy of the data set may still be read in this process.
        except Exception as error:
            # The same sample would end this process, or memory would run out here too.
            if any(message in str(error) for message in _FATAL) or is_out_of_memory(error):
                raise
            rank_zero_info(
                "BatchFinder reads a copy of the data set, since a worker could not read it:"
                f" {error}"
            )
    measure = _Measure(collate, worst_case, share_bytes)
    dataset = copy_or_warn(loader.dataset, "data set")
    return _scan(_reader(loader, dataset, measure, num_workers=0), worst_case)


def copy_or_warn(value: Any, name: str) -> Any:
    """A deep copy, or with a warning the value itself."""
    try:
        return copy.deepcopy(value)
    # A user's object may refuse to be copied in any way.
    except Exception:  # noqa: BLE001
        rank_zero_warn(
            f"The {name} cannot be copied. Changes that the search makes in it are not undone."
        )
        return value


def _reader(
    loader: DataLoader[Any], dataset: Any, measure: _Measure, *, num_workers: int
) -> DataLoader[Any]:
    arguments: dict[str, Any] = {"batch_size": 1, "num_workers": num_workers, "collate_fn": measure}
    if not isinstance(dataset, IterableDataset):
        # Several passes go over the whole data set: wherever the scan ends, it has read samples
        # from everywhere.
        indices = indices_to_draw(loader, MAX_SIZES)
        passes = max(1, len(indices) // MAX_SAMPLES)
        arguments["sampler"] = [
            index for start in range(passes) for index in indices[start::passes]
        ]
    if num_workers:
        arguments |= {
            "multiprocessing_context": loader.multiprocessing_context,
            "worker_init_fn": loader.worker_init_fn,
            "timeout": _SAMPLE_SECONDS,
            # Only persistent workers can be ended with a public function.
            "persistent_workers": True,
            # At most one sample waits in shared memory.
            "prefetch_factor": 1,
        }
    # The worker's seed must not be drawn from the generator of the process.
    return DataLoader(dataset, generator=torch.Generator(), **arguments)


def _scan(reader: DataLoader[Any], worst_case: WorstCase) -> DrawnSamples:
    drawn = DrawnSamples()
    start = time.monotonic()
    smallest = math.inf
    largest = -math.inf
    try:
        for measured in reader:
            for shared in measured.samples:
                # The copy is not in shared memory, which takes a file descriptor for each tensor.
                sample = copied(shared)
                if measured.is_kept:
                    drawn.samples.append(sample)
                    drawn.sample_bytes.append(measured.batch_bytes)
                if measured.size > largest:
                    largest = measured.size
                    drawn.largest = sample
                    drawn.largest_bytes = measured.batch_bytes
            if not drawn.sizes:
                # The time begins anew here, since the start of a worker may take longer than all
                # samples.
                start = time.monotonic()
            drawn.sizes.append(measured.size)
            smallest = min(smallest, measured.size)
            seconds = time.monotonic() - start
            if seconds > _SCAN_SECONDS:
                return _incomplete(drawn, seconds)
            if _is_enough(len(drawn.sizes), worst_case, seconds, is_ragged=largest > smallest):
                return drawn
    except RuntimeError as error:
        if not drawn.sizes or "DataLoader timed out" not in str(error):
            raise
        return _incomplete(drawn, time.monotonic() - start)
    finally:
        # The reset ends the worker now. The traceback of an error would keep it.
        CombinedLoader(reader).reset()
    drawn.is_complete = True
    return drawn


def _is_enough(count: int, worst_case: WorstCase, seconds: float, *, is_ragged: bool) -> bool:
    if worst_case == "typical":
        return count >= MAX_SAMPLES
    if worst_case is not None or is_ragged or count < _EQUAL_SIZES:
        return count >= MAX_SIZES
    return seconds > _EQUAL_SECONDS or count >= _EQUAL_SIZES_QUICK


def _incomplete(drawn: DrawnSamples, seconds: float) -> DrawnSamples:
    drawn.notes = (
        f"Only {len(drawn.sizes):,} samples were read in {seconds:.0f} s; larger ones may exist.",
    )
    return drawn


def _without_views(sample: Any) -> Any:
    """The sample, copied if a tensor in it is a view of a larger storage."""
    plain = [one for tensor in tensors_in(sample) for one in plain_tensors(tensor)]
    if any(one.untyped_storage().nbytes() > one.nbytes for one in plain):
        return copied(sample)
    return sample
