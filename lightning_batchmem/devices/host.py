"""The host: peak resident set of this process, what it could still get, and how busy its CPU cores are."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext

import psutil
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.devices import cgroup, heap
from lightning_batchmem.devices.base import MemoryStats
from lightning_batchmem.devices.kept_open import KeptOpen
from lightning_batchmem.devices.resource_limits import KIB, ResourceLimits, field_bytes

if sys.platform != "win32":
    import resource

_CLEAR_REFS = "/proc/self/clear_refs"
_MEMINFO = "/proc/meminfo"
_STATM = "/proc/self/statm"
_STATUS = "/proc/self/status"

# glibc keeps freed blocks, so that the peak at one batch size differs from run to run, and over many steps exceeds that
# of a few: by up to 36 % of its growth where tensors are smaller than 32 MiB and so come from the heap. This is for
# where the heap does not tell how much of it lies loose; see search.LOOSE_REPEATABILITY for where it does.
# Source: measured, torch 2.13 (CPU), the worst of three to five steps of a probe against that of forty steps of the
# training after it, examples/quickstart.py and a chain of tanh, eight runs by hand on a busy machine. From one run to
# the next the design has 20 %.
HOST_REPEATABILITY = 0.4

# By how much the two readings of the peak may differ where they speak of the same memory: on kernels since 6.2 each
# core may hold some pages back from the quick one.
_READINGS_AGREE_BYTES = 2**20

# What is left of the heap after a trim differs by some pages and arenas even where the step is the same.
# Source: measured, a linear layer of a few KiB at 2 and 4 samples: the peaks differed by less than 0.3 MiB.
_RESOLUTION_BYTES = 2**20


class HostMemory:
    """The resident set of this process.

    On Linux the peak is the kernel's own high-water mark, which construction and :meth:`reset_peak` start again
    (about 1 µs) and :meth:`peak` reads (about 10 µs). Elsewhere, and where the mark cannot be reset, the value at the
    moment stands in for the peak, ``has_peak`` is false and a warning says so. With very many cores the kernel's own
    count is approximate: each core may hold some pages back.

    Args:
        quick: read the peak with ``getrusage`` (1 µs instead of about 10) where it agrees with the kernel's mark after
            a reset. It does not where the program that became this process (``exec``) was larger.

    Example:
        >>> meter = HostMemory()
        >>> meter.reset_peak()
        >>> meter.peak().allocated_bytes > 0
        True

    Source: VmHWM and clear_refs (value 5) in proc_pid_status(5) and
    https://docs.kernel.org/filesystems/proc.html; ru_maxrss in getrusage(2); the approximation:
    https://lkml.iu.edu/hypermail/linux/kernel/2601.1/11412.html
    """

    name = "host"
    repeatability = HOST_REPEATABILITY
    resolution_bytes = _RESOLUTION_BYTES

    def __init__(self, *, quick: bool = False) -> None:
        self._unobtrusive = quick
        self._clear_refs = KeptOpen.or_none(_CLEAR_REFS, os.O_WRONLY)
        self._meminfo, self._statm = KeptOpen.or_none(_MEMINFO), KeptOpen.or_none(_STATM)
        self._status = KeptOpen.or_none(_STATUS)
        self.has_peak = self._can_reset()
        if not self.has_peak:
            rank_zero_warn(
                f"{_CLEAR_REFS} cannot be written: the host's memory is sampled at the moment it is asked for, which is"
                " coarser than a true peak and misses what was freed before."
            )
        self._limits = ResourceLimits(self._status, self._statm)
        self._quick = quick and self.has_peak and self._readings_agree()

    def reset_peak(self) -> None:
        """Let the peak start again from the resident set; nothing where the kernel keeps no peak to reset."""
        if self.has_peak and self._clear_refs is not None:
            os.write(self._clear_refs.descriptor, b"5")
        if not self._unobtrusive:
            self._limits.watch()

    def peak(self) -> MemoryStats:
        """Largest resident set since :meth:`reset_peak`; the one at the moment where ``has_peak`` is false."""
        if self._quick and sys.platform != "win32":  # without a call in between: this is asked three times a step
            return MemoryStats(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB)
        status = self._status.read() if self._status is not None and self.has_peak else b""
        peak_bytes = field_bytes(status, "VmHWM")
        return self.current() if peak_bytes is None else MemoryStats(self._limits.counted_bytes(status, peak_bytes))

    def current(self) -> MemoryStats:
        """Resident set at this moment, as the peak counts it."""
        if self._statm is None:
            return MemoryStats(psutil.Process().memory_info().rss)
        # Its second number, in pages. The same count as VmRSS, which comes with 40 lines. Source: proc_pid_statm(5)
        _, resident, shared, *_ = self._statm.read().split(maxsplit=3)
        uncounted_bytes = 0 if self._unobtrusive else self._limits.uncounted_bytes(int(shared) * mmap.PAGESIZE)
        return MemoryStats(int(resident) * mmap.PAGESIZE - uncounted_bytes)

    def own_bytes(self) -> int:
        """Resident set at this moment less what it shares with files and other processes, as a memory map does.

        Source: the second and third number of proc_pid_statm(5).
        """
        if self._statm is None:
            return self.current().allocated_bytes
        _, resident, shared, *_ = self._statm.read().split()
        return (int(resident) - int(shared)) * mmap.PAGESIZE

    def in_use_bytes(self) -> int | None:
        """Bytes in blocks of glibc's heap; what is resident beyond them lies free between them."""
        return heap.in_use_bytes()

    def budget_bytes(self) -> int:
        """Resident set and the least that the kernel, a control group or a resource limit would still add to it.

        Loader workers need no term of their own: what they hold is in the group's use and missing from the available
        memory, and the resource limits are a process's own.
        """
        resident_bytes = self.current().allocated_bytes
        rooms = {"available": self._available_bytes(), **self._limits.rooms(resident_bytes)}
        if (group_bytes := cgroup.memory_headroom_bytes()) is not None:
            rooms["group"] = group_bytes
        least = min(rooms, key=rooms.__getitem__)
        if least == "data":
            self._limits.data_is_least()
        return resident_bytes + max(0, rooms[least])

    def outside_bytes(self) -> None:
        """Unknown: here no allocator stands between a process and the rest."""
        return

    def release_cached(self) -> None:
        """Collect garbage, and have glibc hand its free blocks back to the kernel."""
        gc.collect()
        heap.trim()

    def limit_enforced(self, limit_bytes: int) -> AbstractContextManager[bool]:
        """No limit can be enforced on the host: whether it is."""
        return nullcontext(False)

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def counters(self) -> dict[str, int]:
        """Nothing is counted on the host: the kernel kills a process that runs out, it does not tell it."""
        return {}

    def _available_bytes(self) -> int:
        # The line that psutil looks for too, in a fifth of the time that it takes over all of them. Where there is
        # none (Linux before 3.14) or it makes no sense (psutil#1915, LXC), psutil knows what "free" makes of the rest.
        meminfo = b"" if self._meminfo is None else self._meminfo.read()
        available_bytes, total_bytes = field_bytes(meminfo, "MemAvailable"), field_bytes(meminfo, "MemTotal")
        if available_bytes is not None and total_bytes is not None and 0 < available_bytes <= total_bytes:
            return available_bytes
        return psutil.virtual_memory().available

    def _can_reset(self) -> bool:
        # Tried, not guessed: kernels before 4.0 refuse the 5, and some sandboxes have the file or VmHWM but not both.
        if self._clear_refs is None or self._status_bytes("VmHWM") is None:
            return False
        try:
            os.write(self._clear_refs.descriptor, b"5")
        except OSError:
            return False
        return True

    def _readings_agree(self) -> bool:
        self.reset_peak()
        marked_bytes = self._status_bytes("VmHWM")
        return marked_bytes is not None and abs(marked_bytes - _rusage_peak_bytes()) <= _READINGS_AGREE_BYTES

    def _status_bytes(self, field: str) -> int | None:
        return None if self._status is None else field_bytes(self._status.read(), field)


class CpuUtilization:
    """Busy share of the cores that this process may use: its own threads, loader workers and other programs left out.

    Source: getrusage-style process time over wall time and cores (affinity and control-group quota at construction).
    """

    key = "cpu_pct"

    def __init__(self) -> None:
        self._cores = _usable_cores()
        self._wall_seconds, self._busy_seconds = time.monotonic(), time.process_time()

    def percent_since_last_call(self) -> float | None:
        """Busy share since the previous call, 0 to 100; ``None`` when no time passed, or in another process."""
        wall_seconds, busy_seconds = time.monotonic(), time.process_time()
        wall, busy = wall_seconds - self._wall_seconds, busy_seconds - self._busy_seconds
        self._wall_seconds, self._busy_seconds = wall_seconds, busy_seconds
        if wall <= 0 or busy < 0:  # a forked child's process time starts again at 0
            return None
        return min(100.0, 100 * busy / (wall * self._cores))


def _rusage_peak_bytes() -> int:
    if sys.platform == "win32":
        raise NotImplementedError  # there is no mark to reset either, so that nobody asks
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def _usable_cores() -> float:
    cores = float(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    quota = cgroup.cpu_quota_cores()
    return cores if quota is None else min(cores, quota)
