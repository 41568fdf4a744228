"""glibc's heap: what is in its blocks, and giving the rest back. Elsewhere nothing is known or done."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


class _Mallinfo2(ctypes.Structure):
    # Source: mallinfo(3)
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def trim() -> None:
    """Hand free blocks back to the kernel; those below others in use stay mapped, without memory behind them.

    Setting M_MMAP_THRESHOLD would do it at once and for good, but it changes how the training that follows allocates.

    Source: malloc_trim(3).
    """
    if (malloc_trim := _in_libc("malloc_trim", ctypes.c_int, ctypes.c_size_t)) is not None:
        malloc_trim(0)


def in_use_bytes() -> int | None:
    """Bytes in blocks, of the heap and mapped on their own; ``None`` where nobody knows (not glibc, or before 2.33).

    Source: ``uordblks`` and ``hblkhd`` of mallinfo(3).
    """
    mallinfo2 = _in_libc("mallinfo2", _Mallinfo2)
    if mallinfo2 is None:
        return None
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


@cache
def _in_libc(name: str, result: type, *arguments: type) -> Callable[..., Any] | None:
    if sys.platform != "linux":
        return None
    function: Callable[..., Any] | None = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function.argtypes, function.restype = arguments, result  # type: ignore[attr-defined]
    return function
