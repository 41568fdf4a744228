"""Types that every device shares."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol


class MemoryStats(NamedTuple):
    """Memory of this process on one device.

    Args:
        allocated_bytes: bytes that hold something (host: the resident set).
        reserved_bytes: bytes that the allocator took from the device; ``None`` where there is no such thing.
    """

    allocated_bytes: int
    reserved_bytes: int | None = None


class DeviceMemory(Protocol):
    """One device's memory, as this process sees it.

    Attributes:
        name: ``"cuda"``, ``"host"`` or ``"mps"``; for people and for metric names.
        has_peak: whether :meth:`peak` is a true peak since :meth:`reset_peak`, not just the value at the moment.
        repeatability: by what share of its growth with the batch the peak at one size may differ from one process to
            the next (0.0 where the allocator is deterministic).
        resolution_bytes: what two peaks may differ by although the step needed the same: the allocator hands out
            whole blocks, the kernel whole pages.
    """

    name: str
    has_peak: bool
    repeatability: float
    resolution_bytes: int

    def reset_peak(self) -> None:
        """Let the peak start again from what is in use now. Seen by everybody in the process."""
        ...

    def peak(self) -> MemoryStats:
        """Highest use since :meth:`reset_peak`. Neither synchronises the device nor waits for it."""
        ...

    def current(self) -> MemoryStats:
        """Use at this moment."""
        ...

    def own_bytes(self) -> int:
        """What nobody else could take back, at this moment: the host's file pages, which the kernel drops, left out."""
        ...

    def in_use_bytes(self) -> int | None:
        """What was asked of an allocator and not freed; ``None`` where allocated bytes are just that, or unknown."""
        ...

    def budget_bytes(self) -> int:
        """The most that this process may hold: what it holds now and what it could still get."""
        ...

    def outside_bytes(self) -> int | None:
        """What the device holds outside this process's allocator; ``None`` where there is none, or nobody knows."""
        ...

    def release_cached(self) -> None:
        """Give back what is cached but unused, so that the next peak does not depend on what ran before."""
        ...

    def limit_enforced(self, limit_bytes: int) -> AbstractContextManager[bool]:
        """Enforce a limit on what the allocator may take; yields whether it is enforced."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all its work (for timing probes; never called during training)."""
        ...

    def counters(self) -> dict[str, int]:
        """Running totals of events worth an alarm (CUDA: ``num_ooms``, ``num_alloc_retries``); empty elsewhere."""
        ...


class Utilization(Protocol):
    """How busy a device is.

    Attributes:
        key: the metric's name, ``"gpu_pct"`` or ``"cpu_pct"``.
    """

    key: str

    def percent_since_last_call(self) -> float | None:
        """Busy share since the previous call, 0 to 100 (since construction at the first); ``None`` when unknown."""
        ...


class Timer(Protocol):
    """Times of work that a device does on its own, read later: neither method waits for it."""

    def mark(self) -> Any:
        """A moment of the device's: when it has done what it was given so far on the current stream."""
        ...

    def seconds_between(self, earlier: Any, later: Any) -> float | None:
        """Seconds from one mark to another; ``None`` as long as the device has not reached both."""
        ...
