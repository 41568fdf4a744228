"""What the memory of a run's steps is made of: looked at once, in the first step that is like those to come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.measure.breakdown import MemoryBreakdown, measure_breakdown
from lightning_batchmem.measure.estimate import Estimate, estimate_parts

_LOOKS = 3
"""How many steps may be looked at for gradients that outlive a step; where nobody keeps them there are none."""


class Composition:
    """The parts of a run's memory.

    Args:
        device_memory: of the device that is used.
        device: tensors elsewhere are not counted.
        module: before the first step.
        optimizers: its optimizers; none in an evaluation.

    Attributes:
        estimate: what arithmetic says of the parts; ``None`` before they were taken.
        outside_bytes: what the device held beside this process's allocator then; ``None`` where that is not told.
    """

    def __init__(
        self,
        device_memory: DeviceMemory,
        device: torch.device,
        module: LightningModule,
        optimizers: Iterable[Optimizer],
    ) -> None:
        self.estimate: Estimate | None = None
        self.outside_bytes: int | None = None
        self._device_memory, self._device = device_memory, device
        self._breakdown: MemoryBreakdown | None = None
        self._looks = 0
        self._steady_peak_bytes = 0
        self._rest_bytes = self._rest_before(module, optimizers)

    @property
    def is_due(self) -> bool:
        """Whether the next steady step should be looked at."""
        return self._looks < _LOOKS

    def take(self, module: LightningModule, optimizers: Iterable[Optimizer], batch: object) -> None:
        """Look at what is alive as a step begins; its peak follows in :meth:`saw`."""
        optimizers = list(optimizers)
        start_bytes = self._device_memory.current().allocated_bytes
        breakdown = measure_breakdown(module, optimizers, batch, self._device, start_bytes=start_bytes)
        if self._rest_bytes is not None:
            breakdown = replace(breakdown, other_bytes=min(breakdown.other_bytes, self._rest_bytes))
        self._breakdown = breakdown
        self.estimate = estimate_parts(module, optimizers, batch, self._device)
        if not optimizers:  # an evaluation has no gradients
            self.estimate = replace(self.estimate, gradients_bytes=0)
        self.outside_bytes = self._device_memory.non_torch_bytes()
        self._looks = _LOOKS if breakdown.gradients_bytes or not optimizers else self._looks + 1

    def saw(self, peak_bytes: int) -> None:
        """A step ended with this peak; those before the first look are not like the others."""
        if self._breakdown is not None:
            self._steady_peak_bytes = max(self._steady_peak_bytes, peak_bytes)

    @property
    def breakdown(self) -> MemoryBreakdown | None:
        """The parts at the highest peak since they were taken; ``None`` before a step has ended since then."""
        if self._breakdown is None or not self._steady_peak_bytes:
            return None
        return self._breakdown.at_peak(self._steady_peak_bytes)

    def at_failure(
        self, module: LightningModule, optimizers: Iterable[Optimizer], batch: object, peak_bytes: int
    ) -> MemoryBreakdown:
        """The parts inside a step that did not end: all that is not known to be something else is activations."""
        breakdown = measure_breakdown(module, optimizers, batch, self._device, start_bytes=0)
        other_bytes = self._rest_bytes or 0 if self._breakdown is None else self._breakdown.other_bytes
        return replace(breakdown, other_bytes=other_bytes).at_peak(peak_bytes)

    def _rest_before(self, module: LightningModule, optimizers: Iterable[Optimizer]) -> int | None:
        """What is in use beside the module before the first step, where it cannot be told later.

        The resident set still holds what the step before has freed (the heap keeps it), which is activations by right.
        An allocator that counts what it reserves counts the freed apart: ``None``.
        """
        if self._device_memory.current().reserved_bytes is not None:
            return None
        self._device_memory.release_cached()
        now_bytes = self._device_memory.current().allocated_bytes
        return measure_breakdown(module, optimizers, None, self._device, start_bytes=now_bytes).other_bytes
