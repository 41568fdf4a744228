"""An Apple GPU (MPS): what is in use at the moment. Metal keeps no peak that a process could read."""

from __future__ import annotations

import gc

import torch

from lightning_batchmem.devices.base import MemoryStats


class MpsMemory:
    """Current values of the one MPS device; ``has_peak`` is false and resetting the peak does nothing.

    Source: https://docs.pytorch.org/docs/stable/mps.html
    """

    name = "mps"
    has_peak = False
    repeatability = 0.0
    resolution_bytes = 0

    def reset_peak(self) -> None:
        """Nothing: there is no peak counter."""

    def peak(self) -> MemoryStats:
        """Use at this moment, which is not a peak."""
        return self.current()

    def current(self) -> MemoryStats:
        """Bytes in tensors, and bytes that the Metal driver gave (its caches and the kernels' buffers included)."""
        return MemoryStats(torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory())

    def own_bytes(self) -> int:
        """Allocated bytes at this moment."""
        return self.current().allocated_bytes

    def in_use_bytes(self) -> None:
        """Not asked: current values are."""
        return

    def budget_bytes(self) -> int:
        """What Metal recommends that a process holds at most; beyond it performance suffers, then allocations fail."""
        return torch.mps.recommended_max_memory()

    def outside_bytes(self) -> None:
        """Unknown: Metal tells a process only of itself."""
        return

    def release_cached(self) -> None:
        """Collect garbage, and give the allocator's free blocks back to the driver."""
        gc.collect()
        torch.mps.empty_cache()

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        torch.mps.synchronize()

    def counters(self) -> dict[str, int]:
        """MPS counts no events."""
        return {}
