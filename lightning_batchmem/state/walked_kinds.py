"""What a walk over attributes leaves out, and the kinds of objects that it tells apart."""

from __future__ import annotations

import ctypes
import io
import logging
import math
import mmap
import random
import re
import socket
import threading
import types
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.heap import BufferWrapper
from multiprocessing.managers import BaseProxy
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Semaphore
from subprocess import Popen
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

LARGEST_COPIED_BYTES = 64 * 2**20
"""Memory of the project above this is data rather than state, and is not copied."""

# The last class is that of all data of ctypes, which has no public name.
_BUFFERS = (bytearray, array, mmap.mmap, memoryview, ctypes.c_int.__mro__[2])


def memory_bytes(value: Any) -> int:
    """Return the size of memory that is not an object of Python; 0 for any other object."""
    return len(_memory_of(value)) if isinstance(value, _BUFFERS) else 0


def _memory_of(buffer: Any) -> memoryview:
    """The bytes of a buffer, which may be written; none where there is nothing to restore."""
    # A closed buffer has no memory, and one that is read-only does not change.
    with suppress(ValueError, TypeError, BufferError):
        view = memoryview(buffer)
        # What a pointer leads to may be gone later. Names of fields are between colons.
        has_pointers = re.search("[OPXZz&]", re.sub(":[^:]*:", "", view.format))
        if not (view.readonly or has_pointers):
            return view.cast("B")
    return memoryview(b"")


def restore_of(value: Any) -> Callable[[], object] | None:
    """Return a function that restores what an object keeps outside of its attributes.

    It returns None where there is nothing that can be restored.
    """
    if isinstance(value, (random.Random, io.BytesIO, io.StringIO)):
        return partial(_set_state, value, value.__getstate__())
    # The two have the same methods with other types.
    generator: Any = value
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return partial(generator.set_state, generator.get_state())
    if isinstance(value, np.random.BitGenerator):
        return partial(setattr, value, "state", value.state)
    if isinstance(value, np.random.SeedSequence):
        # It counts its children. The attribute cannot be set, but pickle can.
        return partial(value.__setstate__, value.__reduce__()[2])  # type: ignore[attr-defined]
    # The place in a file. One that can be written has other contents after a step.
    if isinstance(value, io.IOBase) and value.seekable() and not value.writable():
        return partial(value.seek, value.tell())
    if isinstance(value, (bytearray, array)):
        return partial(value.__setitem__, slice(None), value[:])
    if isinstance(value, _BUFFERS):
        return partial(_restore_memory, value, bytes(_memory_of(value)))
    return None


def _set_state(value: Any, state: Any) -> None:
    # The bytes of an unchanged file are the same object, and are not written again.
    if value.__getstate__() != state:
        value.__setstate__(state)


def _restore_memory(buffer: Any, saved: bytes) -> str | None:
    # No view is kept, since a buffer with one cannot be closed.
    view = _memory_of(buffer)
    # A step may have closed or resized it.
    if len(view) != len(saved):
        return "its size"
    # Pages that have not changed are not written.
    if bytes(view) != saved:
        view[:] = saved
    return None


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
)

_LOCKS = (type(threading.Lock()), type(threading.RLock()))


@dataclass(frozen=True)
class WalkLimits:
    """What a walk leaves out.

    Attributes:
        most_objects: the walk goes breadth first, and ends after this many objects.
        most_items: containers with more items stay as they are.
        most_entered: what the items of containers with more of them lead to stays as it is.
        most_bytes: tensors and arrays are restored as long as all of them have no more bytes.
        names_data: whether what is left out because it is data is named.
        left_with: an object with one of these as an attribute stays as it is.
    """

    most_objects: int
    most_items: float
    most_entered: float
    most_bytes: float
    names_data: bool
    left_with: tuple[type, ...]


# So many objects take about a second. An object with a lock or a file may be a client of a service
# or a writer, whose counters belong to what was sent or written.
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

NUMPY_RANDOM = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)

ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)

CONTAINERS = (dict, types.MappingProxyType, list, deque, set, tuple, frozenset)


def defines(value: object, name: str) -> bool:
    """Whether the class of an object has a method. Asking a mock for it would make a new one."""
    return any(name in vars(kind) for kind in type(value).__mro__)


def key_text(key: object) -> str:
    """A key of a dict as a part of a path."""
    return repr(key)[:40] if issubclass(type(key), ATOMS) else type(key).__name__
