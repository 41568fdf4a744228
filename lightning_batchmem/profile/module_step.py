"""The steady training step whose memory is divided among the modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_batchmem.devices.module_memory import has_own_tensors
from lightning_batchmem.profile.module_memory import ModuleBytes, PeakByModule
from lightning_batchmem.search.compiled import compiled_frames

_COMPILED = "torch.compile compiled a part of the step"


class ModuleStep:
    """Measures the modules in the first steady step.

    Args:
        device: the device of the step.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak: PeakByModule | None = None
        # This sentence stands in for the table; it is empty until the step has come.
        self.why_not = ""
        self._device = device
        self._optimizers: Sequence[Optimizer] = ()
        self._bytes: ModuleBytes | None = None

    def begin(self, module: Module, optimizers: Sequence[Optimizer], batch: object) -> None:
        """Begin to measure with this step, if that is possible."""
        reason = ""
        if compiled_frames() > 0:
            reason = _COMPILED
        elif has_own_tensors(module):
            reason = "some parameters are of a type of their own, as under FSDP2"
        if reason:
            self._refuse(reason)
            return
        self._optimizers = optimizers
        self._bytes = ModuleBytes(module, self._device, batch)
        self._bytes.begin()

    def enter_phase(self, phase: str) -> None:
        """End the forward pass where backward begins."""
        if self._bytes is not None:
            self._bytes.end_forward()

    def end_batch(self, *, samples: int | None, peak_bytes: int | None) -> None:
        """End the step."""
        measured = self._bytes
        if measured is None:
            return
        self.close()
        if compiled_frames() > 0:
            self._refuse(_COMPILED)
        else:
            self.peak = measured.peak(self._optimizers, peak_bytes, samples)

    def close(self) -> None:
        """Stop to measure, also in the middle of a step."""
        if self._bytes is not None:
            self._bytes.end_forward()
            self._bytes = None

    def _refuse(self, reason: str) -> None:
        self.why_not = f"No table of the modules: {reason}."
