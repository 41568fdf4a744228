"""Copies of collate functions, so that a search does not change the state of the project's own."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.nn import Module
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from lightning_batchmem.batches.samples import copy_or_warn

# What is larger is data rather than state, and its items are not copied.
_MOST_ITEMS = 10_000
_LARGEST_BYTES = 64 * 2**20


def copied_collate(collate: Callable[[Any], Any], restored: Iterable[object]) -> Any:
    """A copy of ``collate``; that of a method has a copy of the method's object.

    Args:
        collate: the collate function of a loader.
        restored: objects whose state is restored after the search, so they are not copied.
    """
    if not isinstance(collate, types.MethodType):
        return copy_or_warn(collate, "collate_fn")
    owner = collate.__self__
    memo = {id(value): value for value in restored}
    if isinstance(owner, Module | type) or id(owner) in memo:
        return collate
    # An object with slots has no such dictionary, and no data set either.
    attributes = dict(getattr(owner, "__dict__", {}))
    if not attributes:
        return copy_or_warn(collate, "collate_fn")
    new_owner = copy.copy(owner)
    memo[id(owner)] = new_owner
    for value in attributes.values():
        if isinstance(value, Module | Dataset):
            memo[id(value)] = value
        elif is_large(value):
            # A new container of the same items is quick to make, and takes little memory.
            is_container = isinstance(value, list | dict | set)
            memo[id(value)] = copy.copy(value) if is_container else value
    # A DataLoader refuses some of its attributes, but its dictionary does not.
    for name, value in attributes.items():
        vars(new_owner)[name] = copy_or_warn(value, f"{name!r} of the object of collate_fn", memo)
    return types.MethodType(collate.__func__, new_owner)


def is_large(value: object) -> bool:
    """Whether a value is data rather than state, by its bytes or the number of its items."""
    if isinstance(value, str | bytes):
        return False
    if (sized_len(value) or 0) > _MOST_ITEMS and not hasattr(value, "nbytes"):
        return True
    leaves = tree_leaves(value)
    # Any attribute of a mock is another mock.
    sizes_bytes = [getattr(leaf, "nbytes", 0) for leaf in leaves]
    size_bytes = sum(int(size) for size in sizes_bytes if isinstance(size, Integral))
    return len(leaves) > _MOST_ITEMS or size_bytes > _LARGEST_BYTES
