"""Read data in a worker process where possible, so that they do not change in this one.

Where no worker may start, they are read in this process, and restored.
"""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_batchmem.devices.foreign_values import attributes_of, error_text
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.state.snapshot import restored_parts

T = TypeVar("T")

TIMED_OUT = "DataLoader timed out"

# A worker ended, or a spawned worker runs the user's script again.
# Source: torch/utils/data/dataloader.py, 2.5.1 to 2.14; multiprocessing/spawn.py.
_FATAL = ("DataLoader worker (pid", "bootstrapping phase")


def ends_reading(error: Exception, *also: str) -> bool:
    """Whether nothing can be read after this error of a worker, in this process either.

    Args:
        error: the error.
        *also: further texts of such errors.
    """
    return is_out_of_memory(error) or any(text in str(error) for text in (*_FATAL, *also))


def in_worker_or_here(
    loader: DataLoader[Any],
    in_worker: Callable[[], T],
    here: Callable[[], T],
    *fatal: str,
) -> T:
    """Read in a worker where possible, else in this process.

    Args:
        loader: the loader whose data are read.
        in_worker: reads in a worker.
        here: reads in this process.
        *fatal: texts of errors after which it is not read in this process.
    """
    if may_start_worker(loader):
        try:
            return in_worker()
        # A worker may fail in any way. The data may still be read in this process.
        except Exception as error:
            # The same sample would end this process, or memory would run out here too.
            if ends_reading(error, *fatal):
                raise
            rank_zero_info(
                f"BatchFinder reads {type(loader.dataset).__name__} in this process, since a worker"
                f" could not read it: {error_text(error)}"
            )
    return here()


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
    """Arguments of a DataLoader with one worker, which starts as the workers of ``loader`` do."""
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

    def here() -> Any:
        # The sampler may draw from the random generators of the process.
        # DataLoader keeps an iterator beside them, which is not used.
        parts = {name: vars(loader).get(name) for name in ("dataset", "sampler", "batch_sampler")}
        with isolate_rng(), read_here(parts.items()):
            return read(_in_this_process(loader))

    in_worker = partial(_read_in_worker, _Reading(loader, read), timeout_seconds)
    # A batch would be waited for here too.
    return in_worker_or_here(loader, in_worker, here, TIMED_OUT)


def _read_in_worker(reading: _Reading, timeout_seconds: float) -> Any:
    reader: DataLoader[Any] = DataLoader(
        reading,
        batch_size=None,
        # The worker's seed must not be drawn from the generator of the process.
        generator=torch.Generator(),
        **arguments_of_worker(reading.loader, timeout_seconds=timeout_seconds),
    )
    try:
        # The bytes come from a child of this process.
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
