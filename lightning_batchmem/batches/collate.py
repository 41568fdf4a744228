"""How samples become batches in a search: copies of collate functions, and of data sets.

Only data sets whose ``__getitems__`` returns a batch join samples themselves.
"""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.nn import Module

# The name is private in torch 2.5.1 to 2.14.
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from lightning_batchmem.batches.batch_sampler import SingleSamples
from lightning_batchmem.batches.copies import LARGEST_COPIED_BYTES, Copies, has_finalizer
from lightning_batchmem.batches.isolated import read_isolated
from lightning_batchmem.batches.shared_memory import RestoredMemory
from lightning_batchmem.devices.tensors import copied
from lightning_batchmem.plan.policy import ReadingPolicy

# What has more items is data rather than state, and they are not copied.
_MOST_ITEMS = 10_000


def copied_collate(collate: Callable[[Any], Any], restored: Mapping[int, object]) -> Any:
    """A copy of ``collate``; that of a method has a copy of the method's object.

    What cannot be copied is shared. It has its attributes again after each call, or a warning says
    that its changes are not undone.

    Args:
        collate: the collate function of a loader.
        restored: objects whose state is restored after the search, by their ids. They are not
            copied.
    """
    copies = Copies(dict(restored))
    copied = _copied_callable(collate, copies)
    memory = RestoredMemory(copied, "collate_fn", copies.left_alone)
    is_plain = not (copies.has_exchanges or memory.is_needed)
    return copied if is_plain else _RestoredCollate(copied, copies, memory)


@dataclass
class _RestoredCollate:
    """A collate function of which some parts are those of the project, restored after each call."""

    collate: Callable[[Any], Any]
    copies: Copies
    memory: RestoredMemory

    def __call__(self, samples: Any) -> Any:
        with self.memory, self.copies:
            return self.collate(samples)


def _copied_callable(collate: Any, copies: Copies) -> Any:
    memo = copies.memo
    if isinstance(collate, partial):
        function = _copied_callable(collate.func, copies)
        arguments = copies.copy_parts(collate.args, "arguments of collate_fn")
        keywords = copies.copy_parts(collate.keywords, "arguments of collate_fn")
        return partial(function, *arguments, **keywords)
    owner = getattr(collate, "__self__", None)
    # An object with slots has no such dictionary, and no data set either.
    attributes = dict(getattr(owner, "__dict__", {}))
    if not isinstance(collate, types.MethodType) or not attributes:
        return copies.copy_parts(collate, "collate_fn")
    if isinstance(owner, Module | type) or id(owner) in memo:
        return collate
    for value in attributes.values():
        if isinstance(value, Module | Dataset):
            memo[id(value)] = value
        elif is_large(value):
            # A new container of the same items is quick to make, and takes little memory.
            is_container = isinstance(value, list | dict | set)
            memo[id(value)] = copy.copy(value) if is_container else value
    if has_finalizer(owner):
        copies.use_in_place(owner)
        return collate
    new_owner = copy.copy(owner)
    memo[id(owner)] = new_owner
    # A DataLoader refuses some of its attributes, but its dictionary does not.
    for name, value in attributes.items():
        part = f"{name!r} of the object of collate_fn"
        vars(new_owner)[name] = copies.copy_parts(value, part)
    return types.MethodType(collate.__func__, new_owner)


def is_large(value: object) -> bool:
    """Whether a value is data rather than state, by its bytes or the number of its items."""
    if isinstance(value, str | bytes):
        return False
    if (sized_len(value) or 0) > _MOST_ITEMS and not hasattr(value, "nbytes"):
        return True
    try:
        leaves = tree_leaves(value)
    # Containers contain themselves, or are nested more deeply than Python can call functions.
    except RecursionError:
        return True
    # Any attribute of a mock is another mock.
    sizes_bytes = [getattr(leaf, "nbytes", 0) for leaf in leaves]
    size_bytes = sum(int(size) for size in sizes_bytes if isinstance(size, Integral))
    return len(leaves) > _MOST_ITEMS or size_bytes > LARGEST_COPIED_BYTES


@dataclass(frozen=True)
class FetchedSample:
    """A batch of one sample, and the index with which the data set makes it again."""

    index: Any
    batch: Any


@dataclass(eq=False)
class FetchedSamples(SingleSamples):
    """Single samples of a data set that fetches a batch at once.

    Where it returns a list of samples, as most of them do, they are those samples.
    """

    returns_lists: bool | None = None

    def __getitem__(self, index: Any) -> Any:
        if self.returns_lists is None:
            # A list may also be a batch, whose length does not depend on the number of samples.
            counts = (2, 3)
            lists = [self.batched.__getitems__([index] * count) for count in counts]
            self.returns_lists = all(
                isinstance(fetched, list) and len(fetched) == count
                for fetched, count in zip(lists, counts, strict=True)
            )
        fetched = self.batched.__getitems__([index])
        return fetched[0] if self.returns_lists else FetchedSample(index, fetched)


@dataclass
class FetchedCollate:
    """The collate function of a project, which gets batches that the data set has joined.

    The last batch is kept, because the steps of a trial have the same one.
    """

    loader: DataLoader[Any]
    collate: Callable[[Any], Any]
    last_indices: bytes | None = None
    last_batch: Any = None

    def __call__(self, samples: Sequence[Any]) -> Any:
        if not isinstance(samples[0], FetchedSample):
            return self.collate(samples)
        if len(samples) == 1:
            return self.collate(samples[0].batch)
        indices = [sample.index for sample in samples]
        key = _comparable(indices)
        if key is None or key != self.last_indices:
            # The last batch would take memory beside the next one.
            self.last_indices = self.last_batch = None
            # The samples of a batch may each take as long as the policy allows one.
            seconds = ReadingPolicy().sample_seconds * len(samples)
            fetch = partial(_fetched, indices=indices)
            self.last_batch = read_isolated(self.loader, fetch, timeout_seconds=seconds)
            self.last_indices = key
        # A collate function, or a step, may write to its batch. The kept one is no live memory of a
        # training.
        with _disable_current_modes():
            batch = copied(self.last_batch)
        return self.collate(batch)


def _comparable(indices: list[Any]) -> bytes | None:
    try:
        return pickle.dumps(indices)
    # Those of a user's sampler may refuse it in any way. Their batch is read again in each step.
    except Exception:  # noqa: BLE001
        return None


def fetched_samples(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader, or a view of it that reads single samples where its data set fetches batches."""
    fetches = callable(getattr(loader.dataset, "__getitems__", None))
    if loader.batch_sampler is None or not fetches or isinstance(loader.dataset, SingleSamples):
        return loader
    view = copy.copy(loader)
    # DataLoader.__setattr__ raises an error for this attribute (torch 2.5.1 to 2.14).
    vars(view)["dataset"] = FetchedSamples(loader.dataset)
    return view


def _fetched(loader: DataLoader[Any], indices: list[Any]) -> Any:
    dataset: Any = loader.dataset
    return dataset.__getitems__(indices)
