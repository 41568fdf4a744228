"""The steady training step whose floating-point operations are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_batchmem.devices import device_name
from lightning_batchmem.devices.module_memory import why_not_possible
from lightning_batchmem.devices.peak_flops import peak_flops, uses_tf32
from lightning_batchmem.search.compiled import compiled_frames

if TYPE_CHECKING:
    from lightning_batchmem.devices.flop_counter import FlopCounter


class FlopRate(NamedTuple):
    """What a device computes: TFLOP/s, and per cent of its peak (None if that is unknown)."""

    tflops_per_device: float
    mfu_pct: float | None


class FlopStep:
    """Counts the floating-point operations of one batch, and scales them with the samples.

    Args:
        device: the device of the step.
        precision: the precision of the Trainer.
        peak_flops: the peak of the device in FLOP/s; None to take it from the table.
    """

    def __init__(self, device: torch.device, precision: str, peak_flops: float | None) -> None:
        self.flops_per_sample: float | None = None
        self.why_not = "No FLOPs: the run ended before the step that counts them."
        self._device = device
        self._precision = precision
        self._peak_flops = peak_flops
        self._counter: FlopCounter | None = None
        self._hooks: list[RemovableHandle] = []

    def begin(self, module: Module, optimizers: Sequence[Optimizer], batch: object) -> None:
        """Begin to count with this batch, if that is possible."""
        reason = why_not_possible(module, is_compiled=compiled_frames() > 0)
        if reason:
            self.why_not = f"No FLOPs: {reason}."
            return
        # The flop counter of torch loads Triton, or warns that there is none.
        from lightning_batchmem.devices.flop_counter import FlopCounter

        counter = FlopCounter(module)

        def end_step(*_: Any) -> None:
            counter.end_optimizer_step()

        self._hooks = [optimizer.register_step_post_hook(end_step) for optimizer in optimizers]
        self._counter = counter
        counter.__enter__()

    def enter_phase(self, phase: str) -> None:
        """Note that a phase of the step begins."""
        if self._counter is None:
            return
        if phase == "optimizer_step":
            self._counter.begin_optimizer_step()
        else:
            self._counter.continue_step()

    def end_batch(self, *, samples: int | None, peak_bytes: int | None) -> None:
        """End the batch."""
        counter = self._counter
        if counter is None:
            return
        self.close()
        reason = counter.why_wrong
        if compiled_frames() > 0:
            reason = "torch.compile compiled a part of the step"
        elif not samples:
            reason = "the number of samples in the batch is unknown"
        self.why_not = f"No FLOPs: {reason}." if reason else ""
        if not reason and samples:
            self.flops_per_sample = counter.flops / samples
            self._find_peak(has_convolutions=counter.has_convolutions)

    def close(self) -> None:
        """Stop to count, also in the middle of a step."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def rate(self, samples_per_second: float | None) -> FlopRate | None:
        """Return what a device computes at this speed of its own; None if that is unknown."""
        if self.flops_per_sample is None or samples_per_second is None:
            return None
        flops_per_second = self.flops_per_sample * samples_per_second
        mfu_pct = None
        if self._peak_flops is not None:
            mfu_pct = 100.0 * flops_per_second / self._peak_flops
        return FlopRate(flops_per_second / 1e12, mfu_pct)

    def metrics(self, samples_per_second: float | None) -> dict[str, float]:
        """Return the metrics of the loggers, without the unknown ones."""
        rate = self.rate(samples_per_second)
        if rate is None:
            return {}
        metrics = {"throughput/tflops_per_device": rate.tflops_per_device}
        if rate.mfu_pct is not None:
            metrics["throughput/mfu_pct"] = rate.mfu_pct
        return metrics

    def _find_peak(self, *, has_convolutions: bool) -> None:
        if self._peak_flops is not None:
            return
        name = device_name(self._device)
        self._peak_flops = peak_flops(
            name, self._precision, uses_tf32=uses_tf32(has_convolutions=has_convolutions)
        )
        if self._peak_flops is None:
            self.why_not = (
                f"No MFU: the peak of {name} with precision {self._precision} is unknown. Set"
                " peak_flops."
            )
