"""Read a device between two steps: its limit, its utilization and the allocator's retries."""

from __future__ import annotations

import time

import torch

from lightning_batchmem.devices import utilization_for
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.profile.step_record import DeviceReading

_RETRIES = "num_alloc_retries"


class DeviceReader:
    """Reads a device between two steps.

    Args:
        device: the device.
        device_memory: its memory; ``None`` if it cannot be measured.
        max_limit_bytes: the limit of a plan, which may be below that of the device.

    Attributes:
        limit_bytes: what this process may hold, at the last reading.
    """

    # The limit and the retries change slowly, and reading them takes system calls.
    memory_interval_seconds = 1.0

    def __init__(
        self, device: torch.device, device_memory: DeviceMemory | None, max_limit_bytes: float
    ) -> None:
        self.limit_bytes: int | None = None
        # Those of a search before the run do not count.
        self._retries_before = 0
        self._device_memory = device_memory
        self._max_limit_bytes = max_limit_bytes
        self._utilization = utilization_for(device)
        if device_memory is not None:
            self._read_limit(device_memory)
            self._retries_before = device_memory.counters().get(_RETRIES, 0)

    def read(self) -> DeviceReading:
        """Read the device. The memory is left out if it was read a short time ago."""
        device_memory = self._device_memory
        utilization = self.read_utilization()
        if device_memory is None or time.monotonic() < self._next_reading:
            return DeviceReading(utilization=utilization)
        limit_bytes = self._read_limit(device_memory)
        retries = device_memory.counters().get(_RETRIES)
        if retries is not None:
            retries -= self._retries_before
        return DeviceReading(limit_bytes, utilization, retries)

    def read_utilization(self) -> tuple[str, float] | None:
        """Return the metric's name, and per cent since the last call."""
        percent = None if self._utilization is None else self._utilization.percent()
        if self._utilization is None or percent is None:
            return None
        return self._utilization.key, percent

    def _read_limit(self, device_memory: DeviceMemory) -> int:
        self._next_reading = time.monotonic() + self.memory_interval_seconds
        self.limit_bytes = int(min(device_memory.budget_bytes(), self._max_limit_bytes))
        return self.limit_bytes
