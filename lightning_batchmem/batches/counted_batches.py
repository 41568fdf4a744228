"""Count the samples of the batches that a loader makes after its size was set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader

# The modules and classes are private in torch 2.5.1 to 2.14.
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_batchmem.batches.batch_sampler import batch_sampler_of, restored_sampler
from lightning_batchmem.batches.isolated import read_isolated
from lightning_batchmem.batches.loader_size import COUNTED_BATCHES, check_count, loader_batch_size
from lightning_batchmem.batches.samples import may_start_worker
from lightning_batchmem.devices.tensors import samples_in
from lightning_batchmem.plan.policy import ReadingPolicy


def check_batch_sampler(loader: DataLoader[Any]) -> None:
    """Raise a ValueError if a copy of the project's batch sampler makes batches of another size."""
    sampler = batch_sampler_of(loader)
    if type(sampler) is BatchSampler:
        return
    try:
        # The sampler may draw from the random generators of the process.
        with isolate_rng(), restored_sampler(sampler, loader.dataset) as batches:
            counts = [len(list(batch)) for batch in islice(batches, COUNTED_BATCHES)]
    # A user's sampler may have computed things from the size that it had before.
    except Exception as error:
        raise ValueError(
            f"the batch sampler {type(sampler).__name__} must make batches after its batch_size was"
            f" set to {loader_batch_size(loader)}, but it raised {type(error).__name__}: {error}."
            " Make it in train_dataloader with batch_size=self.batch_size, or set the size by hand."
        ) from error
    check_count(loader, max(counts, default=0))


def check_batch_of_one(batch: object, hook: str) -> None:
    """Raise a ValueError if a batch of one sample has several rows already."""
    rows = samples_in(batch)
    if rows is not None and rows > 1:
        raise ValueError(
            f"each sample of {hook} must be a single one, but a batch of one sample has {rows}"
            " rows: the data set forms the batches itself. Let an attribute decide how"
            " large they are, and pass it as batch_arg_name with budget=True."
        )


def check_iteration(loader: DataLoader[Any]) -> None:
    """Raise a ValueError if a loader of the project's own class ignores the size that was set.

    Where its class decides what an iteration is, a batch is made in a worker process, or by a copy.
    """
    if type(loader).__iter__ is DataLoader.__iter__:
        return
    name = type(loader).__name__
    # DataLoader keeps its own iterator under this name (torch 2.5.1 to 2.14).
    iterators = [
        value
        for attribute, value in vars(loader).items()
        if isinstance(value, _BaseDataLoaderIter) and attribute != "_iterator"
    ]
    # Workers have made batches ahead. A copy of the loader would take batches from the iterator.
    if any(one._num_workers for one in iterators) or (iterators and not may_start_worker(loader)):
        raise ValueError(
            f"the loader {name} must not have begun an iteration before its batch size is set,"
            " because it has made batches of the old size. Make it with num_workers=0, or in"
            " train_dataloader with batch_size=self.batch_size."
        )
    try:
        count = read_isolated(
            loader, samples_of_first_batch, timeout_seconds=ReadingPolicy().sample_seconds
        )
    # A user's loader may raise any error, in a worker or when it is copied.
    except Exception as error:
        raise ValueError(
            f"the batches of {name} must follow its batch size, but none could be made before the"
            f" training to count its samples: {type(error).__name__}: {error}"
        ) from error
    check_count(loader, count)


def samples_of_first_batch(loader: DataLoader[Any]) -> int:
    """Samples of the first batch of an iteration, which is read."""
    with _counted_fetches() as counts:
        batch = next(iter(loader))
    return counts[0] if counts else samples_in(batch) or 0


@contextmanager
def _counted_fetches() -> Iterator[list[int]]:
    """Count the indices of each batch that an iterator of torch makes, whoever has made it."""
    counts: list[int] = []

    def counting(fetch: Callable[..., Any]) -> Callable[..., Any]:
        def counted(fetcher: Any, indices: Any) -> Any:
            counts.append(len(indices))
            return fetch(fetcher, indices)

        return counted

    before: dict[Any, Any] = {
        kind: kind.fetch for kind in (_MapDatasetFetcher, _IterableDatasetFetcher)
    }
    for kind, fetch in before.items():
        kind.fetch = counting(fetch)
    try:
        yield counts
    finally:
        for kind, fetch in before.items():
            kind.fetch = fetch
