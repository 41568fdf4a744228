"""What a process may hold, the same for every finder and for the training after it, counted from the start of ``fit``.

``rlimit``: RLIMIT_DATA, which counts private memory that is mapped, used or not; an allocation past it raises, as on a
GPU. ``cgroup``: a memory control group for each process, which counts what is used; going over it is SIGKILL, as where
the memory of the machine ends. ``device``: on CUDA, the share that torch allows the process.

The room on the host is a workload's ``host_limit`` less what a process holds when ``fit`` starts. It was chosen so that
sizes of about a hundred fit, against which the fixed growth of the first steps (threads, arenas, oneDNN's caches) is
small, while a step at such a size takes at most about a second on two cores.
"""

from __future__ import annotations

import os
import re
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.common import DEVICE_SHARE, GROUP_VARIABLE
from benchmarks.workloads import WORKLOADS
from lightning_batchmem.plan.options import parse_memory_limit
from lightning_batchmem.plan.records import MIB

START_BYTES = 450 * MIB
"""What a process holds after steps of two samples (measured, torch 2.13 on a CPU)."""

_GROUPS = Path("/sys/fs/cgroup")


def caps_here() -> tuple[str, ...]:
    """The caps that there are for the device of this machine."""
    return ("device",) if torch.cuda.is_available() else ("rlimit", "cgroup")


def room_bytes(name: str) -> int:
    """Bytes that a process may hold: beyond those at the start of ``fit`` on the host, in all on CUDA."""
    if torch.cuda.is_available():
        return int(DEVICE_SHARE * torch.cuda.get_device_properties(0).total_memory)
    return parse_memory_limit(WORKLOADS[name].host_limit, budget_bytes=1) - START_BYTES


class Cap:
    """Caps this process, once, and is the watch of what happens under the cap.

    Args:
        kind: one of :func:`caps_here`.
        room_bytes: what is granted, see :func:`room_bytes`.
    """

    def __init__(self, kind: str, room_bytes: int) -> None:
        self.kind = kind
        self.room_bytes = room_bytes
        self._start_seconds: float | None = None
        self._end_seconds: float | None = None

    def close(self, device: torch.device) -> None:
        """Cap the process and start the watch; nothing where that was done before."""
        if self._start_seconds is not None:
            return
        if self.kind == "device":
            torch.cuda.set_per_process_memory_fraction(DEVICE_SHARE, device)
        elif self.kind == "rlimit":
            status = re.search(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
            assert status is not None
            cap_bytes = int(status[1]) * 1024 + self.room_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        else:
            group = Path(os.environ[GROUP_VARIABLE])
            _limit_file(group).write_text(str(_used_bytes(group) + self.room_bytes))
        self._start_seconds = time.perf_counter()

    def stop_watch(self) -> None:
        """What is done under the cap is done."""
        self._end_seconds = time.perf_counter()

    @property
    def seconds(self) -> float | None:
        """Seconds under the cap; ``None`` where there were none or they did not come to their end."""
        if self._start_seconds is None or self._end_seconds is None:
            return None
        return self._end_seconds - self._start_seconds


class Capped(Callback):
    """Caps the process as the first ``fit`` starts."""

    def __init__(self, cap: Cap) -> None:
        self._cap = cap

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._cap.close(trainer.strategy.root_device)


@contextmanager
def own_group(kind: str) -> Iterator[Path | None]:
    """A control group for one process below that of this one; ``None`` unless the cap is of that kind.

    Raises:
        OSError: where none can be made or it cannot bound memory; the message says why.
    """
    if kind != "cgroup":
        yield None
        return
    group = Path(tempfile.mkdtemp(prefix="benchmark-", dir=_present_group()))
    try:
        if not _limit_file(group).exists():
            raise OSError(f"{group} has no memory limit: the controller is not handed down to it")
        yield group
    finally:
        group.rmdir()


def kills(group: Path | None) -> int:
    """How many processes the kernel killed in a group because memory ran out there."""
    if group is None:
        return 0
    events = group / "memory.events"
    told = (events if events.exists() else group / "memory.oom_control").read_text()
    found = re.search(r"^oom_kill (\d+)$", told, re.MULTILINE)
    return int(found[1]) if found else 0


def _present_group() -> Path:
    by_controllers = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        by_controllers[controllers] = path.lstrip("/")
    version_1 = next((path for names, path in by_controllers.items() if "memory" in names.split(",")), None)
    if version_1 is not None:
        base, path = _GROUPS / "memory", version_1
    elif "" in by_controllers:
        base, path = _GROUPS, by_controllers[""]
    else:
        raise OSError("this process is in no memory control group")
    # in a container the path is the host's, and the container's own group is mounted as the base
    return base / path if (base / path).is_dir() else base


def _limit_file(group: Path) -> Path:
    version_2 = group / "memory.max"
    return version_2 if version_2.exists() else group / "memory.limit_in_bytes"


def _used_bytes(group: Path) -> int:
    """Bytes in use, without page cache that the kernel would drop first, as this package's meter counts them."""
    version_2 = group / "memory.current"
    used = version_2 if version_2.exists() else group / "memory.usage_in_bytes"
    statistics = (group / "memory.stat").read_text()
    cached = re.search(r"^total_inactive_file (\d+)$", statistics, re.MULTILINE) or re.search(
        r"^inactive_file (\d+)$", statistics, re.MULTILINE
    )
    return int(used.read_text()) - (int(cached[1]) if cached else 0)
