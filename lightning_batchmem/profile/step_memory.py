"""The memory of a step: its peak, and in some steps what is held when it starts."""

from __future__ import annotations

import torch

from lightning_batchmem.devices.base import DeviceMemory, MemoryStats
from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.devices.tensors import bytes_of, tensors_in

PEAK = "The memory of a step"


class StepMemory:
    """Reads the memory of the steps of a run.

    Args:
        device_memory: the memory; None if it cannot be measured.
        device: the device of the steps.
    """

    def __init__(self, device_memory: DeviceMemory | None, device: torch.device) -> None:
        # What was held at the start of this step; None where it was not read.
        self.start_bytes: int | None = None
        # The last of these.
        self.last_start_bytes = 0
        self._device_memory = device_memory
        self._device = device
        # It is read at the start of this step, the next time. The first step has no gradients and
        # states yet.
        self._next_reading = 2

    def start(self, batch: object, steps: int | None) -> None:
        """Begin a step.

        Args:
            batch: its batch.
            steps: how many steps of the run have begun; None in a validation within a training.
        """
        self.start_bytes = None
        device_memory = self._device_memory
        if device_memory is None:
            return
        if value_or_none(PEAK, _has_reset, device_memory) is None:
            self._device_memory = None
        elif steps is not None and steps >= self._next_reading:
            self._next_reading = next_reading(steps)
            held = value_or_none(PEAK, held_bytes, device_memory, batch, self._device)
            if held is not None:
                self.start_bytes = self.last_start_bytes = held[1]

    def peak(self) -> MemoryStats | None:
        """Return the highest use in the step; None if it is unknown."""
        device_memory = self._device_memory
        return None if device_memory is None else value_or_none(PEAK, device_memory.peak)


def _has_reset(device_memory: DeviceMemory) -> bool:
    device_memory.reset_peak()
    return True


def held_bytes(device_memory: DeviceMemory, batch: object, device: torch.device) -> tuple[int, int]:
    """Return the peak since its reset, and the bytes that this process holds without a batch."""
    peak_bytes, count_bytes = device_memory.peak_and_private_bytes()
    # On the host a batch may lie in memory that is shared with the workers of its loader.
    if not device_memory.is_host:
        count_bytes -= bytes_of(tensors_in(batch), device)
    return peak_bytes, count_bytes


def next_reading(step: int) -> int:
    """Return the step after ``step`` at whose start the memory in use is read.

    The gap is a 48th of the steps so far. It is one step until step 96, so a leak is found early.
    Later it grows, so each doubling of the steps has 48 * ln(2) = 33 readings, and no work with a
    fixed period falls on all of them.
    """
    return step + max(1, step // 48)
