"""Copies of collate functions, so that a search does not change the state of the project's own."""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.nn import Module
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from lightning_batchmem.batches.copies import Copies, has_finalizer, warn_of_no_copy
from lightning_batchmem.batches.shared_memory import RestoredMemory

# What is larger is data rather than state, and its items are not copied.
_MOST_ITEMS = 10_000
_LARGEST_BYTES = 64 * 2**20


def copied_collate(collate: Callable[[Any], Any], restored: Mapping[int, object]) -> Any:
    """A copy of ``collate``; that of a method has a copy of the method's object.

    What cannot be copied is shared. A warning says so once it has changed.

    Args:
        collate: the collate function of a loader.
        restored: objects whose state is restored after the search, by their ids. They are not
            copied.
    """
    copies = Copies(dict(restored))
    shared: list[_Shared] = []
    copied = _copied_callable(collate, copies, shared)
    memory = RestoredMemory(copied, "collate_fn", copies.left_alone)
    is_plain = not (shared or copies.has_exchanges or memory.is_needed)
    return copied if is_plain else _WatchedCollate(copied, shared, copies, memory)


@dataclass
class _WatchedCollate:
    """A collate function of which some parts are those of the project.

    They are restored after each call, or a warning says once that one has changed.
    """

    collate: Callable[[Any], Any]
    shared: list[_Shared]
    copies: Copies
    memory: RestoredMemory

    def __call__(self, samples: Any) -> Any:
        with self.memory, self.copies:
            batch = self.collate(samples)
        changed = [part for part in self.shared if part.has_changed]
        for part in changed:
            self.shared.remove(part)
            warn_of_no_copy(part.name)
        return batch


class _Shared:
    """A part of a collate function that cannot be copied.

    Args:
        name: its name in a warning.
        value: the part.
    """

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self._value = value
        # These references keep the contents alive, so that no id is used twice.
        self._contents = _contents_of(value)

    @property
    def has_changed(self) -> bool:
        """Whether it has other attributes or items than at the start."""
        return list(map(id, _contents_of(self._value))) != list(map(id, self._contents))


def _contents_of(value: Any) -> list[Any]:
    """The values of the attributes of an object, and its items if it is a container."""
    attributes = getattr(value, "__dict__", {})
    items = list(value) if isinstance(value, list | dict | set | deque) else []
    entries = list(value.values()) if isinstance(value, dict) else []
    return [*attributes.values(), *items, *entries]


def _copied_callable(collate: Any, copies: Copies, shared: list[_Shared]) -> Any:
    memo = copies.memo
    if isinstance(collate, partial):
        function = _copied_callable(collate.func, copies, shared)
        arguments = _copied_part(collate.args, "arguments of collate_fn", copies, shared)
        keywords = _copied_part(collate.keywords, "arguments of collate_fn", copies, shared)
        return partial(function, *arguments, **keywords)
    owner = getattr(collate, "__self__", None)
    # An object with slots has no such dictionary, and no data set either.
    attributes = dict(getattr(owner, "__dict__", {}))
    if not isinstance(collate, types.MethodType) or not attributes:
        return _copied_part(collate, "collate_fn", copies, shared)
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
        vars(new_owner)[name] = _copied_part(value, part, copies, shared)
    return types.MethodType(collate.__func__, new_owner)


def _copied_part(value: Any, name: str, copies: Copies, shared: list[_Shared]) -> Any:
    """A copy of a part, or the part itself, which is then in ``shared``."""
    try:
        return copies.copy(value)
    # A user's object may refuse to be copied in any way.
    except Exception:  # noqa: BLE001
        # Nobody sees an iterator change.
        if isinstance(value, Iterator):
            warn_of_no_copy(name)
        else:
            shared.append(_Shared(name, value))
        return value


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
    return len(leaves) > _MOST_ITEMS or size_bytes > _LARGEST_BYTES
