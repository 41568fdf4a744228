"""How samples become batches in a search: copies of collate functions."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.nn import Module
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from lightning_batchmem.batches.copies import LARGEST_COPIED_BYTES, Copies, has_finalizer

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
    return _copied_callable(collate, Copies(dict(restored)))


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
