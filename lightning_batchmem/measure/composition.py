"""What the memory of a run's steps is made of: looked at once, in the first step that is like those to come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from lightning_batchmem.devices import Meter
from lightning_batchmem.measure.breakdown import Parts, measure_parts
from lightning_batchmem.measure.estimate import Estimate, estimate_parts

_LOOKS = 3
"""How many steps may be looked at for gradients that outlive a step; where nobody keeps them there are none."""


class Composition:
    """The parts of a run's memory.

    Args:
        meter: of the device that is used.
        device: tensors elsewhere are not counted.
        module: before the first step.
        optimizers: its optimizers; none in an evaluation.

    Attributes:
        estimate: what arithmetic says of the parts; ``None`` before they were taken.
        outside_bytes: what the device held beside this process's allocator then; ``None`` where that is not told.
    """

    def __init__(
        self, meter: Meter, device: torch.device, module: LightningModule, optimizers: Iterable[Optimizer]
    ) -> None:
        self.estimate: Estimate | None = None
        self.outside_bytes: int | None = None
        self._meter, self._device = meter, device
        self._parts: Parts | None = None
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
        start_bytes = self._meter.current().allocated_bytes
        parts = measure_parts(module, optimizers, batch, self._device, start_bytes=start_bytes)
        if self._rest_bytes is not None:
            parts = replace(parts, rest_bytes=min(parts.rest_bytes, self._rest_bytes))
        self._parts = parts
        self.estimate = estimate_parts(module, optimizers, batch, self._device)
        if not optimizers:  # an evaluation has no gradients
            self.estimate = replace(self.estimate, gradients_bytes=0)
        self.outside_bytes = self._meter.outside_bytes()
        self._looks = _LOOKS if parts.gradients_bytes or not optimizers else self._looks + 1

    def saw(self, peak_bytes: int) -> None:
        """A step ended with this peak; those before the first look are not like the others."""
        if self._parts is not None:
            self._steady_peak_bytes = max(self._steady_peak_bytes, peak_bytes)

    @property
    def parts(self) -> Parts | None:
        """The parts at the highest peak since they were taken; ``None`` before a step has ended since then."""
        if self._parts is None or not self._steady_peak_bytes:
            return None
        return self._parts.at_peak(self._steady_peak_bytes)

    def at_failure(
        self, module: LightningModule, optimizers: Iterable[Optimizer], batch: object, peak_bytes: int
    ) -> Parts:
        """The parts inside a step that did not end: all that is not known to be something else is activations."""
        parts = measure_parts(module, optimizers, batch, self._device, start_bytes=0)
        rest_bytes = self._rest_bytes or 0 if self._parts is None else self._parts.rest_bytes
        return replace(parts, rest_bytes=rest_bytes).at_peak(peak_bytes)

    def _rest_before(self, module: LightningModule, optimizers: Iterable[Optimizer]) -> int | None:
        """What is in use beside the module before the first step, where it cannot be told later.

        The resident set still holds what the step before has freed (the heap keeps it), which is activations by right.
        An allocator that counts what it reserves counts the freed apart: ``None``.
        """
        if self._meter.current().reserved_bytes is not None:
            return None
        self._meter.release_cached()
        now_bytes = self._meter.current().allocated_bytes
        return measure_parts(module, optimizers, None, self._device, start_bytes=now_bytes).rest_bytes
