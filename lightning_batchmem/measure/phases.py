"""Hook marks to the peak of each phase of a training step; shared by the finder's probes and the MemoryProfiler."""

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
        phase_peak_bytes: phase -> highest allocated bytes while it ran.
        peak_reserved_bytes: highest reserved bytes inside the step; ``None`` where nothing is reserved.
    """

    phase_peak_bytes: dict[str, int]
    peak_reserved_bytes: int | None = None

    @property
    def peak_bytes(self) -> int:
        """Highest allocated bytes inside the step."""
        return max(self.phase_peak_bytes.values(), default=0)


class PhasePeaks:
    """Splits a step at the marks that Lightning's hooks give, and keeps the peak of each part.

    A step is ``start``, any number of ``enter``, ``stop``. A phase entered twice (manual optimization with several
    optimizers) keeps its higher peak. Every boundary resets the meter's peak.

    Args:
        device_memory: the device that is asked.
    """

    def __init__(self, device_memory: DeviceMemory | LiveStorages | RequestedBytes) -> None:
        self._device_memory = device_memory
        self._phase: str | None = None
        self._peaks: dict[str, int] = {}
        self._reserved: int | None = None

    def start(self, phase: str = "forward") -> None:
        """Begin a step in ``phase``."""
        self._peaks, self._reserved, self._phase = {}, None, phase
        self._device_memory.reset_peak()

    def enter(self, phase: str) -> None:
        """Close the phase that runs and begin ``phase``; outside a step nothing happens."""
        if self._phase is None:
            return
        self._close(self._phase)
        self._phase = phase
        self._device_memory.reset_peak()

    def stop(self) -> StepPeaks:
        """End the step and return its peaks."""
        if self._phase is not None:
            self._close(self._phase)
        self._phase = None
        return StepPeaks(self._peaks, self._reserved)

    def watch(self, optimizers: Iterable[Optimizer]) -> list[RemovableHandle]:
        """Mark the end of each optimizer's step as the begin of the next forward.

        Lightning has no hook after ``optimizer.step``, and a second forward follows it under manual optimization.

        Returns:
            Handles to ``remove()`` when the optimizers are no longer watched.
        """

        def stepped(*_: Any) -> None:
            self.enter("forward")

        return [optimizer.register_step_post_hook(stepped) for optimizer in optimizers]

    def _close(self, phase: str) -> None:
        reading = self._device_memory.peak()
        if reading.allocated_bytes > self._peaks.get(phase, -1):
            self._peaks[phase] = reading.allocated_bytes
        if reading.reserved_bytes is not None:
            self._reserved = max(self._reserved or 0, reading.reserved_bytes)
