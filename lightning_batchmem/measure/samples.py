"""Draw samples from a loader's data set, in another process, and let nothing of the data set's own move in this one."""

from __future__ import annotations

import copy
import math
import multiprocessing
import time
import types
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_batchmem.apply.loaders import count_samples, indices_to_draw
from lightning_batchmem.measure.breakdown import copied
from lightning_batchmem.measure.worst_case import KeepLargest, Seen
from lightning_batchmem.plan.options import WorstCase

_T = TypeVar("_T")

_DRAWN_SAMPLES = 32
"""How many samples are drawn; batches repeat them. Enough to meet several lengths, few enough to be drawn at once."""

_SCANNED_SAMPLES = 10_000
"""How many samples are looked at for the largest."""

_SCAN_SECONDS = 60.0
"""For how long samples are looked at for the largest."""

_SCAN_PASSES = 100
"""A scan goes over the whole set this often, by other samples each time: where time ends it, it has been everywhere."""

_WORKER_TIMEOUT_SECONDS = 60
"""A forked worker that waits for a thread of its parent waits for ever; then the samples are drawn otherwise."""


class LoaderSamples:
    """A few real samples, drawn once, from which the loader's own ``collate_fn`` makes batches of any size.

    They are drawn in a worker process where one can be forked, or the loader has workers of its own: neither a stream
    nor a file handle nor a generator of the data set's own moves in this process. Elsewhere from a copy of the data
    set.

    Args:
        loader: one that makes its own batches.
        worst_case: as in :class:`~lightning_batchmem.apply.batch_size.ProbeBatches`.

    Attributes:
        samples: as the data set gives them: 32 from all over it, or the largest only.

    Raises:
        ValueError: when the data set has no sample, or ``"longest"`` finds nothing to count in them.
        Exception: what a ``worst_case`` of the user's raises.
    """

    def __init__(self, loader: DataLoader[Any], worst_case: WorstCase = None) -> None:
        # A method is not copied: its owner would be too, and that is the module or the data module, which are put back
        # anyhow, or the data set, which may be large.
        method = isinstance(loader.collate_fn, types.MethodType)
        self._collate = loader.collate_fn if method else _copy_or_warn(loader.collate_fn, "collate_fn")
        drawn = _draw(loader) if worst_case in (None, "typical") else _largest(loader, worst_case)
        if not drawn:
            raise ValueError("the data must have at least one sample, got none")
        # out of the shared memory in which a worker hands tensors over, one file descriptor each
        self.samples = [copied(sample) for sample in drawn]
        # Without workers a fetch holds all samples of the batch at once, beside the batch. With them that is in the
        # worker; a collate function that takes its samples apart still needs new ones for each batch.
        self._shared = loader.num_workers > 0

    def batch(self, batch_size: int) -> Any:
        """A collated batch of ``batch_size`` samples, on the host."""
        some = [self.samples[i % len(self.samples)] for i in range(batch_size)]
        return self._collate([copied(sample, share_tensors=self._shared) for sample in some])


def _draw(loader: DataLoader[Any]) -> list[Any]:
    def first(reader: DataLoader[Any]) -> list[Any]:
        return next(iter(reader), [])

    return _read(loader, most=_DRAWN_SAMPLES, collate=_uncollated, take=first)


def _largest(loader: DataLoader[Any], worst_case: WorstCase) -> list[Any]:
    keep = KeepLargest(worst_case)
    found, ended_by = _read(loader, most=_SCANNED_SAMPLES, collate=keep, take=_scan)
    if found.error:
        keep.size_of(found.larger[0])  # raises again, and here with the traceback of the user's own lines
        raise RuntimeError(f"worst_case raised in a worker process, and not outside of it:\n{found.error}")
    if worst_case == "longest" and found.size == 0:
        raise ValueError(
            'worst_case must be a callable where samples hold no tensor, text or number, got "longest" for a'
            f" {type(found.larger[0]).__name__}"
        )
    total = count_samples(loader)
    if found.samples < total if total is not None else ended_by != "the last":
        rank_zero_info(
            f"worst_case: of {'a stream' if total is None else f'{total:,} samples'} {found.samples:,} were looked at"
            + (f" in {_SCAN_SECONDS:g} s, which is all the time for it" if ended_by == "time" else "")
        )
    return found.larger


def _scan(reader: DataLoader[Any]) -> tuple[Seen, Literal["the last", "number", "time"]]:
    end = time.monotonic() + _SCAN_SECONDS
    found = Seen(0, [], -math.inf)
    for seen in reader:
        found = seen._replace(samples=found.samples + seen.samples, larger=seen.larger or found.larger)
        if found.error or found.samples >= _SCANNED_SAMPLES:
            return found, "number"
        if time.monotonic() > end:
            return found, "time"
    return found, "the last"


def _read(
    loader: DataLoader[Any], *, most: int, collate: Callable[[list[Any]], Any], take: Callable[[DataLoader[Any]], _T]
) -> _T:
    """What ``take`` makes of a loader of up to ``most`` samples, in batches that ``collate`` makes."""
    # A worker that is spawned instead runs the user's script once more, unless that is guarded against it: only where
    # the loader itself will do the same. The first of all methods is the default, and asking does not fix it.
    start_method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if loader.num_workers or start_method == "fork":
        try:
            return take(_reader(loader, loader.dataset, most, collate, num_workers=1))
        except Exception as error:  # noqa: BLE001 - whatever a worker cannot do; what is the user's own recurs below
            rank_zero_info(f"samples for the probes could not be drawn in a worker: {error}")
    return take(_reader(loader, _copy_or_warn(loader.dataset, "data set"), most, collate, num_workers=0))


def _copy_or_warn(value: Any, name: str) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - a user's object may refuse to be copied in any way it likes
        rank_zero_warn(f"the {name} cannot be copied: what the probes change in it is not put back")
        return value


def _reader(
    loader: DataLoader[Any], dataset: Any, most: int, collate: Callable[[list[Any]], Any], *, num_workers: int
) -> DataLoader[Any]:
    arguments: dict[str, Any] = {"batch_size": _DRAWN_SAMPLES}
    if not isinstance(dataset, IterableDataset):
        arguments["sampler"] = _indices(loader, most)
    if num_workers:
        arguments["multiprocessing_context"] = loader.multiprocessing_context
        arguments["worker_init_fn"] = loader.worker_init_fn
        arguments["timeout"] = _WORKER_TIMEOUT_SECONDS
    return DataLoader(
        dataset,
        num_workers=num_workers,
        collate_fn=collate,
        generator=torch.Generator(),  # the worker's seed must not be drawn from the process's own generator
        **arguments,
    )


def _indices(loader: DataLoader[Any], most: int) -> list[Any]:
    """The indices to draw, in passes over all of them: a scan that time ends has been everywhere."""
    spread = indices_to_draw(loader, most)
    return [index for start in range(_SCAN_PASSES) for index in spread[start::_SCAN_PASSES]]


def _uncollated(samples: list[Any]) -> list[Any]:
    return [copied(sample) for sample in samples]  # or the storages behind views would have to go through shared memory
