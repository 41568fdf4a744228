"""What the control groups of this process still allow: memory and CPU time, under version 1, version 2 or both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

# Version 1 writes "no limit" as the largest page counter, 2^63 less a page.
# Source: PAGE_COUNTER_MAX in include/linux/page_counter.h, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
_NO_LIMIT_BYTES = 1 << 62


def memory_headroom_bytes(*, root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes that the tightest of this process's control groups still allows.

    A group's use counts every process in it (loader workers too), and page cache that the kernel would drop first
    (``inactive_file``) is not counted as use.

    Args:
        root: where the control groups are mounted.
        membership: the file that names the groups of this process.

    Returns:
        The least headroom in bytes over the group and all its ancestors, never below 0; ``None`` without a limit.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.max, memory.high, memory.current, memory.stat)
    and https://docs.kernel.org/admin-guide/cgroup-v1/memory.html; the working set less ``inactive_file`` is what
    Kubernetes evicts by.
    """
    rooms = []
    for group in _groups("memory", root, membership):
        # memory.high does not kill, but a training beyond it is throttled to a standstill: as good as a limit.
        limits = [_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        known = [limit for limit in limits if limit is not None and limit < _NO_LIMIT_BYTES]
        use = _number(group / "memory.current")
        if use is None:
            use = _number(group / "memory.usage_in_bytes")
        if known and use is not None:
            rooms.append(max(0, min(known) - max(0, use - _inactive_file_bytes(group))))
    return min(rooms, default=None)


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
    for group in _groups("cpu", root, membership):
        words = _text(group / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
        quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota_us is not None and quota_us > 0 and period_us:
            quotas.append(quota_us / period_us)
    return min(quotas, default=None)


def _groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """Directories of this process's groups and their ancestors; which files each one holds is left to the caller."""
    for line in _text(membership).splitlines():
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


def _inactive_file_bytes(group: Path) -> int:
    values = dict(line.split(maxsplit=1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    # Version 1 counts a group's own pages as inactive_file and those of its children too as total_inactive_file.
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
