"""The heap of the C library: free blocks are returned, or set aside."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

if sys.platform != "win32":
    pass


# On 64-bit systems, glibc maps new blocks that are larger than this, so they leave no holes.
# Source: DEFAULT_MMAP_THRESHOLD_MAX in mallopt(3)
_LARGEST_HOLE_BYTES = 2**25


_SMALLEST_HOLE_BYTES = 2**16


class _HeapUse(ctypes.Structure):
    """The C library's ``struct mallinfo2``. Source: mallinfo(3)."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


@functools.cache
def c_library() -> Any:
    """The C library where it has ``malloc_trim``; glibc from 2.33 on also has ``mallinfo2``."""
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _HeapUse
        library.malloc.restype = ctypes.c_void_p
        library.malloc.argtypes = [ctypes.c_size_t]
        library.free.argtypes = [ctypes.c_void_p]
    return library if hasattr(library, "malloc_trim") else None


def set_holes_aside(library: Any) -> None:
    """Allocate the free blocks inside the heap, and never free them.

    They are not written, so they take addresses but no memory. Otherwise the blocks of later batch
    sizes would scatter over the holes that earlier ones left, and hold more memory than in a new
    process.
    """
    size = _LARGEST_HOLE_BYTES
    while size >= _SMALLEST_HOLE_BYTES:
        before = library.mallinfo2()
        hole_bytes = before.fordblks - before.keepcost
        if size <= hole_bytes and (block := library.malloc(size)) is not None:
            after = library.mallinfo2()
            is_from_hole = (
                after.arena == before.arena
                and after.hblks == before.hblks
                and after.keepcost == before.keepcost
            )
            # Another hole may be as large as this one.
            if is_from_hole:
                continue
            # A mapped block stays, because freeing it would raise the threshold of mapping.
            if after.hblks == before.hblks:
                library.free(block)
        size //= 2
