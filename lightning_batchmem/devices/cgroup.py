"""Limits of memory and CPU time from the control groups of this process (versions 1 and 2)."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

# Version 1 writes "no limit" as the largest page counter, 2^63 less a page.
# Source: https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
_NO_LIMIT_BYTES = 1 << 62


def memory_headroom_bytes(*, root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the bytes left under the tightest limit of this process's groups, at least 0; ``None`` without a limit.

    A group's use includes other processes (loader workers), but not ``inactive_file``: the kernel drops it first.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html and
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """
    groups = _groups("memory", root, membership)
    return min((left for group in groups if (left := _headroom_bytes(group)) is not None), default=None)


def cpu_quota_cores(*, root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> float | None:
    """Return the smallest CPU quota of this process's groups, in cores; ``None`` without a quota.

    Source: cpu.max in https://docs.kernel.org/admin-guide/cgroup-v2.html, cpu.cfs_quota_us in
    https://docs.kernel.org/scheduler/sched-bwc.html
    """
    quotas = []
    for group in _groups("cpu", root, membership):
        version_2 = _read(group / "cpu.max").split()
        version_1 = [_read(group / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        for quota, period in (pair for pair in (version_2, version_1) if len(pair) == 2):
            if quota.isdigit() and period.isdigit():  # neither "max" nor -1, which mean no quota
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


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
