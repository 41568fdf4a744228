"""What the schema of an operator has about it, and how it runs on the bytes of the device.

This file is executed before Lightning is imported, so it imports torch and the standard library
only, and neighbours that were loaded before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_batchmem.simulated_gpu.known import host_view, make_known, tensors_in

aten = torch.ops.aten

_PRODUCTS = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "matmul", "linear"),
        *("cdist", "_cdist_forward", "_euclidean_dist", "_pdist_forward"),
    }
)
"""Known factors are positions, rotations and the like, as weights are unknown."""
_PRODUCT_OPERATIONS = 2**31
"""Multiplications of a product that is computed at most: about a second on one core."""

_HEAVY = frozenset(
    {"_int_mm", "_scaled_mm", "_grouped_mm", "_trilinear", "bilinear", "_cdist_backward"}
)
_HEAVY_PARTS = (
    *("conv", "layer_norm", "batch_norm", "group_norm", "rms_norm", "attention", "flash"),
    *("lstm", "gru", "rnn", "fft", "linalg_", "cholesky", "ctc_loss", "_fused_ada", "_fused_sgd"),
    *("cudnn", "_amp_foreach", "foreach_norm"),
)
_CHEAP = frozenset({"linalg_vector_norm"})
"""The work of these operators is not bounded by the size of their tensors, or nobody reads it."""

_FROM_SHAPES = frozenset(
    {
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("randint_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    }
)
"""The values of their first argument are not read."""

_OVERWRITING = frozenset(
    {
        *("fill", "zero", "copy", "normal", "uniform", "random", "exponential", "geometric"),
        *("log_normal", "cauchy", "bernoulli", "_foreach_zero", "_foreach_copy"),
    }
)
"""In place they do not read what they overwrite."""

_UNDECLARED_VIEWS = frozenset({"_unsafe_view", "_reshape_alias"})
"""Their schema does not say that they return the memory of their argument."""

_UNDECLARED_WRITES = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "batch_norm_with_update"), (3, 4)
)
"""They write to running statistics, at these positions."""

_NAMESPACES = frozenset({"aten", "prims", "torchvision"})
"""Operators of others may do anything, and are not run twice."""

FRESH = frozenset(
    {"empty", "empty_strided", "empty_permuted", "empty_like", "new_empty", "new_empty_strided"}
)
"""They write nothing."""

_CONSTANTS: Mapping[str, bool | int | float] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero", "_foreach_zero"), 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
}
_FILLINGS = {"full": 1, "full_like": 1, "new_full": 2, "fill": 1}
"""Name -> position of the number with which they fill."""


@dataclass(frozen=True, slots=True)
class Operator:
    """What the schema of an operator has about it.

    Attributes:
        name: without the underscore of one that writes to its first argument.
        computes_values: False for one that returns a view, or changes a shape or a stream.
        is_cheap: whether its work on the host is bounded by the size of its tensors.
        is_product: whether it is a product or a distance, whose work has another bound.
        overwrites: whether it does not read the tensors to which it writes.
        written: positions of the arguments to which it writes.
        out: names of those that it only writes.
        has_own_memory: for each result, whether it has memory of its own.
        is_exchange: whether ranks exchange tensors.
    """

    name: str
    computes_values: bool
    is_cheap: bool
    is_product: bool
    overwrites: bool
    written: tuple[int, ...]
    out: tuple[str, ...]
    has_own_memory: tuple[bool, ...]
    is_exchange: bool

    def read_tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors whose values decide about the results."""
        if self.name in _FROM_SHAPES:
            return []
        if self.overwrites and not self.out:
            args = [value for i, value in enumerate(args) if i not in self.written]
        elif self.name == "bernoulli" and len(args) > 1 and not isinstance(args[1], Tensor):
            args = args[1:]
        if not kwargs:
            return [*tensors_in(args)]
        named = [value for key, value in kwargs.items() if key not in self.out]
        return [*tensors_in(args), *tensors_in(named)]

    def is_short(self, read: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
        """Whether the host computes it in about a second."""
        if not self.is_product:
            return True
        longest = max((size for tensor in read for size in tensor.shape[-1:]), default=1)
        return longest * sum(tensor.numel() for tensor in made) <= _PRODUCT_OPERATIONS

    def written_tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of the device to which it writes."""
        values = [args[i] for i in self.written if i < len(args)]
        values += [kwargs[name] for name in self.out if name in kwargs]
        return [tensor for tensor in tensors_in(values) if tensor.is_cuda]

    def fresh_tensors(self, result: Any) -> list[Tensor]:
        """The results with memory of their own."""
        if isinstance(result, Tensor):
            return [result] if self.has_own_memory[0] else []
        if not isinstance(result, (list, tuple)):
            return []
        if len(self.has_own_memory) == 1:
            return [*tensors_in(result)] if self.has_own_memory[0] else []
        fresh = [value for value, own in zip(result, self.has_own_memory, strict=True) if own]
        return [*tensors_in(fresh)]


def describe(function: Any) -> Operator:
    """Read the schema of an operator."""
    schema = function._schema
    name: str = function.overloadpacket.__name__
    written = tuple(i for i, argument in enumerate(schema.arguments) if _is_written(argument))
    written = written or _UNDECLARED_WRITES.get(name, ())
    out = tuple(schema.arguments[i].name for i in written if schema.arguments[i].kwarg_only)
    if written and not name.endswith("__"):
        name = name.removesuffix("_")
    returns_views = any(result.alias_info is not None for result in schema.returns)
    is_view = (not written and returns_views) or name in _UNDECLARED_VIEWS
    only_reshapes = torch.Tag.inplace_view in function.tags or name == "record_stream"
    is_heavy = name in _HEAVY or any(part in name for part in _HEAVY_PARTS)
    return Operator(
        name=name,
        computes_values=not (is_view or only_reshapes),
        is_cheap=function.namespace in _NAMESPACES and (not is_heavy or name in _CHEAP),
        is_product=name in _PRODUCTS,
        overwrites=bool(out) or (bool(written) and name in _OVERWRITING),
        written=written,
        out=out,
        has_own_memory=tuple(result.alias_info is None for result in schema.returns),
        is_exchange=function.namespace == "c10d",
    )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def is_on_device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator has a tensor of the device, or makes one."""
    for value in args:
        if isinstance(value, Tensor):
            if value.is_cuda:
                return True
        # The tensors of a list are on one device, and a loader stacks many.
        elif isinstance(value, (list, tuple)) and value:
            first = value[0]
            if isinstance(first, Tensor) and first.is_cuda:
                return True
    if kwargs:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            return True
        return any(isinstance(value, Tensor) and value.is_cuda for value in kwargs.values())
    return False


def constant_of(name: str, args: Any) -> bool | int | float | None:
    """The number that an operator writes to all elements."""
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    position = _FILLINGS.get(name)
    if position is not None and position < len(args):
        number = args[position]
        if isinstance(number, (bool, int, float)):
            return number
    return None


def on_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the bytes of the device; NotImplemented if the host has no kernel.

    Any other error is one of the program: on a device it would be an assert.
    """
    host_args = [_host_value(value) for value in args]
    host_kwargs = {key: _host_value(value) for key, value in kwargs.items()}
    try:
        return func(*host_args, **host_kwargs)
    except NotImplementedError:
        return NotImplemented
    except RuntimeError as error:
        if "not implemented for" in str(error):
            return NotImplemented
        raise


def _host_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return host_view(value) if value.is_cuda else value
    if isinstance(value, (list, tuple)):
        return [_host_value(item) for item in value]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    # The generator of the device has no values.
    return None if isinstance(value, torch.Generator) else value


def to_device(values: Any, device: torch.device) -> Any:
    """Return known tensors of the device with these values of the host."""
    if isinstance(values, Tensor):
        return make_known(torch.empty_like(values, device=device), values)
    if isinstance(values, (list, tuple)):
        return tuple(to_device(value, device) for value in values)
    return values
