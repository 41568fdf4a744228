"""Memory and utilization of a CUDA device; ROCm has this name too."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from lightning_batchmem.devices.base import Garbage, MemoryStats
from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.devices.host import free_bytes_of_host

# They count failed allocations, allocations that succeeded only after the cache was released (a
# device synchronization each), and segments given back to the driver.
# Source: torch.cuda.memory_stats, torch 2.13
_COUNTERS = ("num_ooms", "num_alloc_retries", "num_device_free")


class AcceleratorMemory:
    """Counters of PyTorch's caching allocator for one device, and free memory of the driver.

    No method but :meth:`synchronize` waits for the device, and only :meth:`available_bytes` and
    :meth:`limit_enforced` start it. Before that this process holds 0 bytes.

    Args:
        device: the device.
        functions: module with the functions of ``torch.cuda``.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html
    """

    name = "cuda"
    is_host = False
    reports_requested_bytes = True
    # A block for more than 1 MiB may keep up to 1 MiB unsplit, so the same need may count less at a
    # larger batch.
    # Source: kSmallSize in c10/core/AllocatorConfig.h, should_split in
    # c10/cuda/CUDACachingAllocator.cpp, torch 2.13
    granularity_bytes = 2 * 2**20

    def __init__(self, device: torch.device, functions: Any = torch.cuda) -> None:
        # torch looks up the index of a device in each call, which takes some microseconds.
        self._device = device if device.index is None else device.index
        self._functions = functions
        # The allocator counts each byte.
        self._garbage = Garbage(noise_bytes=0)

    @property
    def has_expandable_segments(self) -> bool:
        return bool(self._settings.get("expandable_segments"))

    def reset_peak(self) -> None:
        # Before CUDA starts, torch raises an error here (2.5.1 to 2.14).
        if self._functions.is_initialized():
            self._functions.reset_peak_memory_stats(self._device)

    def peak(self) -> MemoryStats:
        return self._read("peak")

    def current(self) -> MemoryStats:
        return self._read("current")

    def peak_and_private_bytes(self) -> tuple[int, int]:
        # Both are in one reading, which takes about 20 µs.
        stats = self._functions.memory_stats_as_nested_dict(self._device)
        allocated = stats["allocated_bytes"]["all"] if stats else {"peak": 0, "current": 0}
        return int(allocated["peak"]), int(allocated["current"])

    def available_bytes(self) -> int:
        """Return the free memory of the driver plus the reserved memory of this process.

        It is not the device's total memory, since other processes may use a part of that.
        """
        free_bytes, total_bytes = self._functions.mem_get_info(self._device)
        if self._functions.get_device_properties(self._device).is_integrated:
            # It shares the memory of the host.
            free_bytes = min(free_bytes, free_bytes_of_host())
        available_bytes = free_bytes + (self.current().reserved_bytes or 0)
        fraction = self._memory_fraction()
        if fraction is not None:
            available_bytes = min(available_bytes, int(fraction * total_bytes))
        return int(available_bytes)

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
        settings = self._settings
        # A threshold for garbage collection is ignored until a limit is set, and would apply to the
        # whole training afterwards. Without settings it is not known whether there is one.
        # Source: `set_fraction` in c10/cuda/CUDACachingAllocator.cpp, torch 2.13
        if previous is None or not settings or settings.get("garbage_collection_threshold"):
            yield False
            return
        fraction = min(previous, limit_bytes / self._functions.mem_get_info(self._device)[1])
        self._functions.set_per_process_memory_fraction(fraction, self._device)
        try:
            yield True
        finally:
            self._functions.set_per_process_memory_fraction(previous, self._device)

    def release_cached(self) -> None:
        """Collect garbage, and return the allocator's free segments to the driver.

        The workspaces of cuBLAS, which lie in some of these segments, are freed too. A CUDA graph
        would still use the one of its recording, so they stay where there may be a graph.
        """
        self._garbage.collect(self._empty_cache)

    def synchronize(self) -> None:
        self._functions.synchronize(self._device)

    def counters(self) -> dict[str, int]:
        """Return the event totals since the process started; empty before the device starts."""
        stats = self._functions.memory_stats_as_nested_dict(self._device)
        return {name: int(stats[name]) for name in _COUNTERS if name in stats}

    def _empty_cache(self) -> int:
        """Return the free segments, and the bytes that are in use after it."""
        self._functions.empty_cache()
        if self._functions.is_initialized() and not self._may_have_graphs():
            # The function is private in torch 2.5.1 to 2.14. The next matrix product makes a new
            # workspace.
            torch._C._cuda_clearCublasWorkspaces()
            self._functions.empty_cache()
        return self.current().allocated_bytes

    def _may_have_graphs(self) -> bool:
        """Whether a CUDA graph may hold memory, which lies in a pool of its own."""
        # The other allocator does not count pools, so whether there is a graph is not known.
        if self._functions.get_allocator_backend() != "native":
            return True
        stats = self._functions.memory_stats_as_nested_dict(self._device)
        # Versions before torch 2.13 lack this counter.
        pools = stats.get("reserved_bytes_by_private_pools")
        if pools is None:
            segments = self._functions.memory_snapshot()
            return any(tuple(segment["segment_pool_id"]) != (0, 0) for segment in segments)
        return any(pool["all"]["current"] > 0 for pool in pools.values())

    def _memory_fraction(self) -> float | None:
        # torch.cuda of torch 2.5.1 lacks this function.
        get_fraction = getattr(self._functions, "get_per_process_memory_fraction", None)
        return None if get_fraction is None else float(get_fraction(self._device))

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The settings of torch's own allocator at their first use, with changes at run time.

        They are read once, because a snapshot has all segments.

        Source: torch/csrc/cuda/Module.cpp, torch 2.13
        """
        if self._functions.get_allocator_backend() != "native":
            return {}
        # A history has up to millions of events, which older versions cannot leave out.
        # Source: torch.cuda.memory_snapshot, torch 2.13
        if "include_traces" in inspect.signature(self._functions.memory_snapshot).parameters:
            snapshot = torch._C._cuda_memorySnapshot((0, 0, False))
        else:
            snapshot = self._functions.memory._snapshot()
        return dict(snapshot.get("allocator_settings", {}))

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


def counts_memory() -> bool:
    """Whether the allocator of CUDA in this process counts its memory.

    Allocators of other libraries, such as RMM, do not. One without a cache, as for
    compute-sanitizer, counts nothing.

    Source: https://docs.pytorch.org/docs/stable/cuda_environment_variables.html
    """
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        return False
    return torch.cuda.get_allocator_backend() in ("native", "cudaMallocAsync")


def cuda_utilization(device: torch.device) -> Callable[[], float | None] | None:
    """Return what reads the utilization over the driver's last sample period, in per cent.

    It is ``None``, with a warning, if the utilization cannot be read.
    """

    # NVML, amdsmi and a missing module raise errors of unrelated types.
    def percent() -> float | None:
        return value_or_none("GPU utilization", torch.cuda.utilization, device)

    return None if percent() is None else percent


def replays_graphs(device: torch.device) -> bool:
    """Whether ``torch.compile`` has recorded CUDA graphs on a device.

    Their memory lies in private pools of the allocator. A replay allocates nothing, so counters of
    allocated bytes miss it. Reserved bytes have it.
    """
    if device.type != "cuda":
        return False
    # The module is private in torch 2.5.1 to 2.14, and is imported when the first graph is made.
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    return trees.get_manager(device.index, create_if_none_exists=False) is not None
