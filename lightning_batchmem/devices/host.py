"""Memory of this process on the host and its control groups, and utilization of its CPU cores."""

from __future__ import annotations

import ctypes
import errno
import functools
import gc
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil

from lightning_batchmem.devices.base import MemoryStats, Utilization

if sys.platform != "win32":
    import resource

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_STATM = Path("/proc/self/statm")
_KIB = 1024  # "kB" in /proc. Source: proc_pid_status(5)

_LARGEST_HOLE_BYTES, _SMALLEST_HOLE_BYTES = 2**25, 2**16  # glibc maps larger blocks than the first

# Since Linux 6.2 each core may hold some pages back from getrusage.
_READINGS_AGREE_BYTES = 2**20

# Version 1 of control groups writes "no limit" as 2^63 less a page. Source: docs.kernel.org/admin-guide/cgroup-v1
_NO_LIMIT_BYTES = 1 << 62


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
        self._clear_refs = _open_clear_refs()  # kept open, because every step writes to it three times
        self._statm: int | None = None
        if self._clear_refs is not None:
            self._statm = os.open(_STATM, os.O_RDONLY)  # kept open, because opening it takes 15 µs
            weakref.finalize(self, os.close, self._clear_refs)
            weakref.finalize(self, os.close, self._statm)
        self._quick = quick and self._clear_refs is not None and _readings_agree()

    def __reduce__(self) -> tuple[Callable[[], HostMemory], tuple[Any, ...]]:
        # a copied descriptor could name another file in a spawned process
        return functools.partial(HostMemory, quick=self._is_quick_wanted), ()

    def reset_peak(self) -> None:
        if self._clear_refs is not None:
            os.write(self._clear_refs, b"5")

    def peak(self) -> MemoryStats:
        """Return the largest resident set since :meth:`reset_peak`."""
        if self._quick:  # inline, because every step reads it three times
            return MemoryStats(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB)
        peak_bytes = _status_bytes("VmHWM") if self._clear_refs is not None else None
        return self.current() if peak_bytes is None else MemoryStats(peak_bytes)

    def current(self) -> MemoryStats:
        return MemoryStats(self._process.memory_info().rss)

    def private_bytes(self) -> int:
        """Return the resident set now without the pages of files and of shared memory."""
        if self._statm is None:
            return int(self._process.memory_info().rss)
        resident, shared = os.pread(self._statm, 256, 0).split()[1:3]  # Source: proc_pid_statm(5), in pages
        return (int(resident) - int(shared)) * resource.getpagesize()

    def file_bytes(self) -> int:
        """Return the resident pages of files, such as libraries."""
        return _status_bytes("RssFile") or 0

    def budget_bytes(self) -> int:
        """Return the resident set plus the least of available memory, control group and resource limits."""
        memory = self._process.memory_info()
        rooms = [psutil.virtual_memory().available, memory_headroom_bytes(), *_resource_limit_rooms(memory)]
        return memory.rss + max(0, min(room for room in rooms if room is not None))

    def non_torch_bytes(self) -> None:
        """Return ``None``: not known on the host."""

    def limit_enforced(self, limit_bytes: int) -> AbstractContextManager[bool]:
        """Enforce nothing: the kernel would kill the process."""
        return nullcontext(False)

    def release_cached(self) -> None:
        """Collect garbage, return free heap blocks to the kernel, and begin with a heap like that of a new process."""
        gc.collect()
        if (library := _c_library()) is not None:
            library.malloc_trim(0)
            if hasattr(library, "mallinfo2") and not _resource_limit_rooms(self._process.memory_info()):
                _set_holes_aside(library)

    def synchronize(self) -> None:
        """Return at once: the host has no pending work."""

    def counters(self) -> dict[str, int]:
        """Return nothing: the kernel kills a process that runs out of memory."""
        return {}


def peak_can_be_reset() -> bool:
    """Whether the kernel has a peak of this process that can be restarted."""
    if (clear_refs := _open_clear_refs()) is None:
        return False
    os.close(clear_refs)
    return True


def cpu_utilization() -> Utilization:
    """Return the busy share of the cores that this process may use, since the previous call.

    ``time.process_time`` counts nanoseconds. psutil counts ticks of 10 ms: 0 % or 100 % for steps shorter than that.
    """
    cores = float(len(psutil.Process().cpu_affinity() or ())) if hasattr(psutil.Process, "cpu_affinity") else 0.0
    cores = min(cores or os.cpu_count() or 1, cpu_quota_cores() or float("inf"))
    last_wall, last_busy = time.monotonic(), time.process_time()

    def percent() -> float | None:
        nonlocal last_wall, last_busy
        wall, busy = time.monotonic() - last_wall, time.process_time() - last_busy
        last_wall, last_busy = last_wall + wall, last_busy + busy
        if wall <= 0 or busy < 0:  # the process time of a forked child restarts at 0
            return None
        return min(100.0, 100 * busy / (wall * cores))

    return Utilization("cpu_pct", percent)


