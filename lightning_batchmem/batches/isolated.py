"""Read a loader in a worker process, so that data set and samplers do not change in this one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, IterableDataset

from lightning_batchmem.batches.samples import (
    FATAL_WORKER_ERRORS,
    arguments_of_worker,
    may_start_worker,
    read_here,
)
from lightning_batchmem.devices.foreign_values import error_text
from lightning_batchmem.devices.out_of_memory import is_out_of_memory


@dataclass
class _Reading(IterableDataset[bytes]):
    """Data set of the worker, with one item: what the function returns for the loader, pickled."""

    loader: DataLoader[Any]
    read: Callable[[DataLoader[Any]], Any]

    def __iter__(self) -> Iterator[bytes]:
        # A worker would share each tensor through a file descriptor, so it is pickled instead.
        yield pickle.dumps(
            self.read(_in_this_process(self.loader)), protocol=pickle.HIGHEST_PROTOCOL
        )


def read_isolated(
    loader: DataLoader[Any],
    read: Callable[[DataLoader[Any]], Any],
    *,
    timeout_seconds: float,
) -> Any:
    """What ``read`` returns for the loader, in a worker where possible, else in this process.

    Args:
        loader: the loader.
        read: a function of a view of the loader that has no workers. It can be pickled, and so can
            what it returns.
        timeout_seconds: how long the worker may take.

    Raises:
        RuntimeError: if memory runs out, or the worker takes longer.
    """
    if may_start_worker(loader):
        try:
            return _read_in_worker(_Reading(loader, read), timeout_seconds)
        # A worker may fail in any way. The loader may still be read in this process.
        except Exception as error:
            # The same batch would end this process, or be waited for here too.
            messages = (*FATAL_WORKER_ERRORS, "DataLoader timed out")
            if any(message in str(error) for message in messages) or is_out_of_memory(error):
                raise
            rank_zero_info(
                "BatchFinder reads the loader in this process, since a worker could not read it:"
                f" {error_text(error)}"
            )
    # The sampler may draw from the random generators of the process.
    # DataLoader keeps an iterator beside them, which is not used.
    parts = {name: vars(loader).get(name) for name in ("dataset", "sampler", "batch_sampler")}
    with isolate_rng(), read_here(parts.items()):
        return read(_in_this_process(loader))


def _read_in_worker(reading: _Reading, timeout_seconds: float) -> Any:
    reader: DataLoader[Any] = DataLoader(
        reading,
        batch_size=None,
        # The worker's seed must not be drawn from the generator of the process.
        generator=torch.Generator(),
        **arguments_of_worker(reading.loader, timeout_seconds=timeout_seconds),
    )
    try:
        # The bytes are those of a child of this process.
        return pickle.loads(next(iter(reader)))  # noqa: S301
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
