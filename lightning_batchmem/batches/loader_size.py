"""The batch size of a loader: read, set in place, and compared with the batches that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

# The classes are private in torch 2.5.1 to 2.14.
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_batchmem.batches.batch_sampler import batch_sampler_of, restored_sampler
from lightning_batchmem.batches.reader import may_start_worker, read_isolated
from lightning_batchmem.devices.tensors import samples_in
from lightning_batchmem.plan.policy import ReadingPolicy

# Batches that are counted: one may be smaller than the others, as the last one of a bucket.
COUNTED_BATCHES = 16

# Names under which samplers keep the batch size.
_SIZE_NAMES = ("batch_size", "_batch_size", "batchsize", "_batchsize", "bs", "_bs")

# A sampler that wraps another one may be wrapped itself.
_STEPS_TO_SAMPLERS = 2

# The samplers in which the size of a loader was set first, with the names of the attributes.
_PLACES: WeakKeyDictionary[DataLoader[Any], list[tuple[Any, str]]] = WeakKeyDictionary()


def count_samples(loader: DataLoader[Any]) -> int | None:
    """Number of samples in an epoch of ``loader``; ``None`` for a stream without a length."""
    if isinstance(loader.dataset, IterableDataset):
        return sized_len(loader.dataset)
    if loader.batch_size is not None:
        sampler: Any = loader.sampler
    else:
        sampler = getattr(loader.batch_sampler, "sampler", None)
        # The length of this one is a number of batches.
        if isinstance(sampler, BatchSampler):
            sampler = None
    length = sized_len(sampler)
    return sized_len(loader.dataset) if length is None else length


def loader_batch_size(loader: DataLoader[Any]) -> int | None:
    """The batch size of ``loader``, or ``None`` where it has none.

    A loader without batching has none, and neither has a batch sampler without a size.
    """
    size = loader.batch_size
    if size is None:
        size = getattr(batch_sampler_of(loader), "batch_size", None)
    return size if isinstance(size, int) else None


def set_loader_batch_size(loader: DataLoader[Any], batch_size: int) -> None:
    """Set the batch size of an existing loader in place, whatever arguments its class takes.

    It is set in the samplers too, which may wrap each other.

    Raises:
        ValueError: if a sampler does not keep it.
    """
    # Later, a sampler inside may have the size of the loader by chance.
    places = _PLACES.setdefault(loader, _places_in_samplers(loader))
    for sampler, name in places:
        # A property without a setter may read the size of the sampler inside.
        with suppress(AttributeError):
            setattr(sampler, name, batch_size)
    if loader.batch_size is not None:
        # DataLoader.__setattr__ raises an error for this attribute (torch 2.5.1 to 2.14).
        vars(loader)["batch_size"] = batch_size
    for sampler, name in places:
        if (actual := getattr(sampler, name)) != batch_size:
            raise ValueError(
                f"the sampler {type(sampler).__name__} must have a {name} that can be set, got"
                f" {actual} after it was set to {batch_size}"
            )


def keep_sizes(loaders: Iterable[DataLoader[Any]]) -> Callable[[], None]:
    """Record the batch sizes of loaders; returns a function that restores them."""
    sizes = [(loader, loader_batch_size(loader)) for loader in loaders]

    def restore() -> None:
        for loader, size in sizes:
            if size is not None:
                set_loader_batch_size(loader, size)

    return restore


def check_count(loader: DataLoader[Any], count: int) -> None:
    """Raise a ValueError if a full batch of the loader has ``count`` samples instead of its size.

    A batch that has all samples of an epoch is full too.
    """
    size = loader_batch_size(loader)
    if size is None or count in (size, min(size, count_samples(loader) or size)):
        return
    advice = "Make"
    if count < size:
        advice = f"Pass max_batch_size={count} if it makes no larger ones, or make"
    maker = f"the loader {type(loader).__name__}"
    if type(batch_sampler_of(loader)) is not BatchSampler:
        maker = f"the batch sampler {type(batch_sampler_of(loader)).__name__}"
    raise ValueError(
        f"{maker} must make batches of its batch_size, but its batches do not depend on batch_size"
        f" alone: the largest has {count} samples after it was set to {size}. {advice} it"
        " in train_dataloader from an attribute such as `self.batch_size`; if that counts something"
        " else than samples, pass it as batch_arg_name with budget=True."
    )


def _places_in_samplers(loader: DataLoader[Any]) -> list[tuple[Any, str]]:
    """The samplers that have the size of the loader, each with the name of the attribute.

    The one that makes the batches is among them whatever its size is.
    """
    makes_batches = batch_sampler_of(loader)
    size = loader_batch_size(loader)
    samplers = [makes_batches, loader.sampler]
    level = list(samplers)
    for _ in range(_STEPS_TO_SAMPLERS):
        level = [
            value
            for sampler in level
            for name, value in getattr(sampler, "__dict__", {}).items()
            if isinstance(value, Sampler) or "sampler" in name
        ]
        samplers += level
    # Several paths may lead to one sampler.
    distinct = {id(sampler): sampler for sampler in samplers}.values()
    return [
        (sampler, name)
        for sampler in distinct
        for name in _SIZE_NAMES
        if (sampler is makes_batches and name == "batch_size" and hasattr(sampler, name))
        or (type(getattr(sampler, name, None)) is int and getattr(sampler, name) == size)
    ]


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
            loader, _samples_of_first_batch, timeout_seconds=ReadingPolicy().sample_seconds
        )
    # A user's loader may raise any error, in a worker or when it is copied.
    except Exception as error:
        raise ValueError(
            f"the batches of {name} must follow its batch size, but none could be made before the"
            f" training to count its samples: {type(error).__name__}: {error}"
        ) from error
    check_count(loader, count)


def _samples_of_first_batch(loader: DataLoader[Any]) -> int:
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
