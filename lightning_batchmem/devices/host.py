"""Memory of this process on the host, and utilization of its CPU cores."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil

from lightning_batchmem.devices import cgroup
from lightning_batchmem.devices.base import MemoryStats, Utilization

if sys.platform != "win32":
    import resource

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")

_KIB = 1024  # "kB" in /proc. Source: proc_pid_status(5)

# Since Linux 6.2 each core may hold some pages back from getrusage.
_READINGS_AGREE_BYTES = 2**20


class HostMemory:
    """Resident set of this process.

    The peak is the kernel's high-water mark (``VmHWM``), restarted by a write to ``/proc/self/clear_refs``; where that
    file cannot be written, the current value. Create one per process: a forked child would restart its parent's peak.

    Args:
        quick: read the peak with ``getrusage`` (1 µs) instead of ``VmHWM`` (about 20 µs) if both agree after a reset.
            They differ if the program that ran before ``exec`` in this process was larger.

    Example:
        >>> memory = HostMemory()
        >>> memory.reset_peak()
        >>> memory.peak().allocated_bytes > 0
        True

    Source: https://docs.kernel.org/filesystems/proc.html (clear_refs, VmHWM); ru_maxrss in getrusage(2)
    """

    name = "host"
    # Heap pages left after a trim. Source: measured, a linear layer of a few KiB: peaks differed by less than 0.3 MiB.
    granularity_bytes = 2**20

    def __init__(self, *, quick: bool = False) -> None:
        self._is_quick_wanted = quick
        self._process = psutil.Process()
        self._clear_refs = _open_clear_refs()
        self._statm: int | None = None
        if self._clear_refs is not None:
            self._statm = os.open(_STATM, os.O_RDONLY)  # kept open, because opening it takes 15 µs
            weakref.finalize(self, os.close, self._clear_refs)
            weakref.finalize(self, os.close, self._statm)
        self._quick = quick and self._clear_refs is not None and self._readings_agree()

    def __reduce__(self) -> tuple[Callable[[], HostMemory], tuple[Any, ...]]:
        # a copied descriptor could name another file in a spawned process
        return functools.partial(HostMemory, quick=self._is_quick_wanted), ()

    def reset_peak(self) -> None:
        """Restart the peak from the resident set."""
        if self._clear_refs is not None:
            os.write(self._clear_refs, b"5")

    def peak(self) -> MemoryStats:
        """Return the largest resident set since :meth:`reset_peak`."""
        if self._quick:  # inline, because every step reads it three times
            return MemoryStats(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB)
        peak_bytes = _peak_resident_bytes() if self._clear_refs is not None else None
        return self.current() if peak_bytes is None else MemoryStats(peak_bytes)

    def current(self) -> MemoryStats:
        """Return the resident set now."""
        return MemoryStats(self._process.memory_info().rss)

    def private_bytes(self) -> int:
        """Return the resident set now without the pages of files and of shared memory."""
        if self._statm is None:
            return int(self._process.memory_info().rss)
        resident, shared = os.pread(self._statm, 256, 0).split()[1:3]  # Source: proc_pid_statm(5), in pages
        return (int(resident) - int(shared)) * resource.getpagesize()

    def budget_bytes(self) -> int:
        """Return the resident set plus the least of available memory, control group and resource limits."""
        memory = self._process.memory_info()
        rooms = [psutil.virtual_memory().available, cgroup.memory_headroom_bytes(), *_resource_limit_rooms(memory)]
        return memory.rss + max(0, min(room for room in rooms if room is not None))

    def non_torch_bytes(self) -> None:
        """Return ``None``: not known on the host."""

    def limit_enforced(self, limit_bytes: int) -> AbstractContextManager[bool]:
        """Enforce nothing: the kernel would kill the process."""
        return nullcontext(False)

    def release_cached(self) -> None:
        """Collect garbage, and return free heap blocks to the kernel."""
        gc.collect()
        if (malloc_trim := _malloc_trim()) is not None:
            malloc_trim(0)

    def synchronize(self) -> None:
        """Return at once: the host has no pending work."""

    def counters(self) -> dict[str, int]:
        """Return nothing: the kernel kills a process that runs out of memory."""
        return {}

    def _readings_agree(self) -> bool:
        self.reset_peak()
        peak_bytes = _peak_resident_bytes()
        rusage_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
        return peak_bytes is not None and abs(peak_bytes - rusage_bytes) <= _READINGS_AGREE_BYTES


def peak_can_be_reset() -> bool:
    """Whether the kernel has a peak of this process that can be restarted."""
    clear_refs = _open_clear_refs()
    if clear_refs is None:
        return False
    os.close(clear_refs)
    return True


def cpu_utilization() -> Utilization:
    """Return the busy share of the cores that this process may use, since the previous call.

    ``time.process_time`` counts nanoseconds. psutil counts ticks of 10 ms: 0 % or 100 % for steps shorter than that.
    """
    cores = float(len(psutil.Process().cpu_affinity() or ())) if hasattr(psutil.Process, "cpu_affinity") else 0.0
    cores = min(cores or os.cpu_count() or 1, cgroup.cpu_quota_cores() or float("inf"))
    last_wall, last_busy = time.monotonic(), time.process_time()

    def percent() -> float | None:
        nonlocal last_wall, last_busy
        wall, busy = time.monotonic() - last_wall, time.process_time() - last_busy
        last_wall, last_busy = last_wall + wall, last_busy + busy
        if wall <= 0 or busy < 0:  # the process time of a forked child restarts at 0
            return None
        return min(100.0, 100 * busy / (wall * cores))

    return Utilization("cpu_pct", percent)


def _peak_resident_bytes() -> int | None:
    """The kernel's high-water mark of the resident set; ``None`` where it has none."""
    _, found, rest = _STATUS.read_bytes().partition(b"\nVmHWM:")
    return int(rest.split(maxsplit=1)[0]) * _KIB if found else None


def _resource_limit_rooms(memory: Any) -> list[int]:
    """What RLIMIT_AS and RLIMIT_DATA still admit. Source: getrlimit(2)."""
    if sys.platform != "linux":
        return []
    used = ((resource.RLIMIT_AS, memory.vms), (resource.RLIMIT_DATA, memory.data))
    limits = [(resource.getrlimit(kind)[0], used_bytes) for kind, used_bytes in used]
    return [limit - used_bytes for limit, used_bytes in limits if limit != resource.RLIM_INFINITY]


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Glibc's function that returns free heap blocks to the kernel; see malloc_trim(3)."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def _open_clear_refs() -> int | None:
    """Open the file if it can be written and the kernel counts VmHWM; some sandboxes have one of both."""
    try:
        if _peak_resident_bytes() is None:
            return None
        clear_refs = os.open(_CLEAR_REFS, os.O_WRONLY)
    except OSError:
        return None
    try:
        os.write(clear_refs, b"5")
    except OSError:
        os.close(clear_refs)
        return None
    return clear_refs
