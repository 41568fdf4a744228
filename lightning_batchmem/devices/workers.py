"""What a finished batch of a loader worker takes, and what worker processes hold beside the batches."""

from __future__ import annotations

import mmap
import pickle
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

KIB = 1024

_RESOLUTION_BYTES = 2**20
"""By how much two workers that do the same may differ. Source: measured, samples of 4 KiB: less than 0.7 MiB."""


def weigh(batch: object) -> tuple[int, int]:
    """What a batch takes while it waits to be fetched from a worker.

    Args:
        batch: as a ``collate_fn`` returns it; what can be pickled.

    Returns:
        Its bytes, and the number of storages that its tensors share with the process that fetches it. The storages
        count once and in whole pages; all else counts pickled or as objects in memory, whichever is more.

    Example:
        >>> weigh({"image": torch.zeros(2, 512), "label": [1, 2]})[1]
        1
    """
    scales = _Scales()
    scales.dump(batch)
    return sum(scales.storages.values()) + max(scales.pickled_bytes, scales.object_bytes), len(scales.storages)


def own_bytes(pids: Iterable[int | None], batch_bytes: int) -> int:
    """What worker processes share with no other process, at most so far.

    Args:
        pids: of workers that are alive.
        batch_bytes: what is counted elsewhere for the batch that each of them makes.

    Returns:
        The sum in bytes.

    Raises:
        psutil.Error: when a process has ended or may not be looked at.
    """
    total_bytes = 0
    for pid in pids:
        other_bytes, peak_bytes = _private_bytes(pid)
        # At its peak a worker may hold the batch in the making, which is one of those counted elsewhere; if it does
        # not, then it is at rest that it adds most to them.
        total_bytes += max(other_bytes, peak_bytes - batch_bytes) + _RESOLUTION_BYTES
    return total_bytes


def _private_bytes(pid: int | None) -> tuple[int, int]:
    """What a process shares with no other: now, and at most so far (elsewhere than on Linux only now)."""
    process = psutil.Process(pid)
    if sys.platform != "linux":
        other_bytes = process.memory_full_info().uss
        return other_bytes, other_bytes
    # Not the USS: pages of a mapped file that only this worker reads are private too, but clean, and given up at need.
    other_bytes = sum(mapping.private_dirty for mapping in process.memory_maps())
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    peak, resident = (int(status[field].split()[0]) * KIB for field in ("VmHWM", "VmRSS"))
    # What it shares, and files that it maps, do not come and go: what the resident set lost since its peak was private.
    return other_bytes, other_bytes + max(0, peak - resident)


class _Scales(pickle.Pickler):
    """Pickles a batch into nothing, as a worker hands it over, and adds up what it takes."""

    def __init__(self) -> None:
        super().__init__(self, protocol=pickle.HIGHEST_PROTOCOL)  # which only asks for `write`
        self.storages: dict[int, int] = {}
        self.pickled_bytes = self.object_bytes = 0

    def write(self, pickled: Any) -> None:
        self.pickled_bytes += memoryview(pickled).nbytes

    def persistent_id(self, found: Any) -> str | None:
        if isinstance(found, Tensor) and found.layout is torch.strided:  # other layouts lead to strided ones
            storage = found.untyped_storage()
            self.storages[storage.data_ptr()] = -(-storage.nbytes() // mmap.PAGESIZE) * mmap.PAGESIZE
            return "in shared memory"
        self.object_bytes += sys.getsizeof(found, 0)
        return None
