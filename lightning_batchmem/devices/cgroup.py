"""Limits of the control groups of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lightning_batchmem.devices.foreign_values import value_or_none

_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def memory_headroom_bytes(*, root: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the bytes left under the tightest limit of this process's control groups.

    They are at least 0, and ``None`` without a limit; version 1 of control groups always has one,
    of 2^63 less a page where none is set. A group's use includes other processes
    (loader workers), but not ``inactive_file``: the kernel drops it first.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html and
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """
    rooms = [
        value_or_none(f"The memory limit in {group}", _headroom_bytes, group)
        for group in _groups("memory", root, membership)
    ]
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
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
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
        # Names on Linux are bytes in any encoding.
        return os.fsdecode(path.read_bytes()).strip()
    # The file does not exist, the group was removed meanwhile, or no path has such a name.
    except (OSError, ValueError):
        return ""
