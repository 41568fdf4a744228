"""The memory breakdown of a run, taken in its first steady-state step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.breakdown import MemoryBreakdown, measure_breakdown


class SteadyBreakdown:
    """Memory breakdown of a run, taken in its first steady-state step."""

    def __init__(
        self,
        device_memory: DeviceMemory,
        device: torch.device,
        module: Module,
        optimizers: Iterable[Optimizer],
    ) -> None:
        # Bytes on the device outside this process's allocator.
        self.outside_bytes: int | None = None
        # The highest peak of the steps since the breakdown.
        self.peak_bytes = 0
        self._device_memory = device_memory
        self._device = device
        self._at_start: MemoryBreakdown | None = None
        # The resident set includes memory that earlier steps freed, which belongs to the
        # activations. An allocator counts freed memory separately.
        self._other_bytes: int | None = None
        if device_memory.is_host:
            device_memory.release_cached()
            now_bytes = device_memory.current().allocated_bytes
            breakdown = measure_breakdown(module, optimizers, None, device, start_bytes=now_bytes)
            self._other_bytes = breakdown.other_bytes

    @property
    def is_due(self) -> bool:
        """Whether to call :meth:`take` at the start of the next steady-state step."""
        return self._at_start is None

    def take(self, module: Module, optimizers: list[Optimizer], batch: object) -> None:
        """Measure the storages alive at the start of a step."""
        start_bytes = self._device_memory.current().allocated_bytes
        breakdown = measure_breakdown(
            module, optimizers, batch, self._device, start_bytes=start_bytes
        )
        if self._other_bytes is not None:
            other_bytes = min(breakdown.other_bytes, self._other_bytes)
            breakdown = replace(breakdown, other_bytes=other_bytes)
        self._at_start = breakdown
        self.outside_bytes = self._device_memory.non_torch_bytes()

    def add_peak(self, peak_bytes: int) -> None:
        """Add the peak of a step."""
        if self._at_start is not None and peak_bytes > self.peak_bytes:
            self.peak_bytes = peak_bytes

    def at_peak(self) -> MemoryBreakdown | None:
        """Return the breakdown at the highest peak; None before the first steady-state step."""
        if self._at_start is None or not self.peak_bytes:
            return None
        return self._at_start.at_peak(self.peak_bytes)
