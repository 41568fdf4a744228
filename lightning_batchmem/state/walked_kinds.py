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

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

# A larger tensor or array that is neither parameter nor buffer is data rather than state, and is
# not copied.
LARGEST_ARRAY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class WalkLimits:
    """What a walk leaves out because it is data.

    Attributes:
        most_objects: the walk goes breadth first, and ends after this many objects.
        most_items: containers with more items stay as they are.
        most_bytes: tensors and arrays are restored as long as all of them have no more bytes.
        are_named: whether what is left out is named.
    """

    most_objects: int
    most_items: float
    most_bytes: float
    are_named: bool


# So many objects take about a second.
OF_PROJECT = WalkLimits(200_000, math.inf, math.inf, are_named=True)

# Most data sets have samples that no step changes, so that a warning would be one for each project.
# Source: chosen; the attributes and counters of a data set are fewer, and its samples are more.
OF_DATA = WalkLimits(20_000, 10_000, LARGEST_ARRAY_BYTES, are_named=False)

DATA = (Dataset, DataLoader)

# Objects of these types do not belong to the module.
NOT_WALKED = (np.memmap, logging.Logger, type, types.ModuleType, types.FunctionType)

# A method leads to its object, and a function of a C extension to its module.
METHODS = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)

# An object with one of these as an attribute works with a thread, a file or another process.
LIVE_RESOURCES = (
    io.IOBase,
    socket.socket,
    threading.Thread,
    type(threading.Lock()),
    type(threading.RLock()),
)

ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)

CONTAINERS = (dict, types.MappingProxyType, list, deque, set, tuple, frozenset, bytearray)


def defines(value: object, name: str) -> bool:
    """Whether the class of an object has a method. Asking a mock for it would make a new one."""
    return any(name in vars(kind) for kind in type(value).__mro__)


def key_text(key: object) -> str:
    """A key of a dict as a part of a path."""
    return repr(key)[:40] if issubclass(type(key), ATOMS) else type(key).__name__
