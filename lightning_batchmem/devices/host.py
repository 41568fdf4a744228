"""Memory of this process on the host and under the limits of its control groups."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil

from lightning_batchmem.devices.base import MemoryStats
from lightning_batchmem.devices.cgroup import memory_headroom_bytes

if sys.platform != "win32":
    import resource

_PROCESS = Path("/proc/self")
# The files in /proc write 1,024 bytes as "kB".
# Source: proc_pid_status(5)
_KIB = 1024
# Since Linux 6.2 each core may hold some pages back from getrusage.
_READINGS_AGREE_BYTES = 2**20


class HostMemory:
    """Resident set of this process.

    The peak is the kernel's high-water mark (``VmHWM``), restarted by a write to
    ``/proc/self/clear_refs``. Create one per process: a forked child would restart its parent's
    peak.

    Args:
        quick: read the peak with ``getrusage`` (1 µs) instead of ``VmHWM`` (about 20 µs) if both
            agree after a reset. They differ if the program that ran before ``exec`` in this process
            was larger.
        files: directory of the kernel's files about this process.

    Attributes:
        can_reset_peak: whether the kernel has a peak that can be restarted. Without it, the peak is
            the current value.
        is_quick: whether the peak is read with ``getrusage``.

    Example:
        >>> memory = HostMemory()
        >>> memory.reset_peak()
        >>> memory.peak().allocated_bytes > 0
        True

    Source: https://docs.kernel.org/filesystems/proc.html (clear_refs, VmHWM); ru_maxrss in
    getrusage(2)
    """

    name = "host"
    is_host = True
    counts_live_bytes = False
    has_expandable_segments = False
    # Some heap pages are left after a trim.
    # Source: measured; the peaks of a linear layer of a few KiB differed by less than 0.3 MiB.
    granularity_bytes = 2**20

    def __init__(self, *, quick: bool = False, files: Path = _PROCESS) -> None:
        self._process = psutil.Process()
        self._status = files / "status"
        # The file stays open, because every step writes to it.
        self._clear_refs = _open_clear_refs(files)
        self._statm: int | None = None
        self.can_reset_peak = self._clear_refs is not None
        if self._clear_refs is not None:
            # The file stays open, because opening it takes 15 µs.
            self._statm = os.open(files / "statm", os.O_RDONLY)
            weakref.finalize(self, os.close, self._clear_refs)
            weakref.finalize(self, os.close, self._statm)
        self.is_quick = quick and self.can_reset_peak and _readings_agree(self._status)

    def __reduce__(self) -> tuple[Callable[[], HostMemory], tuple[Any, ...]]:
        # A copied descriptor could belong to another file in a spawned process.
        return functools.partial(HostMemory, quick=self.is_quick), ()

    def reset_peak(self) -> None:
        if self._clear_refs is not None:
            os.write(self._clear_refs, b"5")

    def peak(self) -> MemoryStats:
        """Return the largest resident set since :meth:`reset_peak`."""
        # The call is inline, because every step reads the peak.
        if self.is_quick:
            return MemoryStats(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB)
        peak_bytes = _status_bytes(self._status, "VmHWM") if self.can_reset_peak else None
        return self.current() if peak_bytes is None else MemoryStats(peak_bytes)

    def current(self) -> MemoryStats:
        return MemoryStats(self._process.memory_info().rss)

    def private_bytes(self) -> int:
        """Return the resident set now without the pages of files and of shared memory."""
        if self._statm is None:
            return self.current().allocated_bytes
        # The file has the size, the resident set and its shared part, each in pages.
        # Source: proc_pid_statm(5)
        resident, shared = os.pread(self._statm, 256, 0).split()[1:3]
        return (int(resident) - int(shared)) * resource.getpagesize()

    def budget_bytes(self) -> int:
        """Return the resident set plus the bytes by which it can still grow.

        These are the least of the available memory and of the bytes left under the limits of the
        control groups and of the process.
        """
        memory = self._process.memory_info()
        rooms = [
            psutil.virtual_memory().available,
            memory_headroom_bytes(),
            *_resource_limit_rooms(memory),
        ]
        return memory.rss + max(0, min(room for room in rooms if room is not None))

    def non_torch_bytes(self) -> None:
        """Return ``None``: not known on the host."""

    def limit_enforced(self, limit_bytes: int) -> AbstractContextManager[bool]:
        """Enforce nothing: the kernel would kill the process."""
        return nullcontext(False)

    def release_cached(self) -> None:
        """Collect garbage, and return free blocks of the heap to the kernel.

        Source: malloc_trim(3), which only glibc has.
        """
        gc.collect()
        library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)

    def synchronize(self) -> None:
        """Return at once: the host has no pending work."""

    def counters(self) -> dict[str, int]:
        """Return nothing: the kernel kills a process that runs out of memory."""
        return {}


def _open_clear_refs(files: Path) -> int | None:
    """Open ``clear_refs`` and restart the peak; ``None`` where this is not possible.

    Some sandboxes lack this file, or ``VmHWM`` in ``status``.
    """
    clear_refs = None
    try:
        if _status_bytes(files / "status", "VmHWM") is None:
            return None
        clear_refs = os.open(files / "clear_refs", os.O_WRONLY)
        os.write(clear_refs, b"5")
    except OSError:
        if clear_refs is not None:
            os.close(clear_refs)
        return None
    return clear_refs


def _readings_agree(status: Path) -> bool:
    peak_bytes = _status_bytes(status, "VmHWM")
    rusage_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
    return peak_bytes is not None and abs(peak_bytes - rusage_bytes) <= _READINGS_AGREE_BYTES


def _status_bytes(status: Path, name: str) -> int | None:
    """Return a size in ``/proc/self/status`` in bytes; ``None`` where it is missing.

    Source: proc_pid_status(5)
    """
    _, separator, rest = status.read_bytes().partition(f"\n{name}:".encode())
    return int(rest.split(maxsplit=1)[0]) * _KIB if separator else None


def _resource_limit_rooms(memory: Any) -> list[int]:
    """Return the bytes left under RLIMIT_AS and RLIMIT_DATA. Source: getrlimit(2)."""
    if sys.platform != "linux":
        return []
    used = ((resource.RLIMIT_AS, memory.vms), (resource.RLIMIT_DATA, memory.data))
    limits = [(resource.getrlimit(kind)[0], used_bytes) for kind, used_bytes in used]
    return [limit - used_bytes for limit, used_bytes in limits if limit != resource.RLIM_INFINITY]
