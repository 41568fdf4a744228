"""What a walk over attributes leaves out, and the kinds of objects that it tells apart."""

from __future__ import annotations

import io
import logging
import math
import socket
import threading
import types
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.heap import BufferWrapper
from multiprocessing.managers import BaseProxy
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Semaphore
from subprocess import Popen

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

# A larger tensor or array that is neither parameter nor buffer is data rather than state, and is
# not copied.
LARGEST_ARRAY_BYTES = 64 * 2**20

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
        most_bytes: tensors and arrays are restored as long as all of them have no more bytes.
        names_data: whether what is left out because it is data is named.
        left_with: an object with one of these as an attribute stays as it is.
    """

    most_objects: int
    most_items: float
    most_bytes: float
    names_data: bool
    left_with: tuple[type, ...]


# So many objects take about a second. An object with a lock or a file may be a client of a service
# or a writer, whose counters belong to what was sent or written.
OF_PROJECT = WalkLimits(
    200_000,
    math.inf,
    math.inf,
    names_data=True,
    left_with=(*LIVE_RESOURCES, *_LOCKS, io.IOBase),
)

# Most data sets have samples that no step changes, so that a warning would be one for each project.
# Source: chosen; the attributes and counters of a data set are fewer, and its samples are more.
OF_DATA = WalkLimits(20_000, 10_000, LARGEST_ARRAY_BYTES, names_data=False, left_with=_OF_THREADS)

DATA = (Dataset, DataLoader)

# Objects of these types do not belong to the module. The last one leads to the shared values of
# everybody.
NOT_WALKED = (
    np.memmap,
    logging.Logger,
    type,
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
