"""Page faults of this process, and whether they take too much of its time."""

from __future__ import annotations

import functools
import mmap
import platform
import sys
import time
from dataclasses import dataclass

if sys.platform != "win32":
    import resource

# Page faults that take a larger share of the CPU time are worth a sentence to the user.
_MAX_SHARE = 0.15
# A block of so many pages is smaller than a huge page, so each of its pages has its own fault.
# Source: on x86 and ARM a huge page has at least 512 pages (Hugepagesize in /proc/meminfo).
_PAGES = 256

# Each variable alone is not enough, because glibc returns a mapped block at once, and the end of
# its heap when it is free. The value is 8 GiB. jemalloc returns free memory after some time, and
# large blocks at once, unless decay is switched off.
# Source: mallopt(3); opt.dirty_decay_ms, opt.muzzy_decay_ms and opt.oversize_threshold in
# jemalloc(3); each was measured with an LSTM of two layers and glibc 2.36.
_SENTENCE = (
    "Page faults take {share:.0%} of the CPU time of the training steps ({per_step:,.0f} faults in"
    " each), as if free memory went back to the kernel in every step. Set"
    " MALLOC_MMAP_THRESHOLD_=8589934592 and MALLOC_TRIM_THRESHOLD_=8589934592 before the program"
    " starts, or load jemalloc (LD_PRELOAD) with"
    " MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1."
)


@dataclass(frozen=True)
class PageFaults:
    """Page faults of all threads of this process in some time, and their CPU time.

    Attributes:
        count: page faults that read nothing from a disk.
        kernel_seconds: CPU time in the kernel, for page faults and for everything else.
        cpu_seconds: CPU time in the kernel and outside of it.

    Source: ru_minflt, ru_stime and ru_utime in getrusage(2)
    """

    count: int
    kernel_seconds: float
    cpu_seconds: float

    def __sub__(self, other: PageFaults) -> PageFaults:
        return PageFaults(
            self.count - other.count,
            self.kernel_seconds - other.kernel_seconds,
            self.cpu_seconds - other.cpu_seconds,
        )


class PageFaultMeter:
    """Counts the page faults since its creation. A reading takes a few µs.

    Example:
        >>> meter = PageFaultMeter()
        >>> before = meter.read()
        >>> block = bytearray(2**26)
        >>> (meter.read() - before).count > 0
        True
    """

    def __init__(self) -> None:
        self._start = self._paused = _process_total()

    def read(self) -> PageFaults | None:
        """Return the page faults so far; ``None`` on a system that does not count them."""
        total = _process_total()
        # No process runs without page faults.
        return total - self._start if total.count else None

    def pause(self) -> None:
        """Leave out what happens until :meth:`resume`."""
        self._paused = _process_total()

    def resume(self) -> None:
        self._start = _process_total() - (self._paused - self._start)


def _process_total() -> PageFaults:
    """Return the page faults since the process started; 0 where they are not counted."""
    if sys.platform == "win32":
        return PageFaults(0, 0.0, 0.0)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return PageFaults(usage.ru_minflt, usage.ru_stime, usage.ru_stime + usage.ru_utime)


def page_fault_sentence(faults: PageFaults, steps: int) -> str | None:
    """Return a sentence for the user if page faults take too much of the time of some steps.

    Args:
        faults: the page faults of these steps. Kernels count kernel time in ticks of up to 10 ms,
            so several seconds are needed.
        steps: how many steps these are.

    Returns:
        What happened, and what to do; ``None`` below 15 % of the CPU time, and where the C library
        does not take the two variables.

    Source: measured. glibc 2.31 refuses a threshold above 32 MiB (do_set_mmap_threshold in its
    malloc/malloc.c), and that of trimming alone makes the page faults more. glibc 2.36 takes both;
    versions between them were not tried.
    """
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(map(int, version.split("."))) < (2, 36):
        return None
    share = page_fault_share(faults, seconds_per_fault())
    if share <= _MAX_SHARE:
        return None
    return _SENTENCE.format(share=share, per_step=faults.count / steps)


def page_fault_share(faults: PageFaults, fault_seconds: float) -> float:
    """Return the share of the CPU time, 0 to 1, that page faults take.

    Kernel time has other causes too, such as reading files. So the share is that of the kernel
    time, but at most what so many page faults cost.

    Args:
        faults: page faults of some time.
        fault_seconds: CPU time of one page fault.
    """
    return min(faults.kernel_seconds, faults.count * fault_seconds) / faults.cpu_seconds


@functools.cache
def seconds_per_fault() -> float:
    """Measure the CPU time of a page fault on this machine, with the return of its page.

    The lowest of three times counts, because other work only adds to it. They take 2 ms together.
    """
    return min(_new_pages_seconds() for _ in range(3)) / _PAGES


def _new_pages_seconds() -> float:
    """Map new pages, write to each, and unmap them; return the CPU time of this."""
    start = time.thread_time()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, _PAGES * mmap.PAGESIZE, flags=flags) as block:
        block[:: mmap.PAGESIZE] = bytes(_PAGES)
    return time.thread_time() - start
