"""A CUDA device: the caching allocator's own counters, and what the driver still has to give."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import torch

from lightning_batchmem.devices.base import MemoryStats

# Running totals worth an alarm: allocations that failed for good, and those that succeeded only after the allocator
# threw its cache away (each one costs a device synchronisation). Source: torch.cuda.memory_stats
_COUNTERS = ("num_ooms", "num_alloc_retries")

# A tensor of more than 1 MiB may sit in a block with up to 1 MiB to spare, so that the same need may count as a little
# less at a larger batch. Source: kSmallSize and should_split in c10/core/CachingDeviceAllocator.h, torch 2.13
_RESOLUTION_BYTES = 2 * 2**20


class CudaMemory:
    """What PyTorch's caching allocator says of one CUDA device.

    The counters live on the host: no method but :meth:`synchronize` waits for the device, and none before
    :meth:`budget_bytes` starts a CUDA context. A process that has not started CUDA holds 0 bytes.

    Args:
        device: the CUDA device; without an index the current one at each call.

    Raises:
        ValueError: for another kind of device.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html
    """

    name = "cuda"
    has_peak = True
    repeatability = 0.0  # the counters are exact, and the allocator rounds the same sizes the same way
    resolution_bytes = _RESOLUTION_BYTES

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"device must be a cuda device, got {device}")
        self._device = device

    def reset_peak(self) -> None:
        """Let both peaks start again from what is in use now."""
        # Before CUDA starts torch raises (2.5.1, 2.13) instead of having nothing to reset.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> MemoryStats:
        """Highest allocated and reserved bytes since :meth:`reset_peak`."""
        return self._reading("peak")

    def current(self) -> MemoryStats:
        """Allocated and reserved bytes at this moment."""
        return self._reading("current")

    def own_bytes(self) -> int:
        """Allocated bytes at this moment."""
        return self.current().allocated_bytes

    def in_use_bytes(self) -> None:
        """Not asked: allocated bytes are just that."""
        return

    def budget_bytes(self) -> int:
        """What the driver has free, and what this process has reserved; never the device's total.

        A per-process memory fraction lowers it (told by newer releases of torch only), and so does the available
        host memory on an integrated GPU, which has none of its own.
        """
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        if torch.cuda.get_device_properties(self._device).is_integrated:
            free_bytes = min(free_bytes, psutil.virtual_memory().available)
        budget_bytes = free_bytes + (self._reading("current").reserved_bytes or 0)
        # Not in torch 2.5.1. The allocator holds it against reserved bytes, as a share of the device's total.
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        if fraction is not None:
            budget_bytes = min(budget_bytes, int(fraction(self._device) * total_bytes))
        return int(budget_bytes)

    def outside_bytes(self) -> int | None:
        """What the device holds beside this process's allocator: contexts, libraries (NCCL), other processes.

        The driver's total less what it has free, less what the allocator has reserved. On an integrated GPU that is
        all that the host uses.

        Returns:
            Bytes; ``None`` before CUDA starts, which asking would do, and where the driver moved some of what is
            reserved to the host's memory (Windows), so that the difference is negative.

        Source: cudaMemGetInfo in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html
        """
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        outside_bytes = int(total_bytes - free_bytes) - (self._reading("current").reserved_bytes or 0)
        return outside_bytes if outside_bytes >= 0 else None

    def release_cached(self) -> None:
        """Collect garbage, and give the allocator's free blocks back to the driver."""
        gc.collect()
        torch.cuda.empty_cache()

    def limit_enforced(self, limit_bytes: int) -> AbstractContextManager[bool]:
        """Not yet."""
        return nullcontext(False)

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        torch.cuda.synchronize(self._device)

    def counters(self) -> dict[str, int]:
        """``num_ooms`` and ``num_alloc_retries`` since the process started; empty before CUDA did."""
        stats = self._stats()
        return {name: int(stats[name]) for name in _COUNTERS if name in stats}

    def _reading(self, when: str) -> MemoryStats:
        stats = self._stats()
        if not stats:
            return MemoryStats(0, 0)
        return MemoryStats(int(stats["allocated_bytes"]["all"][when]), int(stats["reserved_bytes"]["all"][when]))

    def _stats(self) -> dict[str, Any]:
        # Nested: torch.cuda.max_memory_allocated and memory_stats flatten and sort some 100 counters at every call.
        return torch.cuda.memory_stats_as_nested_dict(self._device)
