"""Memory of this process on Apple's MPS. Nobody has run this on a device."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import torch

from lightning_batchmem.devices.base import MemoryStats


class MpsMemory:
    """Counters of PyTorch's caching allocator on MPS, whose memory is that of the host.

    By default the allocator may take 1.7 times what Metal recommends. That is more than many
    machines have: they swap, and no error is raised.

    Args:
        accelerator: module with the counters, by default ``torch.accelerator``.
        mps: module with the totals of the driver, by default ``torch.mps``.

    Attributes:
        can_reset_peak: whether this torch counts peaks on MPS. torch 2.13 does, and 2.5.1 does not.

    Source: getDeviceStats and default_high_watermark_ratio in ATen/mps/MPSAllocator.h, torch 2.13
    """

    name = "mps"
    # The allocator takes heaps of this size for all but the largest buffers.
    # Source: kLargeHeap in ATen/mps/MPSAllocator.h, torch 2.13
    granularity_bytes = 32 * 2**20
    overrun_kills = True
    counts_live_bytes = True
    held_is_resident_set = False
    shared_by_ranks = True
    holds_loader_workers = True

    def __init__(self, accelerator: Any = None, mps: Any = None) -> None:
        self._accelerator: Any = accelerator or getattr(torch, "accelerator", None)
        self._mps = mps or torch.mps
        self.can_reset_peak = self._counts_peaks()

    def reset_peak(self) -> None:
        self._accelerator.reset_peak_memory_stats()

    def peak(self) -> MemoryStats:
        return self._read("peak")

    def current(self) -> MemoryStats:
        return self._read("current")

    def private_bytes(self) -> int:
        return self.current().allocated_bytes

    def evictable_bytes(self) -> int:
        """Return 0: these bytes belong to no file."""
        return 0

    def budget_bytes(self) -> int:
        """Return the memory that this process holds plus what is available on the machine.

        It is at most what Metal recommends.
        """
        reserved_bytes = self.current().reserved_bytes or 0
        recommended_bytes = self.total_bytes() - self.non_torch_bytes()
        return min(recommended_bytes, reserved_bytes + psutil.virtual_memory().available)

    def total_bytes(self) -> int:
        """Return the most memory that Metal recommends for a process."""
        return int(self._mps.recommended_max_memory())

    def non_torch_bytes(self) -> int:
        """Return the bytes that Metal's own libraries take in this process."""
        reserved_bytes = self.current().reserved_bytes or 0
        return max(0, int(self._mps.driver_allocated_memory()) - reserved_bytes)

    def limit_enforced(self, limit_bytes: int) -> AbstractContextManager[bool]:
        """Enforce nothing: torch can set a limit, but not read the one that was set before."""
        return nullcontext(False)

    def release_cached(self) -> None:
        """Collect garbage, and return the allocator's free heaps."""
        gc.collect()
        self._mps.empty_cache()

    def synchronize(self) -> None:
        self._mps.synchronize()

    def counters(self) -> dict[str, int]:
        """Return nothing: MPS does not count these events (torch 2.13)."""
        return {}

    def _counts_peaks(self) -> bool:
        # torch 2.5.1 lacks the module. Until a version counts memory on MPS, its functions raise
        # a RuntimeError there.
        if not hasattr(self._accelerator, "memory_stats"):
            return False
        # A build of torch has the counters of one kind of device, and a CUDA build those of CUDA.
        if getattr(self._accelerator.current_accelerator(), "type", None) != "mps":
            return False
        try:
            self._accelerator.reset_peak_memory_stats()
            self._stats()
        except RuntimeError:
            return False
        return True

    def _stats(self) -> Mapping[str, int]:
        stats: Mapping[str, int] = self._accelerator.memory_stats()
        return stats

    def _read(self, when: str) -> MemoryStats:
        stats = self._stats()
        # The statistics are empty before the device starts.
        return MemoryStats(
            stats.get(f"allocated_bytes.all.{when}", 0), stats.get(f"reserved_bytes.all.{when}", 0)
        )
