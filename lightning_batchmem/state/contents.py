"""What a walk over attributes leaves out, and how contents of objects are restored in place."""

from __future__ import annotations

import io
import logging
import math
import mmap
import random
import socket
import threading
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.heap import BufferWrapper
from multiprocessing.managers import BaseProxy
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import SynchronizedBase
from multiprocessing.synchronize import Semaphore
from operator import is_
from subprocess import Popen
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

LARGEST_COPIED_BYTES = 64 * 2**20
"""Memory of the project above this is data rather than state, and is not copied."""

# What has one of these works together with a thread or a process, which would see its attributes
# change.
_OF_THREADS = (threading.Thread, threading.Condition, Connection)

# Another thread or process has a part in these.
LIVE_RESOURCES = (
    *_OF_THREADS,
    socket.socket,
    BaseProcess,
    BaseProxy,
    Popen,
    # This is the flag of an event of multiprocessing too, but not a lock.
    Semaphore,
    mmap.mmap,
)

_LOCKS = (type(threading.Lock()), type(threading.RLock()))


@dataclass(frozen=True)
class WalkLimits:
    """What a walk leaves out.

    Attributes:
        most_objects: the walk goes breadth first, and ends after this many objects.
        most_items: containers with more items stay as they are.
        most_entered: if a container has more items than this, the items are not walked.
        most_bytes: tensors and arrays are restored as long as all of them have no more bytes.
        names_data: whether a warning names data that are left out.
        left_with: an object with one of these as an attribute stays as it is.
    """

    most_objects: int
    most_items: float
    most_entered: float
    most_bytes: float
    names_data: bool
    left_with: tuple[type, ...]


# This many objects take about a second. An object with a lock or a file may be a client of a
# service or a writer, whose counters belong to what was sent or written.
OF_PROJECT = WalkLimits(
    200_000,
    math.inf,
    math.inf,
    math.inf,
    names_data=True,
    left_with=(*LIVE_RESOURCES, *_LOCKS, io.IOBase),
)

# Most data sets have samples that no step changes, so that a warning would be one for each project.
# Source: chosen; the attributes and counters of a data set are fewer, and its samples are more.
OF_DATA = WalkLimits(
    20_000, 10_000, 10_000, LARGEST_COPIED_BYTES, names_data=False, left_with=_OF_THREADS
)

# Callbacks, samplers and collate functions, which a step or a reader changes in place.
OF_PARTS = replace(OF_DATA, most_items=math.inf)

DATA = (Dataset, DataLoader)

# Objects of these types do not belong to the module. The last one leads to the shared values of
# everybody.
NOT_WALKED = (
    np.memmap,
    logging.Logger,
    type,
    # It gives the attributes of its class, as ``dict[str, int]`` gives those of ``dict``.
    types.GenericAlias,
    types.ModuleType,
    types.FunctionType,
    BufferWrapper,
)

# A method leads to its object, and a function of a C extension to its module.
METHODS = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)

ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)

CONTAINERS = (dict, types.MappingProxyType, list, deque, set, tuple, frozenset)


def defines(value: object, name: str) -> bool:
    """Whether the class of an object has a method. Asking a mock for it would make a new one."""
    return any(name in vars(kind) for kind in type(value).__mro__)


def key_text(key: object) -> str:
    """A key of a dict as a part of a path."""
    return repr(key)[:40] if issubclass(type(key), ATOMS) else type(key).__name__


def restore_of(value: Any) -> Callable[[], object] | None:
    """Return a function that restores what an object keeps outside of its attributes.

    It returns None where there is nothing that can be restored.
    """
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    # The two have the same methods with other types.
    generator: Any = value
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return partial(generator.set_state, generator.get_state())
    if isinstance(value, np.random.Generator):
        value = value.bit_generator
    if isinstance(value, np.random.BitGenerator):
        return partial(setattr, value, "state", value.state)
    # A data set may keep samples in a shared tensor, and here whether they are there.
    if isinstance(value, SynchronizedBase):
        memory = memoryview(value.get_obj()).cast("B")
        if memory.nbytes <= LARGEST_COPIED_BYTES:
            return partial(memory.__setitem__, slice(None), bytes(memory))
    # The place in a file. One that can be written has other contents after a step.
    if isinstance(value, io.IOBase) and value.seekable() and not value.writable():
        return partial(value.seek, value.tell())
    return None


def set_slot(value: object, name: str, item: object) -> None:
    """Set an attribute that is in a slot."""
    # A read-only slot has not changed, so it need not be set.
    if getattr(value, name, None) is not item:
        # The class may be a frozen dataclass.
        object.__setattr__(value, name, item)


def restore_object(value: Any, kind: type, attributes: Any, contents: dict[str, Any]) -> None:
    """Restore the class of an object, and the contents of its dictionary."""
    # A parametrization replaces the class of a module, and the other attributes depend on it.
    if type(value) is not kind:
        object.__setattr__(value, "__class__", kind)
    refill(attributes, contents)


def contents_of(container: Any) -> Any:
    """The contents of a container: a dict for a mapping, else a list."""
    kind = _plain_kind(container)
    if hasattr(kind, "items"):
        return dict(kind.items(container))
    return list(kind.__iter__(container))


def refill(container: Any, contents: Any) -> None:
    """Restore the contents of a list, deque, set or dict. Those of a set are a list."""
    # Unchanged containers are left alone, because another thread would see them empty for a moment.
    # A copy of a large one takes longer than the comparison.
    present = container if type(container) in (dict, list) else contents_of(container)
    if _are_same(present, contents):
        return
    kind = _plain_kind(container)
    if isinstance(container, set):
        # The order depends on the history of a set, and an empty one has lost it.
        before = set(map(id, contents))
        kind.difference_update(container, [item for item in present if id(item) not in before])
        kind.update(container, contents)
        return
    kind.clear(container)
    if isinstance(contents, dict):
        for key, item in contents.items():
            # The update of an OrderedDict calls a method of the user's class.
            kind.__setitem__(container, key, item)
    else:
        kind.extend(container, contents)


def _plain_kind(container: Any) -> Any:
    """The class of Python's own that a container has; a class of the user may do anything else."""
    kinds = type(container).__mro__
    return next(kind for kind in kinds if kind.__module__ in ("builtins", "collections"))


def _are_same(contents: Any, others: Any) -> bool:
    """Whether two lists or dicts have the same objects in the same order."""
    if len(contents) != len(others):
        return False
    if isinstance(contents, dict) and not all(map(is_, contents.values(), others.values())):
        return False
    return all(map(is_, contents, others))