def memory_headroom_bytes(*, root: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the bytes left under the tightest limit of this process's groups, at least 0; ``None`` without a limit.

    A group's use includes other processes (loader workers), but not ``inactive_file``: the kernel drops it first.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html and
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """
    groups = _groups("memory", root, membership)
    return min((left for group in groups if (left := _headroom_bytes(group)) is not None), default=None)


def cpu_quota_cores(*, root: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """Return the smallest CPU quota of this process's groups, in cores; ``None`` without a quota.

    Source: cpu.max in https://docs.kernel.org/admin-guide/cgroup-v2.html, cpu.cfs_quota_us in
    https://docs.kernel.org/scheduler/sched-bwc.html
    """
    quotas = []
    for group in _groups("cpu", root, membership):
        version_1 = f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
        for pair in (_read(group / "cpu.max").split(), version_1.split()):
            if len(pair) == 2 and all(map(str.isdigit, pair)):  # neither "max" nor -1, which mean no quota
                quotas.append(int(pair[0]) / int(pair[1]))
    return min(quotas, default=None)


def _open_clear_refs() -> int | None:
    """Open the file and restart the peak; ``None`` where one of the kernel's two files is missing (some sandboxes)."""
    clear_refs = None
    try:
        if _status_bytes("VmHWM") is None:
            return None
        clear_refs = os.open(_CLEAR_REFS, os.O_WRONLY)
        os.write(clear_refs, b"5")
    except OSError:
        if clear_refs is not None:
            os.close(clear_refs)
        return None
    return clear_refs


def _readings_agree() -> bool:
    peak_bytes = _status_bytes("VmHWM")
    rusage_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
    return peak_bytes is not None and abs(peak_bytes - rusage_bytes) <= _READINGS_AGREE_BYTES


def _status_bytes(name: str) -> int | None:
    """A number of the kernel about this process; ``None`` where there is none. Source: proc_pid_status(5)."""
    _, found, rest = _STATUS.read_bytes().partition(f"\n{name}:".encode())
    return int(rest.split(maxsplit=1)[0]) * _KIB if found else None


def _resource_limit_rooms(memory: Any) -> list[int]:
    """What RLIMIT_AS and RLIMIT_DATA still admit. Source: getrlimit(2)."""
    if sys.platform != "linux":
        return []
    used = ((resource.RLIMIT_AS, memory.vms), (resource.RLIMIT_DATA, memory.data))
    limits = [(resource.getrlimit(kind)[0], used_bytes) for kind, used_bytes in used]
    return [limit - used_bytes for limit, used_bytes in limits if limit != resource.RLIM_INFINITY]


class _HeapUse(ctypes.Structure):
    """The C library's ``struct mallinfo2``. Source: mallinfo(3)."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


@functools.cache
def _c_library() -> Any:
    """The C library where it has ``malloc_trim``; glibc from 2.33 on also has ``mallinfo2``."""
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _HeapUse
        library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        library.free.argtypes = [ctypes.c_void_p]
    return library if hasattr(library, "malloc_trim") else None


def _set_holes_aside(library: Any) -> None:
    """Allocate the free blocks inside the heap and never free them: unwritten, they take addresses but no memory.

    Blocks of later sizes would else scatter over the holes that earlier ones left, and hold more than in a new process.
    """
    size = _LARGEST_HOLE_BYTES
    while size >= _SMALLEST_HOLE_BYTES:
        before = library.mallinfo2()
        if size <= before.fordblks - before.keepcost and (block := library.malloc(size)) is not None:
            after = library.mallinfo2()
            if (after.arena, after.hblks, after.keepcost) == (before.arena, before.hblks, before.keepcost):
                continue  # a hole was that large, and another one may be
            if after.hblks == before.hblks:  # a mapped block stays: freeing it would raise the threshold of mapping
                library.free(block)
        size //= 2


def _headroom_bytes(group: Path) -> int | None:
    # memory.high does not kill, but the kernel throttles a training above it to a standstill
    texts = [_read(group / name).strip() for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    limits = [int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT_BYTES]
    used = (_read(group / "memory.current") or _read(group / "memory.usage_in_bytes")).strip()
    if not limits or not used.isdigit():
        return None
    statistics = dict(line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines())
    # in version 1 the total_ value includes the group's children
    cached_bytes = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
    return max(0, min(limits) - max(0, int(used) - cached_bytes))


def _groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """Directories of this process's groups and of their ancestors."""
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2; a hybrid host mounts it below version 1
            bases = [root, root / "unified"]
        elif controller in controllers.split(","):
            bases = [root / controller, root / controllers]
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        if ".." in parts:  # outside the cgroup namespace: only its root is visible
            parts = ()
        for base in dict.fromkeys(bases):
            # without a namespace the path is the host's, and the container's group is mounted at the base
            for depth in range(len(parts), -1, -1):
                yield base.joinpath(*parts[:depth])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # too many open files: the limit must not be overlooked
            raise
        return ""  # no such file, or the group was removed while it was read
