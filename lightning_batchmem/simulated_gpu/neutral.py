"""Operators of unknown tensors, evaluated on the one number that stands for all elements.

Comparisons and logic of unknown values have to fit together: a check and the check of its opposite
may not both hold. So each is evaluated on one number, which is 1.0 or -1.0 for floats, 0 for whole
numbers, and true or false for masks. Checks for NaN and infinity are certain: they find nothing.

This file is executed before Lightning is imported, so it imports torch and the standard library
only.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_batchmem.simulated_gpu.known import (
    WRITTEN,
    Number,
    Uniform,
    covers_its_storage,
    host_view,
    is_exact,
    is_known,
    is_storage_small,
    materialize,
    neutral_number,
    state_of,
)

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_LOGIC = {
    "logical_and": "and",
    "bitwise_and": "and",
    "__and__": "and",
    "mul": "and",
    "logical_or": "or",
    "bitwise_or": "or",
    "__or__": "or",
    "add": "or",
    "logical_xor": "xor",
    "bitwise_xor": "xor",
    "__xor__": "xor",
    "logical_not": "not",
    "bitwise_not": "not",
}
_FINITE = {
    "isnan": False,
    "isinf": False,
    "isposinf": False,
    "isneginf": False,
    "isfinite": True,
}
# The sign of the first tensor is that of the result.
_KEEPING = frozenset(
    {
        "_to_copy",
        "clone",
        "copy",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "index",
        "index_select",
        "gather",
        "cat",
        "stack",
        "repeat",
        "flip",
        "roll",
        "lerp",
        "contiguous",
        "constant_pad_nd",
        "masked_fill",
        "tril",
        "triu",
        "select_backward",
        "slice_backward",
    }
)
# They take elements at positions that another tensor has.
_PICKING = frozenset(
    {"index", "_unsafe_index", "index_select", "gather", "take", "take_along_dim", "masked_select"}
)
# They put values into a tensor at positions that another one has. The values are the argument with
# this position.
_PLACING = {"scatter": 3, "index_copy": 3, "index_put": 2, "_index_put_impl": 2}
_PRODUCTS = frozenset({"mul", "div", "dot", "vdot"})

CERTAIN_MASKS = frozenset({*_LOGIC, "any", "all", "_is_any_true", "_is_all_true"})
"""Operators of masks that are certain if each of their masks has one certain value."""


def number_of(tensor: Tensor) -> Number:
    """The number that stands for a tensor; that of its type if its values differ."""
    if tensor.is_cuda:
        state = state_of(tensor)
        if isinstance(state, Uniform):
            return _as_type(state.number, tensor.dtype)
        if state is WRITTEN and tensor.numel() == 1 and not tensor.is_conj():
            return _item(host_view(tensor))
    elif tensor.is_cpu and tensor.numel() == 1:
        return _item(tensor)
    return neutral_number(tensor.dtype)


def _largest(tensor: Tensor) -> Number:
    """The largest of known whole numbers."""
    if tensor.numel() == 0 or not is_storage_small(tensor):
        return neutral_number(tensor.dtype)
    if not tensor.is_cuda:
        return tensor.max().item()
    materialize(tensor)
    return host_view(tensor).max().item()


def _item(tensor: Tensor) -> Number:
    value = tensor.item()
    return 1.0 if isinstance(value, complex) else value


def _as_type(number: Number, dtype: torch.dtype) -> Number:
    """A number as it is after a conversion."""
    if dtype == torch.bool:
        return number if number is None else bool(number)
    if number is None:
        number = True
    if is_exact(dtype):
        # An unknown float may be any index.
        return 0 if isinstance(number, float) else int(number)
    return float(number)


def evaluated(name: str, args: Sequence[Any], made: Tensor) -> Uniform:
    """The state of a result that depends on unknown values.

    Args:
        name: of the operator, without the underscore of one that writes to its first argument.
        args: its arguments.
        made: the result.
    """
    if name in _FINITE:
        return Uniform(_FINITE[name], is_certain=True)
    is_mask = made.dtype == torch.bool
    if name in _COMPARISONS and is_mask and len(args) > 1:
        return _compared(name, args[0], args[1], made)
    if name in _LOGIC and is_mask:
        return Uniform(_logic(_LOGIC[name], args))
    first = args[0] if args else None
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    if not isinstance(first, Tensor):
        return Uniform(neutral_number(made.dtype))
    if is_exact(made.dtype) and is_exact(first.dtype) and not is_mask:
        if name in _PICKING and is_known(first):
            # Any of the numbers may be picked: the largest makes the largest shape.
            return Uniform(_largest(first))
        if name in _PLACING and isinstance(args[_PLACING[name]], Tensor):
            return Uniform(_as_type(number_of(args[_PLACING[name]]), made.dtype))
        if name == "sort":
            return Uniform(_as_type(number_of(first), made.dtype))
    number = number_of(first)
    if name in ("any", "_is_any_true"):
        return Uniform(number is None or bool(number))
    if name in ("all", "_is_all_true"):
        # Checks of arguments, as those of torch.distributions, hold.
        return Uniform(number is not None)
    if name in ("sum", "count_nonzero") and is_exact(first.dtype):
        return Uniform(_count(first, number, made))
    if name in _PRODUCTS and made.is_floating_point():
        return Uniform(_sign(args[0]) * (_sign(args[1]) if len(args) > 1 else 1.0))
    if name == "sub" and made.is_floating_point() and len(args) > 1:
        return Uniform(_difference(args[0], args[1]))
    if name == "neg" and made.is_floating_point():
        return Uniform(-_sign(first))
    if name == "sum" or name in _KEEPING or (is_mask and first.dtype == torch.bool):
        return Uniform(_as_type(number, made.dtype))
    return Uniform(neutral_number(made.dtype))


def _count(mask: Tensor, number: Number, made: Tensor) -> Number:
    """A sum of whole numbers; all elements of a mask count, as in the shapes made of it."""
    elements = mask.numel() // max(1, made.numel())
    if mask.dtype == torch.bool or number is None:
        return elements
    return int(number) * elements


def _sign(value: Any) -> float:
    number = number_of(value) if isinstance(value, Tensor) else value
    return -1.0 if isinstance(number, (int, float)) and number < 0 else 1.0


def _difference(left: Any, right: Any) -> float:
    """Unknown values fall, as a loss does: the later of two vectors is the smaller one.

    LBFGS needs a difference of gradients of the sign of its direction.
    """
    are_vectors = all(_is_unknown_vector(value) for value in (left, right))
    return -1.0 if are_vectors and not _is_same(left, right) else 1.0


def _is_unknown_vector(value: Any) -> bool:
    """Whether a value is a vector in memory of its own, and no column of a matrix."""
    is_vector = isinstance(value, Tensor) and value.dim() == 1
    return is_vector and not is_known(value) and covers_its_storage(value)


def _compared(name: str, left: Any, right: Any, made: Tensor) -> Uniform:
    compare = _COMPARISONS[name]
    if name in ("eq", "ne"):
        # Only NaN differs from itself, and nothing unknown is infinite.
        if _is_same(left, right):
            return Uniform(name == "eq", is_certain=True)
        if any(isinstance(x, float) and not math.isfinite(x) for x in (left, right)):
            return Uniform(name == "ne", is_certain=True)
    numbers = [number_of(x) if isinstance(x, Tensor) else x for x in (left, right)]
    if None in numbers:
        return Uniform(None)
    # An unknown index may be any, so some of several are equal to a number above 0.
    is_index = name in ("eq", "ne") and made.numel() > 1 and _is_unknown_index(left)
    if is_index and isinstance(right, (int, float)) and right > 0:
        return Uniform(None)
    return Uniform(compare(*numbers))


def _is_unknown_index(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and is_exact(value.dtype)
        and value.dtype != torch.bool
        and not is_known(value)
    )


def _is_same(left: Any, right: Any) -> bool:
    return (
        isinstance(left, Tensor)
        and isinstance(right, Tensor)
        and left.layout is right.layout is torch.strided
        and left.untyped_storage()._cdata == right.untyped_storage()._cdata
        and left.storage_offset() == right.storage_offset()
        and left.shape == right.shape
        and left.stride() == right.stride()
    )


def _logic(kind: str, args: Sequence[Any]) -> Number:
    """The result for masks, of which known ones with several values decide nothing."""
    numbers: list[Number] = []
    for value in args[:2]:
        if not isinstance(value, Tensor):
            numbers.append(value)
        elif not is_known(value) or value.numel() == 1:
            numbers.append(number_of(value))
    if kind == "not":
        return None if numbers[0] is None else not numbers[0]
    if kind == "and":
        if any(number is not None and not number for number in numbers):
            return False
        return None if None in numbers else True
    if kind == "or":
        if any(numbers):
            return True
        return None if None in numbers else False
    return None if None in numbers else sum(map(bool, numbers)) % 2 == 1
