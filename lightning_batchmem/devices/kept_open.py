"""Small files of the kernel's, /proc and control groups, that are read again and again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_forks = (
    0  # how many of this process's ancestors were forked from one that had this module; asking for the pid costs more
)


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)

# More than any of them holds: a process's groups and the statistics of a group take some kB each.
_READ_BYTES = 1 << 16


class KeptOpen:
    """A file that stays open, and is opened again in a forked child, where /proc/self still is the parent's.

    Args:
        path: the file.
        flags: as of :func:`os.open`.

    Raises:
        OSError: when it cannot be opened.
    """

    def __init__(self, path: str | Path, flags: int = os.O_RDONLY) -> None:
        self._path, self._flags = path, flags
        self._descriptor = -1
        self._descriptor, self._opened_after = os.open(path, flags), _forks

    @classmethod
    def or_none(cls, path: str | Path, flags: int = os.O_RDONLY) -> KeptOpen | None:
        """The file, or ``None`` where it does not exist or may not be opened.

        Raises:
            OSError: when too many files are open, which says nothing of this one.
        """
        try:
            return cls(path, flags)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return None

    @property
    def descriptor(self) -> int:
        """The open file's number in this process."""
        if self._opened_after != _forks:
            self._close()
            self._descriptor, self._opened_after = os.open(self._path, self._flags), _forks
        return self._descriptor

    def read(self) -> bytes:
        """What the file says now: the kernel writes it anew for a reader who begins at 0.

        Source: https://docs.kernel.org/filesystems/seq_file.html, of which /proc and kernfs (control groups) are made.
        """
        return os.pread(self.descriptor, _READ_BYTES, 0)

    def __reduce__(self) -> tuple[type[KeptOpen], tuple[str | Path, int]]:
        # A copy (deepcopy, a spawned worker) opens its own: a number copied along would name, and close, another file.
        return type(self), (self._path, self._flags)

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
