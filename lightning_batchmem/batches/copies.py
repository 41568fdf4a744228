"""Copies of a user's objects, which end nothing that the objects themselves still need."""

from __future__ import annotations

import copy
import io
import mmap
import sys
import threading
import types
import weakref
from collections import deque
from multiprocessing.sharedctypes import SynchronizedBase
from multiprocessing.synchronize import SemLock
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_batchmem.batches.reached import reached_from

LARGEST_COPIED_BYTES = 64 * 2**20
"""Memory of the project above this is data rather than state, and is not copied."""

# Objects of these types have a finalizer too, but they cannot be copied in any case.
_NEVER_COPIED = (io.IOBase, types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)

# Such an object has contents besides its attributes.
_CONTAINERS = (dict, list, set, deque, bytearray)

# Processes inherit these and refuse to copy them. Their memory is restored: `shared_memory.py`.
_OF_PROCESSES = (SynchronizedBase, SemLock, mmap.mmap)

# These have no state that a reader leaves changed, or their memory is restored too.
_SILENT = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Event,
    threading.Semaphore,
    threading.BoundedSemaphore,
    types.ModuleType,
    types.MappingProxyType,
    memoryview,
)


def _is_of_library(kind: type) -> bool:
    """Whether a class is one of Python's own, such as a thread or a queue, which others may use."""
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names


def warn_of_no_copy(name: str) -> None:
    """Warn that a search changes a part of a loader, because it cannot be copied."""
    rank_zero_warn(
        f"The {name} cannot be copied. Changes that the search makes in it are not undone."
    )


def has_finalizer(value: object) -> bool:
    """Whether code runs when the object is dropped, which may remove a directory or close a file.

    A copy that is dropped would run it too.
    """
    kind = type(value)
    if hasattr(kind, "__del__"):
        return not issubclass(kind, _NEVER_COPIED)
    references = weakref.getweakrefs(value) if kind.__weakrefoffset__ else ()
    # A proxy would answer for the object.
    callbacks = [one.__callback__ for one in references if issubclass(type(one), weakref.ref)]
    return any(isinstance(callback, weakref.finalize) for callback in callbacks)


class Copies:
    """Deep copies that share tensors on a device, which may have no room for both.

    Objects with a finalizer are not copied, and neither are those that refuse it in ``copy_parts``.
    While this object is entered, they have copies of their attributes, and afterwards those that
    they had before.

    Args:
        memo: the copies that exist already, as for ``copy.deepcopy``.
    """

    def __init__(self, memo: dict[int, Any] | None = None) -> None:
        self.memo = {} if memo is None else memo
        # Each object that is not copied, and the attributes that it does not have at the moment.
        self._owners: list[tuple[Any, dict[str, Any]]] = []

    @property
    def has_exchanges(self) -> bool:
        """Whether attributes are exchanged, so that this object has to be entered."""
        return bool(self._owners)

    def copy(self, value: Any) -> Any:
        """A deep copy; an object with a finalizer is returned itself."""
        reached = list(reached_from(value, self.memo))
        owners = [one for one in reached if has_finalizer(one)]
        of_processes = [one for one in reached if issubclass(type(one), _OF_PROCESSES)]
        self.memo |= {id(one): one for one in owners + of_processes}
        copied = self._deep_copy(value)
        for owner in owners:
            self.use_in_place(owner)
        return copied

    def copy_parts(self, value: Any, name: str) -> Any:
        """A copy; what refuses to be copied is shared, and only what it leads to is copied.

        Args:
            value: any object.
            name: its name in a warning.
        """
        known = dict(self.memo)
        num_owners = len(self._owners)
        try:
            return self._copy_or_share(value, name)
        # Its parts are nested more deeply than Python can call functions.
        except RecursionError:
            self._forget(known)
            del self._owners[num_owners:]
            self.memo[id(value)] = value
            warn_of_no_copy(name)
            return value

    def _forget(self, known: dict[int, Any]) -> None:
        """Forget copies of which some are not complete."""
        self.memo.clear()
        self.memo.update(known)

    def _copy_or_share(self, value: Any, name: str) -> Any:
        known = dict(self.memo)
        try:
            return self.copy(value)
        # Each part would be tried too.
        except RecursionError:
            raise
        # A user's object may refuse to be copied in any way.
        except Exception:  # noqa: BLE001
            self._forget(known)
        kind = type(value)
        if kind is dict:
            self.memo[id(value)] = parts = {}
            parts.update({key: self.copy_parts(item, name) for key, item in value.items()})
            return parts
        if kind is list:
            items: list[Any] = []
            self.memo[id(value)] = items
            items.extend(self.copy_parts(item, name) for item in value)
            return items
        if kind is tuple:
            return tuple([self.copy_parts(item, name) for item in value])
        if hasattr(value, "__dict__") and not _is_of_library(kind):
            self.use_in_place(value)
        # Nobody sees it change.
        elif kind not in _SILENT:
            warn_of_no_copy(name)
        return value

    def use_in_place(self, owner: Any) -> None:
        """Let an object have copies of its attributes while this object is entered."""
        self.memo[id(owner)] = owner
        attributes = getattr(owner, "__dict__", None)
        name = type(owner).__name__
        if attributes is None or isinstance(owner, _CONTAINERS):
            warn_of_no_copy(f"{name}, which has a finalizer,")
        copies = {
            attribute: self.copy_parts(value, f"{attribute!r} of {name}")
            for attribute, value in (attributes or {}).items()
        }
        if attributes is not None:
            self._owners.append((owner, copies))

    def __enter__(self) -> None:
        self._exchange()

    def __exit__(self, *_: object) -> None:
        self._exchange()

    def _exchange(self) -> None:
        for index, (owner, others) in enumerate(self._owners):
            # A class may refuse to set its attributes, but the dictionary does not.
            attributes = vars(owner)
            self._owners[index] = owner, dict(attributes)
            # The finalizer may run at any time, and never without its attributes.
            attributes.update(others)
            for name in attributes.keys() - others.keys():
                del attributes[name]

    def _deep_copy(self, value: Any) -> Any:
        with _SharedOnDevice():
            return copy.deepcopy(value, self.memo)


class _SharedOnDevice(TorchFunctionMode):
    """Deep copies in the body share the tensors that do not lie on the host."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and args[0].device.type != "cpu":
            return args[0]
        return func(*args, **(kwargs or {}))
