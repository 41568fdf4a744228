"""The steady training step whose memory is divided among the modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_batchmem.devices.module_memory import (
    ModuleStorages,
    PeakByModule,
    why_not_possible,
)
from lightning_batchmem.search.compiled import compiled_frames


class ModuleStep:
    """Measures the modules in the first steady step, up to the next step of an optimizer.

    Args:
        device: the device of the step.
        num_batches: so many batches are measured at most. Under gradient accumulation they make an
            optimizer step.
    """

    def __init__(self, device: torch.device, num_batches: int) -> None:
        self.peak: PeakByModule | None = None
        # This sentence stands in for the table; it is empty until the step has come.
        self.why_not = ""
        self._device_type = device.type
        self._num_batches = num_batches
        self._batches_left = num_batches
        self._storages: ModuleStorages | None = None

    def begin(self, module: Module, optimizers: Sequence[Optimizer], batch: object) -> None:
        """Begin to measure with this step, if that is possible."""
        reason = why_not_possible(module, is_compiled=compiled_frames() > 0)
        if reason:
            self.why_not = f"No table of the modules: {reason}."
            return
        self._batches_left = self._num_batches
        self._storages = ModuleStorages(module, optimizers, batch, self._device_type)
        self._storages.__enter__()

    def enter_phase(self, phase: str) -> None:
        """Do nothing: the whole step is measured."""

    def end_batch(self, *, samples: int | None, has_stepped: bool) -> bool:
        """End a batch; return whether all is measured, as after the step of an optimizer."""
        storages = self._storages
        if storages is None:
            return True
        self._batches_left -= 1
        if not has_stepped and self._batches_left > 0:
            return False
        self.close()
        self.peak = storages.peak_by_module(samples)
        return True

    def close(self) -> None:
        """Stop to measure, also in the middle of a step."""
        if self._storages is not None:
            self._storages.__exit__(None, None, None)
            self._storages = None
