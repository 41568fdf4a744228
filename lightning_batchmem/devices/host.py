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
# The files in /proc write 1,024 bytes as "kB".
# Source: proc_pid_status(5)
_KIB = 1024

# On 64-bit systems, glibc maps new blocks that are larger than this, so they leave no holes.
# Source: DEFAULT_MMAP_THRESHOLD_MAX in mallopt(3)
_LARGEST_HOLE_BYTES = 2**25
_SMALLEST_HOLE_BYTES = 2**16

# Since Linux 6.2 each core may hold some pages back from getrusage.
_READINGS_AGREE_BYTES = 2**20

# Version 1 of control groups writes "no limit" as 2^63 less a page.
# Source: docs.kernel.org/admin-guide/cgroup-v1
_NO_LIMIT_BYTES = 1 << 62


class HostMemory:
    """Resident set of this process.

    The peak is the kernel's high-water mark (``VmHWM``), restarted by a write to
    ``/proc/self/clear_refs``; where that file cannot be written, the current value. Create one per
    process: a forked child would restart its parent's peak.

    Args:
        quick: read the peak with ``getrusage`` (1 µs) instead of ``VmHWM`` (about 20 µs) if both
            agree after a reset. They differ if the program that ran before ``exec`` in this process
            was larger.

    Example:
        >>> memory = HostMemory()
        >>> memory.reset_peak()
        >>> memory.peak().allocated_bytes > 0
        True

    Source: https://docs.kernel.org/filesystems/proc.html (clear_refs, VmHWM); ru_maxrss in
    getrusage(2)
    """

    name = "host"
    # Some heap pages are left after a trim.
    # Source: measured; the peaks of a linear layer of a few KiB differed by less than 0.3 MiB.
    granularity_bytes = 2**20

    def __init__(self, *, quick: bool = False) -> None:
        self._is_quick_wanted = quick
        self._process = psutil.Process()
        # The file stays open, because every step writes to it three times.
        self._clear_refs = _open_clear_refs()
        self._statm: int | None = None
        if self._clear_refs is not None:
            # The file stays open, because opening it takes 15 µs.
            self._statm = os.open(_STATM, os.O_RDONLY)
            weakref.finalize(self, os.close, self._clear_refs)
            weakref.finalize(self, os.close, self._statm)
        self._quick = quick and self._clear_refs is not None and _readings_agree()

    def __reduce__(self) -> tuple[Callable[[], HostMemory], tuple[Any, ...]]:
        # A copied descriptor could belong to another file in a spawned process.
        return functools.partial(HostMemory, quick=self._is_quick_wanted), ()

    def reset_peak(self) -> None:
        if self._clear_refs is not None:
            os.write(self._clear_refs, b"5")

    def peak(self) -> MemoryStats:
        """Return the largest resident set since :meth:`reset_peak`."""
        # The call is inline, because every step reads the peak three times.
        if self._quick:
            return MemoryStats(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB)
        peak_bytes = _status_bytes("VmHWM") if self._clear_refs is not None else None
        return self.current() if peak_bytes is None else MemoryStats(peak_bytes)

    def current(self) -> MemoryStats:
        return MemoryStats(self._process.memory_info().rss)

    def private_bytes(self) -> int:
        """Return the resident set now without the pages of files and of shared memory."""
        if self._statm is None:
            return int(self._process.memory_info().rss)
        # The file has the size, the resident set and its shared part, each in pages.
        # Source: proc_pid_statm(5)
        resident, shared = os.pread(self._statm, 256, 0).split()[1:3]
        return (int(resident) - int(shared)) * resource.getpagesize()

    def file_bytes(self) -> int:
        """Return the resident pages of files, such as libraries."""
        return _status_bytes("RssFile") or 0

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
        """Collect garbage, and return free heap blocks to the kernel.

        Where possible, the heap is then like that of a new process.
        """
        gc.collect()
        if (library := _c_library()) is not None:
            library.malloc_trim(0)
            if hasattr(library, "mallinfo2"):
                limit_rooms = _resource_limit_rooms(self._process.memory_info())
                if not limit_rooms:
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

    ``time.process_time`` counts nanoseconds. psutil counts ticks of 10 ms: 0 % or 100 % for steps
    shorter than that.
    """
    cores = 0.0
    if hasattr(psutil.Process, "cpu_affinity"):
        cores = float(len(psutil.Process().cpu_affinity() or ()))
    cores = min(cores or os.cpu_count() or 1, cpu_quota_cores() or float("inf"))
    last_wall = time.monotonic()
    last_busy = time.process_time()

    def percent() -> float | None:
        nonlocal last_wall, last_busy
        wall = time.monotonic() - last_wall
        busy = time.process_time() - last_busy
        last_wall += wall
        last_busy += busy
        # The process time of a forked child restarts at 0.
        if wall <= 0 or busy < 0:
            return None
        return min(100.0, 100 * busy / (wall * cores))

    return Utilization("cpu_pct", percent)


def memory_headroom_bytes(*, root: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the bytes left under the tightest limit of this process's control groups.

    They are at least 0, and ``None`` without a limit. A group's use includes other processes
    (loader workers), but not ``inactive_file``: the kernel drops it first.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html and
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """
    rooms = (_headroom_bytes(group) for group in _groups("memory", root, membership))
    return min((room for room in rooms if room is not None), default=None)


