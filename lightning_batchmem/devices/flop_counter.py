"""Floating-point operations of a step, counted operator by operator."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import Module
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    conv_flop_count,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)
from torch.utils.hooks import RemovableHandle

from lightning_batchmem.devices.tensors import tensors_in

# The forward pass of these always multiplies matrices.
_MULTIPLYING_MODULES = (
    nn.Linear,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)

# Operators of torch with such names multiply matrices. Those of the second pattern only compute
# what follows the multiplication, or reorder weights.
_MULTIPLIES = re.compile(
    r"mm_?$|matmul|einsum|attention|rnn|lstm|gru|conv(?!ert)|linear$|transformer"
)
_MULTIPLIES_NOTHING = re.compile(r"^_thnn_|flatten_weight|reorder")

# The operators in these namespaces are torch's own. Those of the others but "aten" compute no
# floating-point numbers: they exchange tensors, and mark times.
_TORCH_NAMESPACES = frozenset(
    {
        "aten",
        "prim",
        "prims",
        "c10d",
        "c10d_functional",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "fsdp",
        "profiler",
    }
)


def _convolution_backward_flops(
    gradient: Any,
    inputs: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    is_transposed: bool,
    output_padding: Any,
    groups: Any,
    output_mask: Any,
    **_: Any,
) -> int:
    """Count as often as the forward pass for each gradient that is wanted.

    Each multiplication of the forward pass has one in the gradient of the inputs, and one in that
    of the weight. The formula of torch multiplies the second one by the number of groups (2.13).
    """
    forward = conv_flop_count(inputs.shape, weight.shape, gradient.shape, transposed=is_transposed)
    num_gradients: int = sum(output_mask[:2])
    return forward * num_gradients


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    # It has no type annotations.
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward_flops(
    gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> int:
    shapes = (gradient.shape, query.shape, key.shape, value.shape)
    # It has no type annotations.
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


# These replace a formula of torch, or add one that torch lacks (2.13): that of attention on the
# CPU. The keys are the operators.
_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _attention_backward_flops
    ),
}


class _Counts(NamedTuple):
    flops: int = 0
    has_convolutions: bool = False
    # The first operator that multiplies matrices, or may do so, and has no formula.
    uncounted: str = ""


# TorchDispatchMode.__init_subclass__ has no type annotations.
class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the floating-point operations of a step with the formulas of torch's flop counter.

    It is entered before a step and left after it, and runs exactly the operators of the step. So
    the training is the same, bit for bit. ``torch.utils.flop_counter.FlopCounterMode`` divides
    some operators into others, such as the backward of Mish, and these round differently (torch
    2.13).

    Args:
        root: the root of all modules.
    """

    def __init__(self, root: Module) -> None:
        # TorchDispatchMode.__init__ has no type annotations.
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(module): name for name, module in root.named_modules()}
        self._counts = _Counts()
        self._before_optimizer: _Counts | None = None
        # Operations so far, at the begin of each forward pass that runs now.
        self._begun: list[int] = []
        self._recomputes = False
        self._idle_module = ""
        self._handles: list[RemovableHandle] = []

    @property
    def flops(self) -> int:
        """The operations of the step, without those of its optimizers."""
        return self._counts.flops

    @property
    def has_convolutions(self) -> bool:
        return self._counts.has_convolutions

    @property
    def why_wrong(self) -> str:
        """Why the number is not that of the model; empty if it is."""
        if self._recomputes:
            return (
                "backward computes activations again (activation checkpointing), or gradients of"
                " gradients"
            )
        if self._idle_module:
            return f"torch has no formula for what {self._idle_module} computes"
        if self._counts.uncounted:
            return (
                f"torch has no formula for the operator {self._counts.uncounted}"
                " (torch.utils.flop_counter.register_flop_formula adds one)"
            )
        return "" if self.flops else "no operator of the step has a formula"

    def __enter__(self) -> FlopCounter:
        self._handles = [
            register_module_forward_pre_hook(self._begin_forward),
            register_module_forward_hook(self._end_forward, always_call=True),
        ]
        # TorchDispatchMode.__enter__ has no type annotations.
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        # TorchDispatchMode.__exit__ has no type annotations.
        super().__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operator = func.overloadpacket
        formula = _FORMULAS.get(operator) or flop_registry.get(operator)
        counts = self._counts
        if formula is not None:
            # Backward needs no gradients of its own, unless it computes a forward pass again.
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
                self._recomputes = True
            try:
                flops = int(formula(*args, **kwargs, out_val=result))
            # A formula may fail for shapes that its author did not expect, and the step goes on.
            except Exception:  # noqa: BLE001
                self._counts = counts._replace(uncounted=counts.uncounted or str(operator))
                return result
            self._counts = counts._replace(
                flops=counts.flops + flops,
                has_convolutions=counts.has_convolutions or "conv" in str(operator),
            )
        elif not counts.uncounted and _needs_formula(str(operator)):
            self._counts = counts._replace(uncounted=str(operator))
        return result

    def begin_optimizer_step(self) -> None:
        """Note that an optimizer's step may follow, whose operations do not count."""
        self._before_optimizer = self._counts

    def continue_step(self) -> None:
        """Note that what followed was no optimizer's step but another forward pass."""
        self._before_optimizer = None

    def end_optimizer_step(self) -> None:
        """Forget the operations since :meth:`begin_optimizer_step`.

        It is called more than once where several optimizers step, and where the step of a subclass
        calls that of its base class.
        """
        if self._before_optimizer is not None:
            self._counts = self._before_optimizer

    def _begin_forward(self, module: Module, inputs: object) -> None:
        # This number is private in torch 2.5 to 2.14, as in its own ModuleTracker.
        if torch._C._current_graph_task_id() != -1:
            self._recomputes = True
        if isinstance(module, _MULTIPLYING_MODULES):
            self._begun.append(self.flops)

    def _end_forward(self, module: Module, inputs: object, outputs: object) -> None:
        if not isinstance(module, _MULTIPLYING_MODULES):
            return
        is_idle = self._begun.pop() == self.flops
        # An expert of a mixture may get no sample.
        if is_idle and any(tensor.numel() for tensor in tensors_in(outputs)):
            name = self._names.get(id(module), "a module")
            self._idle_module = f"{name} ({type(module).__name__})"


@lru_cache(maxsize=4096)
def _needs_formula(operator: str) -> bool:
    """Whether an operator without a formula may multiply matrices, by its name."""
    namespace, _, name = operator.partition(".")
    if namespace not in _TORCH_NAMESPACES:
        return True
    return bool(_MULTIPLIES.search(name)) and not _MULTIPLIES_NOTHING.search(name)
