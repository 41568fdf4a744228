"""Memory that processes share, and places in open files: restored after another process used them.

A worker has a copy of everything else.
"""

from __future__ import annotations

import ctypes
import io
import math
import mmap
import os
import re
import shutil
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_batchmem.batches.reached import reached_from
from lightning_batchmem.devices.tensors import plain_tensors

# More bytes are not copied.
_LARGEST_BYTES = 256 * 2**20

# So many objects are searched for such memory. It is near the data set itself.
_MOST_OBJECTS = 100_000

# Where torch puts the tensors that processes send each other.
# Source: shm_open(3); the strategies of torch.multiprocessing, 2.5.1 to 2.14
_WORKERS_SHARE = "/dev/shm"  # noqa: S108

# The last class is that of all data of ctypes, which has no public name.
BUFFERS = (bytearray, array, mmap.mmap, memoryview, ctypes.c_int.__mro__[2])


def free_shared_bytes() -> float:
    """Bytes that are free where loader workers put their batches.

    They are ``inf`` without a limit. Docker limits this memory to 64 MiB unless ``--shm-size`` is
    passed.
    """
    try:
        usage = shutil.disk_usage(_WORKERS_SHARE)
    except OSError:
        # Not Linux, which has other limits there.
        return math.inf
    # A tmpfs without a limit has no size. Source: the option size in tmpfs(5)
    return usage.free if usage.total else math.inf


class RestoredMemory:
    """What an object has in memory that processes share is as before when this is left.

    Places in open files are restored too, since a worker shares them.

    Args:
        value: the object.
        name: its name in a warning.
    """

    def __init__(self, value: Any, name: str) -> None:
        self._descriptors: list[int] = []
        ranges: dict[tuple[int, int], None] = {}
        for part in reached_from(value, most=_MOST_OBJECTS):
            ranges.update(dict.fromkeys(memory_of(part)))
            if issubclass(type(part), io.FileIO) and not part.closed and part.seekable():
                self._descriptors.append(part.fileno())
        self._ranges = _shared(list(ranges)) if ranges else []
        total_bytes = sum(size for _, size in self._ranges)
        if total_bytes > _LARGEST_BYTES:
            self._ranges = []
            rank_zero_warn(
                f"The {name} has {total_bytes:,} bytes in memory that processes share. Changes that"
                " the search makes there are not undone."
            )
        self._saved: list[bytes] = []
        self._places: list[int] = []

    def __enter__(self) -> None:
        self._saved = [ctypes.string_at(address, size) for address, size in self._ranges]
        self._places = [os.lseek(one, 0, os.SEEK_CUR) for one in self._descriptors]

    def __exit__(self, *_: object) -> None:
        write_back(self._ranges, self._saved)
        for descriptor, place in zip(self._descriptors, self._places, strict=True):
            # What was read may have closed the file.
            with suppress(OSError):
                os.lseek(descriptor, place, os.SEEK_SET)
        self._saved = []


def write_back(ranges: list[tuple[int, int]], saved: list[bytes]) -> None:
    """Write saved bytes to their addresses."""
    for (address, size), contents in zip(ranges, saved, strict=True):
        # Pages that have not changed are not written.
        if ctypes.string_at(address, size) != contents:
            ctypes.memmove(address, contents, size)


def memory_of(value: Any) -> list[tuple[int, int]]:
    """Addresses of the memory of an object, each with a number of bytes."""
    kind = type(value)
    if issubclass(kind, Tensor):
        strided = [part for part in plain_tensors(value) if part.layout is torch.strided]
        storages = [part.untyped_storage() for part in strided if part.device.type == "cpu"]
        return [(storage.data_ptr(), storage.nbytes()) for storage in storages if storage.nbytes()]
    if issubclass(kind, BUFFERS):
        # A closed or empty buffer has no address, and one that is read-only does not change.
        with suppress(ValueError, TypeError, BufferError):
            view = memoryview(value)
            # What a pointer leads to may be gone later. Names of fields are between colons.
            has_pointers = re.search("[OPXZz&]", re.sub(":[^:]*:", "", view.format))
            if not (view.readonly or has_pointers) and view.contiguous and view.nbytes:
                address = ctypes.addressof((ctypes.c_char * view.nbytes).from_buffer(value))
                return [(address, view.nbytes)]
    return []


def _shared(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those in memory that can be written, and whose changes other processes see."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        # Not Linux, where no search starts a worker by fork.
        return []
    maps = [line.split(maxsplit=2)[:2] for line in lines]
    shared = [
        tuple(int(end, 16) for end in addresses.split("-"))
        for addresses, permissions in maps
        if permissions[1] == "w" and permissions[3] == "s"
    ]
    return [
        (address, size)
        for address, size in ranges
        if any(begin <= address and address + size <= end for begin, end in shared)
    ]
