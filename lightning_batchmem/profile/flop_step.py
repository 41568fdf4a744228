"""The steady training step whose floating-point operations are counted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_batchmem.devices import device_name
from lightning_batchmem.plan.records import device_text

# Operators with such names multiply matrices. Those of the second pattern compute what follows the
# multiplication, or reorder weights.
_MULTIPLIES = re.compile(
    r"mm_?$|matmul|einsum|attention|attn|rnn|lstm|gru|conv(?!ert)|linear$|transformer"
)
_MULTIPLIES_NOTHING = re.compile(r"_thnn_|flatten_weight|reorder")
# The key is the first part of the Trainer's precision.
_DTYPES = {"64": torch.float64, "32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class FlopRate:
    """The floating-point operations of a run; None is unknown.

    Args:
        flops_per_sample: operations of a sample in forward and backward.
        tflops_per_device: 1e12 of these per second of wall time, on one device.
        mfu_pct: the same in per cent of the device's peak.
        why_not: why one of these three is unknown; empty if they are known.
    """

    flops_per_sample: float | None = None
    tflops_per_device: float | None = None
    mfu_pct: float | None = None
    why_not: str = ""


# TorchDispatchMode.__init_subclass__ has no type annotations.
class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the floating-point operations of a step by formulas.

    It is entered before a step and left after it, and runs exactly the operators of the step. So
    the training is the same, bit for bit. ``torch.utils.flop_counter.FlopCounterMode`` divides
    some operators into others, such as the backward of Mish, and these round differently (torch
    2.13).

    Args:
        formulas: the keys are operators, as in torch's ``flop_registry``.
    """

    # They are run as they are, and none of them has a formula.
    supports_higher_order_operators = True

    def __init__(self, formulas: Mapping[Any, Callable[..., int]]) -> None:
        # TorchDispatchMode.__init__ has no type annotations.
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        # Why the number is not the model's; empty if it is.
        self.why_wrong = ""
        self._formulas = formulas

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operator = getattr(func, "overloadpacket", func)
        name = str(operator)
        formula = self._formulas.get(operator)
        if formula is None:
            if _MULTIPLIES.search(name) and not _MULTIPLIES_NOTHING.search(name):
                # The first one is in the forward pass.
                reason = f"torch has no formula for the operator {name}"
                self.why_wrong = self.why_wrong or reason
            return result
        # Backward needs no gradients of its own, unless it computes a forward pass again.
        # This number is private in torch 2.5 to 2.14, as in its own ModuleTracker.
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            self.why_wrong = (
                "backward computes activations again (activation checkpointing), or gradients of"
                " gradients"
            )
        try:
            self.flops += formula(*args, **kwargs, out_val=result)
        # A formula may fail for shapes that its author did not expect, and the step goes on.
        except Exception as error:  # noqa: BLE001
            self.why_wrong = f"torch's formula for the operator {name} failed ({error})"
        return result


class FlopStep:
    """Counts the floating-point operations of one batch, and scales them with the samples.

    Args:
        device: the device of the step.
        precision: the precision of the Trainer.
        peak_flops: the peak of the device in FLOP/s; None to take it from Lightning's table.
    """

    def __init__(self, device: torch.device, precision: str, peak_flops: float | None) -> None:
        self.flops_per_sample: float | None = None
        self.why_not = "No FLOPs: the run ended before the step that counts them."
        self._device = device
        self._precision = precision
        self._peak_flops = peak_flops
        self._counter = FlopCounter({})
        self._entered = ExitStack()

    def begin(self, module: Module, optimizers: Sequence[Optimizer], batch: object) -> None:
        """Begin to count with this batch."""
        self._counter = FlopCounter(formulas())
        self._entered.enter_context(self._counter)

    def end(self, samples: int | None, peak_bytes: int | None) -> None:
        """Use what was counted."""
        counter = self._counter
        if counter.why_wrong:
            self.refuse(counter.why_wrong)
        elif not counter.flops:
            self.refuse("no operator of the step has a formula")
        elif not samples:
            self.refuse("the number of samples in the batch is unknown")
        else:
            self.flops_per_sample = counter.flops / samples
            self.why_not = ""
            if self._peak_flops is None:
                self._peak_flops = peak_flops(self._device, self._precision)
            if self._peak_flops is None:
                self.why_not = (
                    f"No MFU: the peak of {device_text(device_name(self._device))} with precision"
                    f" {self._precision} is unknown. Set peak_flops."
                )

    def refuse(self, reason: str) -> None:
        """Note why nothing can be counted."""
        self.why_not = f"No FLOPs: {reason}."

    def close(self) -> None:
        """Stop to count, also in the middle of a step."""
        self._entered.close()

    def rate(self, samples_per_second: float | None) -> FlopRate:
        """Return what a device computes at this speed of its own."""
        tflops = mfu_pct = None
        if self.flops_per_sample is not None and samples_per_second is not None:
            flops_per_second = self.flops_per_sample * samples_per_second
            tflops = flops_per_second / 1e12
            if self._peak_flops is not None:
                mfu_pct = 100.0 * flops_per_second / self._peak_flops
        return FlopRate(self.flops_per_sample, tflops, mfu_pct, self.why_not)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak of a device by Lightning's table, which warns of a GPU that it lacks."""
    dtype = _DTYPES.get(precision.partition("-")[0])
    return None if dtype is None else get_available_flops(device, dtype)


def formulas() -> dict[Any, Callable[..., int]]:
    """Return the formulas of torch, with another one for the backward of a convolution."""
    # This module of torch loads Triton, or warns that there is none.
    from torch.utils.flop_counter import conv_flop_count, flop_registry

    def convolution_backward_flops(
        gradient: Any, inputs: Any, weight: Any, *others: Any, out_val: Any
    ) -> int:
        # Each multiplication of the forward pass has one in the gradient of the inputs, and one in
        # the gradient of the weight. torch multiplies the second one by the number of groups
        # (2.13). The third gradient is a sum, of the bias.
        is_transposed, _, _, is_wanted = others[4:]
        shapes = (inputs.shape, weight.shape, gradient.shape)
        num_gradients: int = sum(is_wanted[:2])
        return num_gradients * conv_flop_count(*shapes, transposed=is_transposed)

    return {**flop_registry, torch.ops.aten.convolution_backward: convolution_backward_flops}
