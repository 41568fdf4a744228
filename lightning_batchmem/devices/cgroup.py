"""What the control groups of this process still allow: memory and CPU time, under version 1, version 2 or both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lightning_batchmem.devices.kept_open import KeptOpen

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

# Version 1 writes "no limit" as the largest page counter, 2^63 less a page.
# Source: PAGE_COUNTER_MAX in include/linux/page_counter.h, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
_NO_LIMIT_BYTES = 1 << 62


def memory_headroom_bytes(*, root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes that the tightest of this process's control groups still allows.

    A group's use counts every process in it (loader workers too), and page cache that the kernel would drop first
    (``inactive_file``) is not counted as use. Groups, limits and use are read at each call; which files a group has is
    looked up once, and again when this process was moved to another.

    Args:
        root: where the control groups are mounted.
        membership: the file that names the groups of this process.

    Returns:
        The least headroom in bytes over the group and all its ancestors, never below 0; ``None`` without a limit.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.max, memory.high, memory.current, memory.stat)
    and https://docs.kernel.org/admin-guide/cgroup-v1/memory.html; the working set less ``inactive_file`` is what
    Kubernetes evicts by.
    """
    named = _kept_open(membership)
    groups = () if named is None else _memory_groups(root, named.read())
    return min((room for group in groups if (room := group.headroom_bytes()) is not None), default=None)


def cpu_quota_cores(*, root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> float | None:
    """Cores' worth of CPU time that the tightest of this process's control groups allows.

    Args:
        root: where the control groups are mounted.
        membership: the file that names the groups of this process.

    Returns:
        The quota over its period, e.g. 1.5; ``None`` without a quota.

    Source: cpu.max in https://docs.kernel.org/admin-guide/cgroup-v2.html, cpu.cfs_quota_us in
    https://docs.kernel.org/scheduler/sched-bwc.html
    """
    quotas = []
    for group in _groups("cpu", root, _content(KeptOpen.or_none(membership))):
        words = _content(KeptOpen.or_none(group / "cpu.max")).split()
        if len(words) == 2 and words[0] != b"max":
            quotas.append(int(words[0]) / int(words[1]))
        quota_us, period_us = (
            _number(KeptOpen.or_none(group / name)) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        )
        if quota_us is not None and quota_us > 0 and period_us:
            quotas.append(quota_us / period_us)
    return min(quotas, default=None)


@dataclass(frozen=True)
class _MemoryGroup:
    """The files of a group that bounds memory."""

    limits: tuple[KeptOpen, ...]
    use: KeptOpen | None
    statistics: KeptOpen | None

    def headroom_bytes(self) -> int | None:
        limits = [limit for file in self.limits if (limit := _number(file)) is not None and limit < _NO_LIMIT_BYTES]
        use = _number(self.use) if limits else None
        if use is None:
            return None
        # Version 1 counts a group's own pages as inactive_file and those of its children too as total_inactive_file.
        statistics = b"\n" + _content(self.statistics)
        _, found, rest = statistics.partition(b"\ntotal_inactive_file ")
        if not found:
            _, found, rest = statistics.partition(b"\ninactive_file ")
        cached_bytes = int(rest.split(maxsplit=1)[0]) if found else 0
        return max(0, min(limits) - max(0, use - cached_bytes))


@lru_cache(maxsize=1)
def _memory_groups(root: Path, named: bytes) -> tuple[_MemoryGroup, ...]:
    found = []
    for group in _groups("memory", root, named):
        # memory.high does not kill, but a training beyond it is throttled to a standstill: as good as a limit.
        names = ("memory.max", "memory.high", "memory.limit_in_bytes")
        limits = tuple(file for name in names if (file := KeptOpen.or_none(group / name)) is not None)
        if limits:
            use = KeptOpen.or_none(group / "memory.current") or KeptOpen.or_none(group / "memory.usage_in_bytes")
            found.append(_MemoryGroup(limits, use, KeptOpen.or_none(group / "memory.stat")))
    return tuple(found)


@lru_cache(maxsize=1)
def _kept_open(path: Path) -> KeptOpen | None:
    return KeptOpen.or_none(path)


def _groups(controller: str, root: Path, named: bytes) -> Iterator[Path]:
    """Directories of this process's groups and their ancestors; which files each one holds is left to the caller."""
    for line in os.fsdecode(named).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2; a hybrid host mounts it beside version 1
            bases = [root, root / "unified"]
        elif controller in controllers.split(","):
            bases = [root / controller, root / controllers]
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        if ".." in parts:  # the process was moved out of its cgroup namespace's root: only that root is visible
            parts = ()
        for base in dict.fromkeys(bases):
            # In a container without a cgroup namespace the path is the host's, and the container's own group is
            # mounted as the base: levels that are not there hold no files, and the base is always looked at.
            for depth in range(len(parts), -1, -1):
                yield base.joinpath(*parts[:depth])


def _number(file: KeptOpen | None) -> int | None:
    digits = _content(file).strip()
    return int(digits) if digits.lstrip(b"-").isdigit() else None


def _content(file: KeptOpen | None) -> bytes:
    try:
        return b"" if file is None else file.read()
    except OSError:  # the group is gone: this process was moved to another just now, and the next call finds that
        return b""
