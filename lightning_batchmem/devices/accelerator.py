"""Memory and utilization of a device that has a module in torch, such as CUDA."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.devices.base import MemoryStats, Utilization

# They count failed allocations, allocations that succeeded only after the cache was released (a
# device synchronization each), and segments given back to the driver. XPU counts none of them.
# Source: torch.cuda.memory_stats and torch.xpu.memory_stats, torch 2.13
_COUNTERS = ("num_ooms", "num_alloc_retries", "num_device_free")


class AcceleratorMemory:
    """Counters of PyTorch's caching allocator for one device, and free memory of the driver.

    No method but :meth:`synchronize` waits for the device, and only :meth:`budget_bytes`,
    :meth:`total_bytes` and :meth:`limit_enforced` start it. Before that this process holds 0 bytes.

    Args:
        device: a CUDA device (ROCm has this name too), or another one whose module has the same
            functions.
        functions: module with the functions of the device, by default ``torch.cuda`` for CUDA.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html
    """

    is_host = False
    counts_live_bytes = True
    # A block for more than 1 MiB may keep up to 1 MiB unsplit, so the same need may count less at a
    # larger batch.
    # Source: kSmallSize in c10/core/AllocatorConfig.h, should_split in
    # c10/cuda/CUDACachingAllocator.cpp, torch 2.13
    granularity_bytes = 2 * 2**20

    def __init__(self, device: torch.device, functions: Any = None) -> None:
        self.name = device.type
        # torch looks up the index of a device in each call, which takes some microseconds.
        self._device = device if device.index is None else device.index
        self._functions = functions or torch.get_device_module(device)

    def reset_peak(self) -> None:
        # Before CUDA starts, torch raises an error here (2.5.1 to 2.14).
        if self._functions.is_initialized():
            self._functions.reset_peak_memory_stats(self._device)

    def peak(self) -> MemoryStats:
        return self._read("peak")

    def current(self) -> MemoryStats:
        return self._read("current")

    def private_bytes(self) -> int:
        return self.current().allocated_bytes

    def budget_bytes(self) -> int:
        """Return the free memory of the driver plus the reserved memory of this process.

        It is not the device's total memory, since other processes may use a part of that.
        """
        free_bytes, total_bytes = self._functions.mem_get_info(self._device)
        if self._uses_host_memory():
            free_bytes = min(free_bytes, psutil.virtual_memory().available)
        budget_bytes = free_bytes + (self.current().reserved_bytes or 0)
        fraction = self._memory_fraction()
        if fraction is not None:
            budget_bytes = min(budget_bytes, int(fraction * total_bytes))
        return int(budget_bytes)

    def total_bytes(self) -> int:
        return int(self._functions.mem_get_info(self._device)[1])

    def non_torch_bytes(self) -> int | None:
        """Return the bytes on the device outside this process's allocator; ``None`` if unknown.

        They belong to contexts, to libraries such as NCCL, and to other processes.
        """
        if not self._functions.is_initialized():
            return None
        free_bytes, total_bytes = self._functions.mem_get_info(self._device)
        other_bytes = int(total_bytes - free_bytes) - (self.current().reserved_bytes or 0)
        # Windows may move reserved memory to the host, which makes the difference negative.
        return other_bytes if other_bytes >= 0 else None

    @contextmanager
    def limit_enforced(self, limit_bytes: int) -> Iterator[bool]:
        """Limit the reserved memory to ``limit_bytes``, and restore the previous limit at the end.

        An allocation above the limit fails. Where the allocator cannot be limited, nothing changes
        and the context yields ``False``.

        Source:
        https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.set_per_process_memory_fraction.html
        """
        previous = self._memory_fraction()
        if previous is None or not self._can_be_limited():
            yield False
            return
        total_bytes = self._functions.mem_get_info(self._device)[1]
        fraction = min(previous, limit_bytes / total_bytes)
        self._functions.set_per_process_memory_fraction(fraction, self._device)
        try:
            yield True
        finally:
            self._functions.set_per_process_memory_fraction(previous, self._device)

    def limit_causes_retries(self) -> bool:
        """Return whether segments are expandable.

        To expand a segment, the allocator compares the limit with all bytes of the new block,
        although some of its pages exist already. If that is above the limit, it releases its cache
        and tries again, with success if there is room.

        Source: `alloc_block` in c10/cuda/CUDACachingAllocator.cpp, torch 2.13
        """
        return bool(self._settings().get("expandable_segments", False))

    def release_cached(self) -> None:
        """Collect garbage, and return the allocator's free segments to the driver.

        The workspaces of cuBLAS, which lie in some of these segments, are freed too. A CUDA graph
        would still use the one of its recording, so they stay where there may be a graph.
        """
        gc.collect()
        self._functions.empty_cache()
        if self.name == "cuda" and self._functions.is_initialized() and not self._may_have_graphs():
            # The function is private in torch 2.5.1 to 2.14, and only CUDA builds have it. The next
            # matrix product makes a new workspace.
            torch._C._cuda_clearCublasWorkspaces()
            self._functions.empty_cache()

    def synchronize(self) -> None:
        self._functions.synchronize(self._device)

    def counters(self) -> dict[str, int]:
        """Return the event totals since the process started; empty before the device starts."""
        stats = self._functions.memory_stats_as_nested_dict(self._device)
        return {name: int(stats[name]) for name in _COUNTERS if name in stats}

    def _may_have_graphs(self) -> bool:
        """Whether a CUDA graph may hold memory, which lies in a pool of its own."""
        # Other allocators have no snapshot, so whether there is a graph is not known.
        if self._functions.get_allocator_backend() != "native":
            return True
        segments = self._functions.memory._snapshot()["segments"]
        return any(tuple(segment["segment_pool_id"]) != (0, 0) for segment in segments)

    def _uses_host_memory(self) -> bool:
        properties = self._functions.get_device_properties(self._device)
        # The first name is that of CUDA, the second that of XPU (torch 2.13).
        names = ("is_integrated", "is_integrated_gpu")
        return any(getattr(properties, name, False) for name in names)

    def _memory_fraction(self) -> float | None:
        # torch.cuda of torch 2.5.1 lacks this function.
        get_fraction = getattr(self._functions, "get_per_process_memory_fraction", None)
        return None if get_fraction is None else float(get_fraction(self._device))

    def _can_be_limited(self) -> bool:
        """Whether an enforced limit has no other effect than that allocations above it fail."""
        # Only torch.cuda has this function (torch 2.13). Other devices have one allocator, and
        # whether its settings allow a limit is not known, so that nothing is enforced.
        get_backend = getattr(self._functions, "get_allocator_backend", None)
        if get_backend is None or get_backend() != "native":
            return False
        # A threshold for garbage collection is ignored until a limit is set, and would apply to the
        # whole training afterwards. Without settings it is not known whether there is one.
        # Source: `set_fraction` in c10/cuda/CUDACachingAllocator.cpp, torch 2.13
        settings = self._settings()
        return bool(settings) and not settings.get("garbage_collection_threshold", 0)

    def _settings(self) -> dict[str, Any]:
        """The settings of the allocator in force, including changes at run time."""
        # Source: torch/csrc/cuda/Module.cpp, torch 2.13
        return dict(self._functions.memory._snapshot().get("allocator_settings", {}))

    def _read(self, when: str) -> MemoryStats:
        # The nested form is faster, because torch.cuda.memory_stats and max_memory_allocated
        # flatten and sort about 100 counters in every call.
        stats = self._functions.memory_stats_as_nested_dict(self._device)
        if not stats:
            return MemoryStats(0, 0, 0)
        allocated_bytes = int(stats["allocated_bytes"]["all"][when])
        reserved_bytes = int(stats["reserved_bytes"]["all"][when])
        requested_bytes: int | None = int(stats["requested_bytes"]["all"][when])
        # The allocator cudaMallocAsync does not count requested bytes.
        if requested_bytes == 0 < allocated_bytes:
            requested_bytes = None
        return MemoryStats(allocated_bytes, reserved_bytes, requested_bytes)


def cuda_utilization(device: torch.device) -> Utilization | None:
    """Return the utilization over the driver's last sample period.

    It is ``None``, with a warning, if the utilization cannot be read. It is for CUDA only, because
    ``torch.xpu.utilization`` waits for 100 ms in every call (torch 2.13).
    """

    def percent() -> float | None:
        try:
            return float(torch.cuda.utilization(device))
        # NVML, amdsmi and a missing module raise errors of unrelated types, and a missing reading
        # must not end a run.
        except Exception:  # noqa: BLE001
            return None

    if percent() is None:
        rank_zero_warn(
            "GPU utilization cannot be read and is not logged. Check nvidia-ml-py and nvidia-smi."
        )
        return None
    return Utilization("gpu_pct", percent)
