"""Memory, work time, utilization and allocation history of a CUDA device."""

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
# device synchronization each), and segments given back to the driver.
# Source: torch.cuda.memory_stats
_COUNTERS = ("num_ooms", "num_alloc_retries", "num_device_free")


class CudaMemory:
    """Counters of PyTorch's caching allocator for one CUDA device, and free memory of the driver.

    No method but :meth:`synchronize` waits for the device, and only :meth:`budget_bytes` and
    :meth:`limit_enforced` start CUDA. Before that this process holds 0 bytes.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html
    """

    name = "cuda"
    overrun_kills = False
    counts_live_bytes = True
    held_is_resident_set = False
    shared_by_ranks = False
    holds_loader_workers = False
    # A block for more than 1 MiB may keep up to 1 MiB unsplit, so the same need may count less at a
    # larger batch.
    # Source: kSmallSize in c10/core/AllocatorConfig.h, should_split in
    # c10/cuda/CUDACachingAllocator.cpp, torch 2.13
    granularity_bytes = 2 * 2**20

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset_peak(self) -> None:
        # Before CUDA starts, torch raises an error here (2.5.1 to 2.13).
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> MemoryStats:
        return self._read("peak")

    def current(self) -> MemoryStats:
        return self._read("current")

    def private_bytes(self) -> int:
        return self.current().allocated_bytes

    def evictable_bytes(self) -> int:
        """Return 0: the driver drops nothing."""
        return 0

    def budget_bytes(self) -> int:
        """Return the free memory of the driver plus the reserved memory of this process.

        It is not the device's total memory, since other processes may use a part of that.
        """
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        # An integrated GPU uses the host's memory.
        if torch.cuda.get_device_properties(self._device).is_integrated:
            free_bytes = min(free_bytes, psutil.virtual_memory().available)
        budget_bytes = free_bytes + (self.current().reserved_bytes or 0)
        if (fraction := self._memory_fraction()) is not None:
            budget_bytes = min(budget_bytes, int(fraction * total_bytes))
        return int(budget_bytes)

    def non_torch_bytes(self) -> int | None:
        """Return the bytes on the device outside this process's allocator; ``None`` if unknown.

        They belong to contexts, to libraries such as NCCL, and to other processes.
        """
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        other_bytes = int(total_bytes - free_bytes) - (self.current().reserved_bytes or 0)
        # Windows may move reserved memory to the host, which makes the difference negative.
        return other_bytes if other_bytes >= 0 else None

    @contextmanager
    def limit_enforced(self, limit_bytes: int) -> Iterator[bool]:
        """Limit the reserved memory to ``limit_bytes``, and restore the previous limit at the end.

        An allocation above the limit fails. It yields ``False`` and changes nothing where torch
        cannot report the previous limit, with another allocator than the native one, with
        expandable segments, which the limit stops too early, and with a threshold for garbage
        collection, which the allocator ignores until a limit is set, and would apply to the whole
        training afterwards.

        Source:
        https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.set_per_process_memory_fraction.html
        """
        previous = self._memory_fraction()
        if (
            previous is None
            or torch.cuda.get_allocator_backend() != "native"
            or not _can_be_limited()
        ):
            yield False
            return
        total_bytes = torch.cuda.mem_get_info(self._device)[1]
        torch.cuda.set_per_process_memory_fraction(
            min(previous, limit_bytes / total_bytes), self._device
        )
        try:
            yield True
        finally:
            torch.cuda.set_per_process_memory_fraction(previous, self._device)

    def release_cached(self) -> None:
        """Collect garbage, and return the allocator's free segments to the driver."""
        gc.collect()
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def counters(self) -> dict[str, int]:
        """Return the event totals since the process started; empty before CUDA starts."""
        stats = self._stats()
        return {name: int(stats[name]) for name in _COUNTERS if name in stats}

    def _memory_fraction(self) -> float | None:
        # This function does not exist in torch 2.5.1.
        get_fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        return None if get_fraction is None else float(get_fraction(self._device))

    def _read(self, when: str) -> MemoryStats:
        if not (stats := self._stats()):
            return MemoryStats(0, 0, 0)
        kinds = (stats[f"{kind}_bytes"]["all"] for kind in ("allocated", "reserved", "requested"))
        allocated_bytes, reserved_bytes, requested_bytes = (int(kind[when]) for kind in kinds)
        # The allocator cudaMallocAsync does not count requested bytes.
        if requested_bytes == 0 < allocated_bytes:
            return MemoryStats(allocated_bytes, reserved_bytes)
        return MemoryStats(allocated_bytes, reserved_bytes, requested_bytes)

    def _stats(self) -> dict[str, Any]:
        # The nested form is faster, because torch.cuda.memory_stats and max_memory_allocated
        # flatten and sort about 100 counters in every call.
        return torch.cuda.memory_stats_as_nested_dict(self._device)


class CudaTimer:
    """Seconds of a CUDA device's work between two events.

    They are read later, without waiting for the device.

    Source: https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__EVENT.html
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Record an event after all work submitted so far to the device's current stream.

        The first event starts CUDA.
        """
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # Without a stream, the event would be recorded on the current device, which may be another
        # one.
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, earlier: Any, later: Any) -> float | None:
        """Return the seconds between two events; ``None`` until the device has reached both."""
        # On every stream, elapsed_time raises an error while one of the events is not reached.
        if not (later.query() and earlier.query()):
            return None
        return float(earlier.elapsed_time(later)) / 1000


def cuda_utilization(device: torch.device) -> Utilization | None:
    """Return the utilization over the driver's last sample period.

    It is ``None``, with a warning, if the utilization cannot be read.
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


def _can_be_limited() -> bool:
    # The snapshot has the settings in force, including changes at run time. The result is False if
    # they are unknown, so that nothing is enforced.
    # Source: torch/csrc/cuda/Module.cpp; `set_fraction` in c10/cuda/CUDACachingAllocator.cpp,
    # torch 2.13
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return not (
        settings.get("expandable_segments", True) or settings.get("garbage_collection_threshold", 0)
    )
