"""Memory of this process on the host, and the limits of its control groups."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from lightning_batchmem.devices.base import Garbage, MemoryStats
from lightning_batchmem.devices.foreign_values import value_or_none

if sys.platform != "win32":
    import resource

_PROCESS = Path("/proc/self")
_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = _PROCESS / "cgroup"
# Where torch puts the tensors that processes send each other.
# Source: shm_open(3); the strategies of torch.multiprocessing, 2.5.1 to 2.14
_SHARED_MEMORY = "/dev/shm"  # noqa: S108
# The files in /proc write 1,024 bytes as "kB".
# Source: proc_pid_status(5)
_KIB = 1024
# Since Linux 6.2 each core may hold some pages back from getrusage.
_READINGS_AGREE_BYTES = 2**20


class _Usage(NamedTuple):
    """Memory of this process: its address space, the resident set, and parts of both."""

    size_bytes: int
    resident_bytes: int
    shared_bytes: int
    data_bytes: int


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
    reports_requested_bytes = False
    has_expandable_segments = False
    # Some heap pages are left after a trim.
    # Source: measured; the peaks of a linear layer of a few KiB differed by less than 0.3 MiB.
    granularity_bytes = 2**20

    def __init__(self, *, quick: bool = False, files: Path = _PROCESS) -> None:
        self._status = files / "status"
        # The file stays open, because every step writes to it.
        self._clear_refs = _open_clear_refs(files)
        self._statm: int | None = None
        self._garbage = Garbage(self.granularity_bytes)
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
        return MemoryStats(self._usage().resident_bytes)

    def peak_and_private_bytes(self) -> tuple[int, int]:
        """Return the peak, and the resident set now without pages of files and shared memory."""
        usage = self._usage()
        return self.peak().allocated_bytes, usage.resident_bytes - usage.shared_bytes

    def available_bytes(self) -> int:
        """Return the resident set plus the bytes by which it can still grow.

        These are the least of the available memory and of the bytes left under the limits of the
        control groups and of the process.
        """
        usage = self._usage()
        of_groups = value_or_none("The memory limit of a control group", memory_headroom_bytes)
        of_process = value_or_none("The limits of this process", _resource_limit_rooms, usage)
        rooms = [free_bytes_of_host(), of_groups, *(of_process or [])]
        return usage.resident_bytes + max(0, min(room for room in rooms if room is not None))

    def non_torch_bytes(self) -> None:
        """Return ``None``: not known on the host."""

    def limit_enforced(self, limit_bytes: int) -> AbstractContextManager[bool]:
        """Enforce nothing: the kernel would kill the process."""
        return nullcontext(False)

    def release_cached(self) -> None:
        """Collect garbage, and return free blocks of the heap to the kernel."""
        self._garbage.collect(self._trim)

    def synchronize(self) -> None:
        """Return at once: the host has no pending work."""

    def counters(self) -> dict[str, int]:
        """Return nothing: the kernel kills a process that runs out of memory."""
        return {}

    def _trim(self) -> int:
        """Return free blocks of the heap, and the resident set after it.

        Source: malloc_trim(3), which only glibc has.
        """
        library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)
        return self._usage().resident_bytes

    def _usage(self) -> _Usage:
        usage = (
            None
            if self._statm is None
            else value_or_none("/proc/self/statm", _usage_in, self._statm)
        )
        if usage is None:
            memory: Any = psutil.Process().memory_info()
            usage = _Usage(memory.vms, memory.rss, 0, getattr(memory, "data", 0))
        return usage


def _usage_in(statm: int) -> _Usage:
    # These are pages: the size, the resident set, its shared part, the code, 0, and the data.
    # Source: proc_pid_statm(5)
    numbers = map(int, os.pread(statm, 256, 0).split())
    size, resident, shared, _, _, data, *_ = numbers
    return _Usage(*(pages * resource.getpagesize() for pages in (size, resident, shared, data)))


def free_bytes_of_host() -> int:
    """Return the memory of the host that is available, or that is free if only this is known."""
    available = value_or_none(
        "The available memory of the CPU", lambda: int(psutil.virtual_memory().available)
    )
    if available is not None:
        return available
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
    # The file may have another form than on Linux.
    except (OSError, ValueError, IndexError):
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


def _resource_limit_rooms(usage: _Usage) -> list[int]:
    """Return the bytes left under RLIMIT_AS and RLIMIT_DATA. Source: getrlimit(2)."""
    if sys.platform != "linux":
        return []
    used = ((resource.RLIMIT_AS, usage.size_bytes), (resource.RLIMIT_DATA, usage.data_bytes))
    limits = [(resource.getrlimit(kind)[0], used_bytes) for kind, used_bytes in used]
    return [limit - used_bytes for limit, used_bytes in limits if limit != resource.RLIM_INFINITY]


def free_shared_bytes() -> float:
    """Return the bytes that are free where loader workers put their batches.

    They are ``inf`` without a limit. Docker limits this memory to 64 MiB unless ``--shm-size`` is
    passed.
    """
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        # Not Linux, which has other limits there.
        return math.inf
    # A tmpfs without a limit has no size. Source: the option size in tmpfs(5)
    return usage.free if usage.total else math.inf


def memory_headroom_bytes(*, root: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the bytes left under the tightest limit of this process's control groups.

    They are at least 0, and ``None`` without a limit; version 1 of control groups always has one,
    of 2^63 less a page where none is set. A group's use includes other processes
    (loader workers), but not ``inactive_file``: the kernel drops it first.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html and
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """
    rooms = [_headroom_bytes(group) for group in _groups("memory", root, membership)]
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
            # Without a quota, version 2 has "max" and version 1 has -1.
            if len(pair) == 2 and pair[0] not in ("max", "-1"):
                quotas.append(int(pair[0]) / int(pair[1]))
    return min(quotas, default=None)


def _headroom_bytes(group: Path) -> int | None:
    # Above memory.high the kernel does not kill a training, but slows it down to a standstill.
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    # Version 2 writes "max" without a limit.
    limits = [int(text) for name in names if (text := _read(group / name)) not in ("", "max")]
    used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
    if not (limits and used):
        return None
    statistics = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    # In version 1, the value with total_ in its name includes the group's children.
    cached = statistics.get("total_inactive_file", statistics.get("inactive_file", "0"))
    return max(0, min(limits) - max(0, int(used) - int(cached)))


def _groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """Directories of this process's groups and of their ancestors."""
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        # This is version 2, which a hybrid host mounts below version 1.
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
        # Names on Linux are bytes in any encoding.
        return path.read_text(errors="surrogateescape").strip()
    # The file does not exist, or the group was removed meanwhile.
    except OSError:
        return ""
