"""The CPU cores of this process: how busy it keeps them, and how long it waits for one."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.devices.host import cpu_quota_cores

_SCHEDULER = Path("/proc/thread-self/schedstat")


class CpuMeter:
    """Measures the busy share of the cores between two calls of :meth:`percent`.

    ``time.process_time`` counts nanoseconds. psutil counts ticks of 10 ms: 0 % or 100 % for steps
    shorter than that.

    Args:
        cores: how many cores this process may use.
        wall_seconds: clock of the time that passes.
        busy_seconds: clock of the time that all threads of this process computed.
    """

    def __init__(
        self,
        cores: float,
        *,
        wall_seconds: Callable[[], float] = time.monotonic,
        busy_seconds: Callable[[], float] = time.process_time,
    ) -> None:
        self._cores = cores
        self._read_wall = wall_seconds
        self._read_busy = busy_seconds
        self._last_wall = wall_seconds()
        self._last_busy = busy_seconds()

    def percent(self) -> float | None:
        """Return the busy share since the previous call, at most 100."""
        wall = self._read_wall()
        busy = self._read_busy()
        wall_seconds = wall - self._last_wall
        busy_seconds = busy - self._last_busy
        self._last_wall = wall
        self._last_busy = busy
        # The process time of a forked child restarts at 0.
        if wall_seconds <= 0 or busy_seconds < 0:
            return None
        return min(100.0, 100 * busy_seconds / (wall_seconds * self._cores))


def cpu_utilization() -> Callable[[], float | None]:
    """Return what reads the busy share of the cores that this process may use, in per cent."""
    return CpuMeter(usable_cores()).percent


def usable_cores() -> float:
    """Return the cores of this process's affinity, or its CPU quota in cores if that is less."""
    # Only Linux has this function.
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min(cores, value_or_none("The CPU quota", cpu_quota_cores) or math.inf)


def waited_seconds(*, file: Path = _SCHEDULER) -> float:
    """Return the seconds in which this thread could run, but other work had the cores.

    They are 0 where the kernel does not count them. Some kernels also count the time in which a CPU
    quota holds the thread back.

    Source: https://docs.kernel.org/scheduler/sched-stats.html (/proc/<pid>/schedstat)
    """
    try:
        return int(file.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
