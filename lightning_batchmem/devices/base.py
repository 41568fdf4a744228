"""Readings of a device's memory, and the capabilities that a search depends on.

The contract of ``DeviceMemory``:

- All numbers are integer bytes of this process, except the budget, which other processes reduce.
- ``reset_peak`` and then ``peak`` give the highest use in between; a device without such a counter
  has no ``DeviceMemory``.
- A reading that a device does not have is ``None``, and an event that it does not count is not in
  ``counters``.
- Nothing but ``synchronize`` waits for the device.
- A reading does not start the device: before that this process holds 0 bytes. Only
  ``available_bytes`` and ``limit_enforced`` may start it.
- ``reset_peak`` and ``peak`` are called in every step, so they take microseconds.
- ``release_cached`` frees garbage too, which :class:`Garbage` collects for every device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol


class MemoryStats(NamedTuple):
    """Memory of this process on one device, now or at its peak.

    Attributes:
        allocated_bytes: blocks in use (host: the resident set).
        reserved_bytes: memory that the allocator holds, its cache included; ``None`` on the host.
        requested_bytes: sizes that were requested, before rounding to blocks; ``None`` where not
            counted (host).
    """

    allocated_bytes: int
    reserved_bytes: int | None = None
    requested_bytes: int | None = None


class PeakCounter(Protocol):
    """Reads the bytes in use, and their peak since a reset."""

    def reset_peak(self) -> None:
        """Begin a new peak at the bytes that are in use now."""

    def peak(self) -> MemoryStats:
        """Return the highest use since :meth:`reset_peak`."""

    def current(self) -> MemoryStats:
        """Return the use at this moment."""


class DeviceMemory(PeakCounter, Protocol):
    """Memory of this process on one device. The contract is at the top of the file.

    Attributes:
        name: ``"host"``, or ``"cuda"`` for CUDA and ROCm, as torch names both.
        granularity_bytes: peaks of equal steps may differ by this much.
        is_host: whether this is the memory of the host. There the held bytes are the resident set
            of the process, with its interpreter and libraries. All ranks and loader workers of the
            machine share it, and a process that exceeds it is ended without an error.
        reports_requested_bytes: whether ``requested_bytes`` are known. If not, a dispatch mode has
            to count live bytes.
    """

    name: str
    granularity_bytes: int
    is_host: bool
    reports_requested_bytes: bool

    @property
    def has_expandable_segments(self) -> bool:
        """Whether the segments of the allocator can grow.

        To expand one, it compares the limit with all bytes of the new block, although some of its
        pages exist already. If that is above the limit, it releases its cache and tries again, with
        success if there is room.

        Source: `alloc_block` in c10/cuda/CUDACachingAllocator.cpp, torch 2.13
        """

    def peak_and_private_bytes(self) -> tuple[int, int]:
        """Return the highest use since :meth:`reset_peak`, and what no other process shares now."""

    def available_bytes(self) -> int:
        """Return the most that this process may hold at this moment, with what it holds."""

    def non_torch_bytes(self) -> int | None:
        """Return the bytes in use outside of this process's allocator; ``None`` if unknown."""

    def limit_enforced(self, limit_bytes: int) -> AbstractContextManager[bool]:
        """Make allocations above ``limit_bytes`` fail; yields whether the device can do so."""

    def release_cached(self) -> None:
        """Collect garbage, and return memory that is not in use."""

    def synchronize(self) -> None:
        """Wait until all work of the device has ended."""

    def counters(self) -> dict[str, int]:
        """Return totals of the allocator's events since the process started.

        The keys are ``num_ooms``, ``num_alloc_retries`` and ``num_device_free``, as far as the
        device counts them.
        """


class Garbage:
    """The garbage of this process, which may hold memory of a device.

    A full collection looks through every object of every imported library, which takes 0.2 s in a
    process with Lightning. Nearly all garbage of a trial is young, and a collection of young
    objects takes less than a millisecond. What it misses shows as memory that stays in use, and
    then a full collection follows.

    Args:
        noise_bytes: the memory in use may differ by this much although nothing is held.
    """

    def __init__(self, noise_bytes: int) -> None:
        self._noise_bytes = noise_bytes
        # The least that was in use since the last full collection, and after it.
        self._least_bytes: int | None = None

    def collect(self, release: Callable[[], int]) -> None:
        """Collect it, and release what it held.

        Args:
            release: gives free memory back, and returns the bytes that are still in use.
        """
        gc.collect(1)
        used_bytes = release()
        if self._least_bytes is None or used_bytes > self._least_bytes + self._noise_bytes:
            gc.collect()
            used_bytes = self._least_bytes = release()
        self._least_bytes = min(self._least_bytes, used_bytes)
