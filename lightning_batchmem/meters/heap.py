"""glibc's heap: what it holds, what it has free, and giving that back. Elsewhere nothing is known or done."""

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


def free_bytes() -> int | None:
    """Bytes of the heap that are mapped and in no block; ``None`` where nobody knows (not glibc, or before 2.33).

    Source: ``fordblks`` of mallinfo(3).
    """
    info = _mallinfo2()
    return None if info is None else int(info.fordblks)


def in_use_bytes() -> int | None:
    """Bytes in blocks, of the heap and mapped on their own; ``None`` as for :func:`free_bytes`.

    Source: ``uordblks`` and ``hblkhd`` of mallinfo(3).
    """
    info = _mallinfo2()
    return None if info is None else int(info.uordblks + info.hblkhd)


def _mallinfo2() -> Any:
    mallinfo2 = _in_libc("mallinfo2", _Mallinfo2)
    return None if mallinfo2 is None else mallinfo2()


@cache
def _in_libc(name: str, result: type, *arguments: type) -> Callable[..., Any] | None:
    if sys.platform != "linux":
        return None
    function: Callable[..., Any] | None = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function.argtypes, function.restype = arguments, result  # type: ignore[attr-defined]
    return function
