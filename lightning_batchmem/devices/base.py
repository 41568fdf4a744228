"""Types that every device shares."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol


class MemoryStats(NamedTuple):
    """Memory of this process on one device, now or at its peak.

    Attributes:
        allocated_bytes: blocks in use (host: the resident set).
        reserved_bytes: memory that the allocator holds, its cache included; ``None`` on the host.
        requested_bytes: sizes that were requested, before rounding to blocks; ``None`` where not counted (host).
    """

    allocated_bytes: int
    reserved_bytes: int | None = None
    requested_bytes: int | None = None


class Utilization(NamedTuple):
    """Utilization of a device: the metric's name, and a function that returns a percentage or ``None``."""

    key: str
    percent: Callable[[], float | None]


class DeviceMemory(Protocol):
    """Memory of this process on one device.

    Attributes:
        name: ``"cuda"`` or ``"host"``, for messages and metric names.
        granularity_bytes: largest difference between two peaks of the same step, due to whole blocks or pages.
    """

    name: str
    granularity_bytes: int

    def reset_peak(self) -> None:
        """Restart the peak from the memory in use now, for the whole process."""

    def peak(self) -> MemoryStats:
        """Return the peak since :meth:`reset_peak`, without waiting for the device."""

    def current(self) -> MemoryStats:
        """Return the memory in use now."""

    def private_bytes(self) -> int:
        """Return the memory in use now that is not shared with files or other processes."""

    def budget_bytes(self) -> int:
        """Return the most that this process can hold: what it holds now, and what it can still get."""

    def non_torch_bytes(self) -> int | None:
        """Return the device memory in use outside this process's allocator; ``None`` if unknown."""

    def limit_enforced(self, limit_bytes: int) -> AbstractContextManager[bool]:
        """Make allocations above ``limit_bytes`` fail inside the context; it yields ``False`` if that is impossible."""

    def release_cached(self) -> None:
        """Collect garbage and return cached memory, so that the next peak does not depend on earlier work."""

    def synchronize(self) -> None:
        """Wait for all work of the device."""

    def counters(self) -> dict[str, int]:
        """Return event totals (CUDA: ``num_ooms``, ``num_alloc_retries``, ``num_device_free``); empty on the host."""
