"""Objects that keep something outside of Python's attributes, restored in place."""

from __future__ import annotations

import ctypes
import io
import random
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from lightning_batchmem.batches.shared_memory import BUFFERS, memory_of, write_back


def memory_bytes(value: Any) -> int:
    """Return the size of memory that is not an object of Python; 0 for any other object."""
    return sum(size for _, size in memory_of(value)) if isinstance(value, BUFFERS) else 0


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
    if isinstance(value, BUFFERS):
        saved = [ctypes.string_at(*one) for one in memory_of(value)]
        return partial(_restore_memory, value, saved)
    return None


def _set_state(value: Any, state: Any) -> None:
    # The bytes of an unchanged file are the same object, and are not written again.
    if value.__getstate__() != state:
        value.__setstate__(state)


def _restore_memory(value: Any, saved: list[bytes]) -> str | None:
    ranges = memory_of(value)
    # A step may have closed or resized it.
    if [size for _, size in ranges] != [*map(len, saved)]:
        return "its size"
    write_back(ranges, saved)
    return None
