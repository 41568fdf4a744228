"""Files that others may have written, read only where they are regular and small."""

from __future__ import annotations

import os
import stat
from pathlib import Path

# A plan with a thousand trials is smaller.
_MOST_MIB = 16


def read_small(path: Path) -> str:
    """The text of a regular file of at most 16 MiB.

    Raises:
        OSError: if there is no such file, or it cannot be read.
        ValueError: if it is another kind of file, larger, or not UTF-8.
    """
    check_regular(path)
    most_bytes = _MOST_MIB * 2**20
    # Without waiting: a file of the kernel may have its next line later.
    with open(path, "rb", opener=_open_without_waiting) as file:
        # The size that a file system tells may be 0, as in /proc.
        content = file.read(most_bytes + 1)
    if content is None:
        raise ValueError("it has no content yet")
    if len(content) > most_bytes:
        raise ValueError(f"it is larger than {_MOST_MIB} MiB")
    return content.decode("utf-8")


def _open_without_waiting(path: str, flags: int) -> int:
    # Windows has no such flag.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def check_regular(path: Path) -> None:
    """Raise a ValueError unless it is a regular file.

    To open a pipe could take forever, and a device may have no end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")
