"""The limit of a benchmark's process.

The limit is a memory control group on the host, and a share of the device on CUDA. It is set when
``fit`` starts, to the memory in use then plus the room of the workload. On the host, a process that
exceeds it is killed by the kernel (SIGKILL), as where the memory of the machine ends.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

GROUP_VARIABLE = "BENCHMARKS_GROUP"

DEVICE_SHARE = 0.5
"""Share of a CUDA device that a process may use."""

_GROUPS = Path("/sys/fs/cgroup")


def cap(room_bytes: int) -> None:
    """Limit this process to ``room_bytes`` more than it uses now.

    On CUDA the limit is :data:`DEVICE_SHARE` of the device.
    """
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(DEVICE_SHARE)
    elif GROUP_VARIABLE in os.environ:
        MemoryGroup(Path(os.environ[GROUP_VARIABLE]), room_bytes).limit()


class MemoryGroup:
    """A memory control group, version 1 or 2.

    Its processes may use ``room_bytes`` beyond the use at :meth:`limit`.
    """

    def __init__(self, path: Path, room_bytes: int) -> None:
        self.path = path
        self.room_bytes = room_bytes
        self._highest_used_bytes = 0
        is_version_2 = (path / "memory.current").exists()
        if is_version_2:
            names = ("max", "current", "peak")
        else:
            names = ("limit_in_bytes", "usage_in_bytes", "max_usage_in_bytes")
        self._limit, self._usage, self._peak = (path / f"memory.{name}" for name in names)
        self._events = path / ("memory.events" if is_version_2 else "memory.oom_control")

    def limit(self) -> None:
        self._limit.write_text(str(self.used_bytes() + self.room_bytes))
        if self._peak.name == "memory.max_usage_in_bytes":
            # Importing torch may have filled more page cache than the limit allows.
            self._peak.write_text("0")

    def used_bytes(self) -> int:
        """Bytes in use without page cache, which the kernel drops before it kills a process."""
        statistics = (self.path / "memory.stat").read_text()
        # Version 1 counts its subgroups in lines of their own.
        prefix = "total_" if "\ntotal_" in statistics else ""
        file_pages = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", statistics, re.M)
        return int(self._usage.read_text()) - sum(map(int, file_pages))

    def sample(self) -> None:
        """Read the memory in use once it is limited."""
        if self._start_bytes() is not None:
            self._highest_used_bytes = max(self._highest_used_bytes, self.used_bytes())

    def peaks(self) -> dict[str, int]:
        """``used_bytes`` and ``peak_bytes`` beyond the use at :meth:`limit`.

        The result is empty if no limit was set.
        """
        start_bytes = self._start_bytes()
        if start_bytes is None:
            return {}
        return {
            "used_bytes": self._highest_used_bytes - start_bytes,
            "peak_bytes": int(self._peak.read_text()) - start_bytes,
        }

    def kills(self) -> int:
        """Number of processes that the kernel killed because the group was full."""
        found = re.search(r"^oom_kill (\d+)$", self._events.read_text(), re.M)
        return int(found[1]) if found else 0

    def _start_bytes(self) -> int | None:
        text = self._limit.read_text().strip()
        # Version 1 writes "no limit" as the largest number of pages.
        if text == "max" or int(text) >= 1 << 62:
            return None
        return int(text) - self.room_bytes


@contextmanager
def memory_group(room_bytes: int) -> Iterator[MemoryGroup | None]:
    """Make a control group for one process, below the group of this one.

    Without room and on CUDA there is no group, but ``None``.

    Raises:
        OSError: if no group with a memory limit can be made here (it takes root, or a delegated
            group).
    """
    if room_bytes == 0 or torch.cuda.is_available():
        yield None
        return
    group = MemoryGroup(
        Path(tempfile.mkdtemp(prefix="benchmark-", dir=_group_of_this_process())), room_bytes
    )
    try:
        if not group._limit.exists():
            raise OSError(
                f"{group.path} has no memory limit, because the memory controller is not delegated"
                " to it"
            )
        yield group
    finally:
        group.path.rmdir()


def _group_of_this_process() -> Path:
    lines = (line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    paths = {
        controller: path for controllers, path in lines for controller in controllers.split(",")
    }
    # Version 2 lists no controllers in /proc/self/cgroup, and has no folder for each of them.
    base = _GROUPS / "memory" if "memory" in paths else _GROUPS
    # In a container the path may be that of the host, and its own group is mounted as the base.
    group = base / paths.get("memory", paths.get("", "")).lstrip("/")
    return group if group.is_dir() else base
