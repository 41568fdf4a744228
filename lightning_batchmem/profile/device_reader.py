"""Read a device between two steps: its limit, its utilization and events of its allocator."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from lightning_batchmem.devices import utilization_for
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.cpu import usable_cores
from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.profile.step import DeviceReading


class DeviceReader:
    """Reads a device between two steps.

    Args:
        device: the device.
        device_memory: its memory; None if it cannot be measured.
        max_limit_bytes: the limit of a plan, which may be below that of the device.
    """

    # All of this changes slowly, and reading it takes system calls.
    interval_seconds = 1.0

    def __init__(
        self, device: torch.device, device_memory: DeviceMemory | None, max_limit_bytes: float
    ) -> None:
        self.device_name = device.type if device_memory is None else device_memory.name
        # The cores that this process may use; None on a device.
        self.cores = usable_cores() if device.type == "cpu" else None
        self._device = device
        self._device_memory = device_memory
        self._max_limit_bytes = max_limit_bytes
        self._utilization = utilization_for(device)
        # The events of a search before the run do not count.
        self._events_before = self._counters()
        # A utilization begins with the reading before, so the first reading has none.
        self.last = DeviceReading(limit_bytes=self._limit_bytes())
        self._next_reading = time.monotonic()

    def read(self) -> DeviceReading | None:
        """Read the device; None if the last reading is younger than a second."""
        if time.monotonic() < self._next_reading:
            return None
        self._next_reading = time.monotonic() + self.interval_seconds
        before = self._events_before
        events: dict[str, Any] = {
            name: max(0, count - before.get(name, 0)) or None
            for name, count in self._counters().items()
            if name in DeviceReading._fields
        }
        self.last = self.last._replace(
            limit_bytes=self._limit_bytes(), **events, **self._utilization_now()
        )
        return self.last

    def expire(self) -> None:
        """Read the device the next time, however young the last reading is."""
        self._next_reading = -math.inf

    def ignore_failure(self) -> None:
        """Leave the allocation that ends a run out of those that failed.

        If another library than torch raised the error, its allocator has counted nothing.
        """
        self._events_before = {
            name: count + (name == "num_ooms") for name, count in self._events_before.items()
        }

    def leave_out(self) -> None:
        """Leave the time until now out of the utilization, which the next reading has again."""
        self._utilization_now()
        self.last = self.last._replace(gpu_percent=None, cpu_percent=None)

    def _utilization_now(self) -> dict[str, Any]:
        """Return the utilization since the last call, under its name; empty if it is unknown."""
        percent = None if self._utilization is None else self._utilization()
        name = "gpu_percent" if self._device.type == "cuda" else "cpu_percent"
        return {} if percent is None else {name: percent}

    def _limit_bytes(self) -> int | None:
        if self._device_memory is None:
            return None
        available_bytes = value_or_none(
            "The limit of the memory", self._device_memory.available_bytes
        )
        return None if available_bytes is None else int(min(available_bytes, self._max_limit_bytes))

    def _counters(self) -> dict[str, int]:
        if self._device_memory is None:
            return {}
        return value_or_none("The counters of the allocator", self._device_memory.counters) or {}
