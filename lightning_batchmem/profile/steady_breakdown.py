"""The memory breakdown of a run, and the phase of the peak of the step in which it is taken."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.breakdown import (
    MemoryBreakdown,
    gradient_bytes,
    measure_breakdown,
)
from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.profile.step_memory import PEAK, held_bytes


class PeakPhase:
    """Notes the phase of a step in which its peak is reached.

    The peak is read at the end of each phase, and not restarted: others may read it too.
    """

    def __init__(self, device_memory: DeviceMemory) -> None:
        # The phase in which the peak rose last; empty if it did not rise.
        self.of_peak = ""
        self._device_memory = device_memory
        # The phase that runs now; empty outside of the step.
        self.now = ""
        self._peak_bytes = 0

    def start(self) -> None:
        """Begin with forward."""
        device_memory = self._device_memory
        self.of_peak = ""
        self._peak_bytes = device_memory.peak().allocated_bytes
        self.now = "forward"
        if device_memory.is_host:
            # Memory that was freed may be used again.
            self._peak_bytes += device_memory.granularity_bytes

    def enter(self, phase: str) -> None:
        """End a phase, and begin another one; an empty one ends the step."""
        peak_bytes = self._device_memory.peak().allocated_bytes
        if peak_bytes > self._peak_bytes:
            self._peak_bytes = peak_bytes
            self.of_peak = self.now
        self.now = phase


class SteadyBreakdown:
    """The memory breakdown of a run, taken at the start of its first steady step."""

    def __init__(
        self,
        device_memory: DeviceMemory,
        device: torch.device,
        module: Module,
        optimizers: list[Optimizer],
    ) -> None:
        # The highest peak of the steps since the breakdown, and what was held before that step.
        self.peak_bytes = 0
        self._start_bytes = 0
        # The same when the breakdown was taken.
        self._taken_bytes: float = 0
        self._gradients_bytes = 0
        self.phases = PeakPhase(device_memory)
        self._device_memory = device_memory
        self._device = device
        self._module = module
        self._optimizers = optimizers
        self._at_start: MemoryBreakdown | None = None
        # Numbers in the parameters that got gradients then.
        self._num_trained = 0
        # The resident set includes memory that earlier steps freed, which belongs to the
        # activations. An allocator counts freed memory separately.
        self._other_bytes: int | None = None
        if device_memory.is_host:
            device_memory.release_cached()
            now_bytes = device_memory.current().allocated_bytes
            breakdown = measure_breakdown(module, optimizers, None, device, start_bytes=now_bytes)
            self._other_bytes = breakdown.other_bytes

    def has_changed(self) -> bool:
        """Return whether other parameters get gradients than when it was taken."""
        return self._num_trained != _num_trained(self._module)

    def forget(self) -> None:
        """Forget what was measured, to take the breakdown again."""
        self._at_start = None
        self.peak_bytes = self._gradients_bytes = 0

    @property
    def is_due(self) -> bool:
        """Whether to call :meth:`take` at the start of the next steady step."""
        return self._at_start is None

    def take(self, batch: object, number: int) -> None:
        """Measure the storages alive at the start of the step with this number."""
        start_bytes = self._device_memory.current().allocated_bytes
        breakdown = measure_breakdown(
            self._module, self._optimizers, batch, self._device, start_bytes=start_bytes
        )
        if self._other_bytes is not None:
            other_bytes = min(breakdown.other_bytes, self._other_bytes)
            breakdown = replace(breakdown, other_bytes=other_bytes)
        held = value_or_none(PEAK, held_bytes, self._device_memory, batch, self._device)
        self._taken_bytes = math.inf if held is None else held[1]
        outside_bytes = self._device_memory.non_torch_bytes()
        self._at_start = replace(breakdown, step=number, outside_bytes=outside_bytes)
        self._num_trained = _num_trained(self._module)
        if self._optimizers:
            value_or_none(PEAK, self.phases.start)

    def add_gradients(self) -> None:
        """Measure the gradients after a step of an optimizer."""
        count_bytes = gradient_bytes(self._module, self._optimizers, self._device)
        self._gradients_bytes = max(self._gradients_bytes, count_bytes)

    def add_peak(self, peak_bytes: int, start_bytes: int) -> None:
        """Take a peak above :attr:`peak_bytes`, and the bytes held at the last start."""
        if self._at_start is not None:
            self.peak_bytes = peak_bytes
            self._start_bytes = start_bytes

    def at_peak(self, *, is_leak: bool) -> MemoryBreakdown | None:
        """Return the breakdown at the highest peak; None before the first steady step.

        Args:
            is_leak: whether the memory grew steadily. On the host other growth may be memory that
                was freed.
        """
        if self._at_start is None or not self.peak_bytes:
            return None
        device_memory = self._device_memory
        # Gradients that were freed before the breakdown may be accumulated before the peak.
        more_bytes = max(0, self._gradients_bytes - self._at_start.gradients_bytes)
        kept_bytes = self._start_bytes - self._taken_bytes - more_bytes
        # Equal steps may differ by this much.
        is_kept = kept_bytes > device_memory.granularity_bytes
        if device_memory.is_host:
            is_kept &= is_leak
        at_start = replace(self._at_start, phase=self.phases.of_peak)
        # At a peak in forward only the gradients of the step before exist.
        has_gradients = self.phases.of_peak != "forward"
        return at_start.at_peak(
            self.peak_bytes,
            gradients_bytes=self._gradients_bytes if has_gradients else 0,
            kept_bytes=int(kept_bytes) if is_kept else 0,
        )


def _num_trained(module: Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
