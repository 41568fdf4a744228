"""Peak memory of each phase of a step; used by the search and by the MemoryProfiler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.measure.live_bytes import LiveStorages, RequestedBytes


class StepPeaks(NamedTuple):
    """The peaks of one step.

    Args:
        phase_peak_bytes: phase -> highest allocated bytes in it.
        peak_reserved_bytes: highest reserved bytes; None if the device reserves none.
    """

    phase_peak_bytes: dict[str, int]
    peak_reserved_bytes: int | None = None

    @property
    def peak_bytes(self) -> int:
        """Highest allocated bytes in the step; 0 if nothing was read."""
        return max(self.phase_peak_bytes.values(), default=0)


class PhasePeaks:
    """Measures the peak of each phase of a step: ``start``, any number of ``enter``, ``stop``.

    A phase that is entered twice (manual optimization with several optimizers) keeps its higher peak. Every boundary
    resets the device's peak. Without a device nothing is read.
    """

    def __init__(self, device_memory: DeviceMemory | LiveStorages | RequestedBytes | None) -> None:
        self._device_memory = device_memory
        self._phase: str | None = None
        self._peaks: dict[str, int] = {}
        self._reserved_bytes: int | None = None

    def start(self, phase: str = "forward") -> None:
        """Begin a step in ``phase``."""
        self._peaks, self._reserved_bytes = {}, None
        if self._device_memory is not None:
            self._phase = phase
            self._device_memory.reset_peak()

    def enter(self, phase: str) -> None:
        """End the current phase and begin ``phase``; outside a step nothing happens."""
        if self._phase is not None and self._device_memory is not None:
            self._close(self._phase, self._device_memory)
            self._phase = phase
            self._device_memory.reset_peak()

    def stop(self) -> StepPeaks:
        """End the step and return its peaks."""
        if self._phase is not None and self._device_memory is not None:
            self._close(self._phase, self._device_memory)
        self._phase = None
        return StepPeaks(self._peaks, self._reserved_bytes)

    def watch(self, optimizers: Iterable[Optimizer]) -> list[RemovableHandle]:
        """Begin a forward phase after each optimizer step; return the handles that end this.

        Lightning has no hook after ``optimizer.step``; in manual optimization another forward may follow it.
        """

        def begin_forward(*_: Any) -> None:
            self.enter("forward")

        return [optimizer.register_step_post_hook(begin_forward) for optimizer in optimizers]

    def _close(self, phase: str, device_memory: DeviceMemory | LiveStorages | RequestedBytes) -> None:
        stats = device_memory.peak()
        if stats.allocated_bytes > self._peaks.get(phase, -1):
            self._peaks[phase] = stats.allocated_bytes
        if stats.reserved_bytes is not None:
            self._reserved_bytes = max(self._reserved_bytes or 0, stats.reserved_bytes)
