"""The heap of the C library: free blocks are returned, or set aside."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

# A new block of at least 32 MiB is mapped if no hole can take it, and is unmapped when it is freed,
# so it leaves no hole. Source: DEFAULT_MMAP_THRESHOLD_MAX on 64-bit systems in mallopt(3)
_MAPPED_BYTES = 2**25

# Holes are filled with blocks of these sizes, from 32 MiB to 64 KiB. Holes below 64 KiB stay, for
# the small objects of Python and of libraries, which would otherwise let the heap grow.
_BLOCK_BYTES = tuple(_MAPPED_BYTES // 2**power for power in range(10))


class _HeapUse(ctypes.Structure):
    """The C library's ``struct mallinfo2``. Source: mallinfo(3)."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


@functools.cache
def c_library() -> Any:
    """Return the C library if it has ``malloc_trim``; glibc from 2.33 on also has ``mallinfo2``."""
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _HeapUse
        library.malloc.restype = ctypes.c_void_p
        library.malloc.argtypes = [ctypes.c_size_t]
        library.free.argtypes = [ctypes.c_void_p]
        library.sbrk.restype = ctypes.c_void_p
        library.sbrk.argtypes = [ctypes.c_ssize_t]
    return library if hasattr(library, "malloc_trim") else None


def may_lie_in_heap(block_bytes: int) -> bool:
    """Whether a block of this size may be a part of the heap, which then has to have room for it.

    The C libraries of other systems map much smaller blocks.
    """
    return block_bytes < _MAPPED_BYTES and c_library() is not None


def return_free_blocks() -> None:
    """Return the whole pages of free blocks to the kernel. Source: malloc_trim(3)."""
    if (library := c_library()) is not None:
        library.malloc_trim(0)


def set_holes_aside() -> None:
    """Allocate the free blocks inside the heap, and never free them.

    They are not written, so they take addresses but no memory. Otherwise the blocks of later batch
    sizes would scatter over the holes that earlier ones left, and hold more memory than in a new
    process. Without ``mallinfo2`` nothing happens.
    """
    library = c_library()
    if not hasattr(library, "mallinfo2"):
        return
    use = library.mallinfo2()
    # The free memory at the end of the heap is no hole.
    hole_bytes = use.fordblks - use.keepcost
    end_address = library.sbrk(0) - use.keepcost
    for block_bytes in _BLOCK_BYTES:
        while block_bytes <= hole_bytes:
            address = library.malloc(block_bytes)
            if address is None:
                return
            # A block before the end is from a hole. Only other blocks are looked at further,
            # because mallinfo2 walks through all free blocks; a thread has a heap of its own.
            if address >= end_address:
                after = library.mallinfo2()
                is_mapped = after.hblks != use.hblks
                if is_mapped or after.arena != use.arena or after.keepcost != use.keepcost:
                    # A mapped block stays, because freeing it would raise the threshold of mapping.
                    # Source: the note on M_MMAP_THRESHOLD in mallopt(3)
                    if not is_mapped:
                        library.free(address)
                    use = library.mallinfo2()
                    break
            hole_bytes -= block_bytes
