"""A device whose use of memory is set by the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_batchmem.devices.base import MemoryStats


class FakeDevice:
    """A ``DeviceMemory`` whose use is set by the test, in bytes.

    A ``training_step`` calls ``use(fixed + per_sample * batch_size)`` and ``free()``. Several such
    pairs in one step make a peak that is the maximum of several lines. Use above the budget raises
    torch's out-of-memory error and changes nothing.

    Args:
        available_bytes: the most that can be in use; may be changed at any time, in ``budget``.
        base_bytes: in use from the start and after ``free()``.
    """

    name = "cuda"
    granularity_bytes = 0
    is_host = False
    reports_requested_bytes = True

    def __init__(self, available_bytes: int, base_bytes: int = 0) -> None:
        self.budget = available_bytes
        self.enforces_limits = False
        self.has_expandable_segments = False
        # If set, reserved bytes are this multiple of allocated bytes.
        self.reserved_ratio: float | None = None
        self.num_ooms = 0
        self.num_alloc_retries = 0
        self.num_releases = 0
        self._base_bytes = base_bytes
        self._kept_bytes = 0
        self._current_bytes = base_bytes
        self._peak_bytes = base_bytes

    def as_host(self) -> None:
        """Behave as the memory of the host."""
        self.name = "host"
        self.is_host = True
        self.reports_requested_bytes = False
        self.enforces_limits = False

    def use(self, size_bytes: int) -> None:
        """Use ``size_bytes`` more; raises ``torch.cuda.OutOfMemoryError`` above the budget."""
        wanted_bytes = self._current_bytes + size_bytes
        if wanted_bytes > self.budget:
            self.num_ooms += 1
            raise torch.cuda.OutOfMemoryError(
                f"CUDA out of memory. {wanted_bytes} of {self.budget} bytes (fake)."
            )
        self._current_bytes = wanted_bytes
        self._peak_bytes = max(self._peak_bytes, wanted_bytes)

    def free(self) -> None:
        """Free all but ``base_bytes``."""
        self._current_bytes = self._base_bytes

    def keep(self, size_bytes: int) -> None:
        """Keep ``size_bytes`` in use, besides ``base_bytes``, until other bytes are kept."""
        self._current_bytes += size_bytes - self._kept_bytes
        self._base_bytes += size_bytes - self._kept_bytes
        self._kept_bytes = size_bytes
        self._peak_bytes = max(self._peak_bytes, self._current_bytes)

    def reset_peak(self) -> None:
        self._peak_bytes = self._current_bytes

    def peak(self) -> MemoryStats:
        return self._reading(self._peak_bytes)

    def current(self) -> MemoryStats:
        return self._reading(self._current_bytes)

    def peak_and_private_bytes(self) -> tuple[int, int]:
        return self._peak_bytes, self._current_bytes

    def available_bytes(self) -> int:
        return self.budget

    def non_torch_bytes(self) -> None:
        """Return nothing: no other process uses the device."""

    @contextmanager
    def limit_enforced(self, limit_bytes: int) -> Iterator[bool]:
        if not self.enforces_limits:
            yield False
            return
        previous = self.budget
        self.budget = min(previous, limit_bytes)
        try:
            yield True
        finally:
            self.budget = previous

    def release_cached(self) -> None:
        self.num_releases += 1

    def synchronize(self) -> None:
        """Return at once: the device has no pending work."""

    def counters(self) -> dict[str, int]:
        return {"num_ooms": self.num_ooms, "num_alloc_retries": self.num_alloc_retries}

    def _reading(self, size_bytes: int) -> MemoryStats:
        reserved_bytes = None
        if self.reserved_ratio is not None:
            reserved_bytes = int(size_bytes * self.reserved_ratio)
        return MemoryStats(size_bytes, reserved_bytes)