def cpu_quota_cores(*, root: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """Return the smallest CPU quota of this process's groups, in cores; ``None`` without a quota.

    Source: cpu.max in https://docs.kernel.org/admin-guide/cgroup-v2.html, cpu.cfs_quota_us in
    https://docs.kernel.org/scheduler/sched-bwc.html
    """
    quotas = []
    for group in _groups("cpu", root, membership):
        version_1 = f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
        for pair in (_read(group / "cpu.max").split(), version_1.split()):
            # Without a quota, version 2 has "max" and version 1 has -1, which are not digits.
            if len(pair) == 2 and all(map(str.isdigit, pair)):
                quotas.append(int(pair[0]) / int(pair[1]))
    return min(quotas, default=None)


def _open_clear_refs() -> int | None:
    """Open ``/proc/self/clear_refs`` and restart the peak; ``None`` where this is not possible.

    Some sandboxes lack this file, or ``VmHWM`` in ``/proc/self/status``.
    """
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
    """Return a size in ``/proc/self/status`` in bytes; ``None`` where it is missing.

    Source: proc_pid_status(5)
    """
    _, found, rest = _STATUS.read_bytes().partition(f"\n{name}:".encode())
    return int(rest.split(maxsplit=1)[0]) * _KIB if found else None


def _resource_limit_rooms(memory: Any) -> list[int]:
    """Return the bytes left under RLIMIT_AS and RLIMIT_DATA. Source: getrlimit(2)."""
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
        library.malloc.restype = ctypes.c_void_p
        library.malloc.argtypes = [ctypes.c_size_t]
        library.free.argtypes = [ctypes.c_void_p]
    return library if hasattr(library, "malloc_trim") else None


def _set_holes_aside(library: Any) -> None:
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


def _headroom_bytes(group: Path) -> int | None:
    # Above memory.high the kernel does not kill a training, but slows it down to a standstill.
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    texts = [_read(group / name).strip() for name in names]
    limits = [int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT_BYTES]
    used = (_read(group / "memory.current") or _read(group / "memory.usage_in_bytes")).strip()
    if not limits or not used.isdigit():
        return None
    statistics = dict(line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines())
    # In version 1, the value with total_ in its name includes the group's children.
    cached_bytes = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
    return max(0, min(limits) - max(0, int(used) - cached_bytes))


def _groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """Directories of this process's groups and of their ancestors."""
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        # The line is that of version 2, which a hybrid host mounts below version 1.
        if controllers == "":
            bases = [root, root / "unified"]
        elif controller in controllers.split(","):
            bases = [root / controller, root / controllers]
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        # The group is outside the cgroup namespace, so only the root of the namespace is visible.
        if ".." in parts:
            parts = ()
        for base in dict.fromkeys(bases):
            # Without a namespace, the path is the host's, and the container's group is mounted at
            # the base.
            for depth in range(len(parts), -1, -1):
                yield base.joinpath(*parts[:depth])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        # With too many open files, a limit would be overlooked.
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        # The file does not exist, or the group was removed while it was read.
        return ""
