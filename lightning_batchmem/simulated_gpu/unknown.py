"""What is assumed about values that are not computed: numbers, and shapes.

Comparisons and logic of unknown values have to fit together: a check and the check of its opposite
may not both hold. So each is evaluated on the one number that stands for all elements
(``known.py``). A shape is the largest one, and the line of the project is named. Where the largest
one has no bound, or would be an error of the program, another one is assumed and named.

``CERTAIN``, ``NUMBERS`` and ``SHAPES`` have an entry for each operator with a rule.

This file is executed before Lightning is imported, so it imports torch and the standard library
only, and neighbours that were loaded before.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_batchmem.simulated_gpu.known import (
    Number,
    is_exact,
    is_known,
    mark_unknown,
    neutral_number,
    number_of,
    tensors_in,
)

CERTAIN = {
    # Checks for NaN and infinity find nothing. Torch makes `isfinite` of comparisons.
    **dict.fromkeys(("isnan", "isinf", "isposinf", "isneginf"), 0),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero", "_foreach_zero"), 0),
}
"""Operators whose results are known where their arguments are not -> each byte of a result."""

Rule = Callable[[Sequence[Any], Tensor], Number]
"""The arguments of an operator and its result -> the number that stands for the result."""


def certain_byte(name: str, args: Sequence[Any]) -> int | None:
    """Each byte of a result that is known though its arguments are not; None for others."""
    if name in ("eq", "ne"):
        left, right = args[:2]
        # Only NaN differs from itself, and nothing unknown is infinite.
        if left is right:
            return int(name == "eq")
        if isinstance(right, float) and not math.isfinite(right):
            return int(name == "ne")
    return CERTAIN.get(name)


def assumed_number(name: str, args: Sequence[Any], made: Tensor) -> Number | None:
    """The number that stands for a result that depends on unknown values; None for the neutral one.

    Args:
        name: of the operator, without the underscore of one that writes to its first argument.
        args: its arguments.
        made: the result.
    """
    if not is_exact(made.dtype):
        return None
    number = NUMBERS.get(name, _of_first)(args, made)
    return min(abs(number), 1) if made.dtype == torch.bool else math.ceil(number)


def _of_first(args: Sequence[Any], made: Tensor) -> Number:
    """Whole numbers and masks are picked, moved or converted; an unknown float may be any index."""
    first = next(tensors_in(args), made)
    return number_of(first) if is_exact(first.dtype) else neutral_number(made.dtype)


def _compared(compare: Callable[[Any, Any], bool]) -> Rule:
    return lambda args, made: bool(compare(number_of(args[0]), number_of(args[1])))


def _is_equal(args: Sequence[Any], made: Tensor) -> Number:
    left, right = map(number_of, args[:2])
    # An unknown index may be any, so some of several are equal to a number above 0.
    if made.numel() > 1 and any(map(_is_unknown_index, args[:2])) and max(left, right) > 0:
        return 0.5
    return bool(left == right)


def _is_unknown_index(value: Any) -> bool:
    is_index = isinstance(value, Tensor) and is_exact(value.dtype) and value.dtype != torch.bool
    return is_index and not is_known(value)


def _count(args: Sequence[Any], made: Tensor) -> Number:
    """A sum of whole numbers; all elements of a mask count, as in the shapes made of it."""
    first = args[0]
    elements: int = first.numel() // max(1, made.numel())
    return elements if first.dtype == torch.bool else number_of(first) * elements


NUMBERS: Mapping[str, Rule] = {
    **{name: _compared(getattr(operator, name)) for name in ("lt", "le", "gt", "ge")},
    "eq": _is_equal,
    "ne": lambda args, made: 1 - _is_equal(args, made),
    **dict.fromkeys(("logical_and", "bitwise_and"), lambda args, made: min(map(number_of, args))),
    **dict.fromkeys(("logical_or", "bitwise_or"), lambda args, made: max(map(number_of, args))),
    **dict.fromkeys(("logical_not", "bitwise_not"), lambda args, made: 1 - number_of(args[0])),
    "any": lambda args, made: number_of(args[0]) > 0,
    # Checks of arguments, as those of torch.distributions, hold.
    **dict.fromkeys(("all", "_is_all_true"), lambda args, made: number_of(args[0]) != 0.5),
    **dict.fromkeys(("sum", "count_nonzero"), _count),
    **dict.fromkeys(("copy", "where"), lambda args, made: number_of(args[1])),
}
"""Operators whose results are whole numbers or masks, other than those of their first argument."""

Assumed = tuple[Any, str, int]
"""The result of an operator in the worst case; what is assumed, empty if it need not be named; how
many that are."""


def _made(shape: Sequence[int], like: Tensor, dtype: torch.dtype = torch.long) -> Tensor:
    """An unknown tensor, by default of indices."""
    return mark_unknown(torch.empty(shape, dtype=dtype, device=like.device))


def _argument(args: Any, kwargs: Any, position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _all_elements(args: Any, kwargs: Any) -> Assumed:
    mask = args[0]
    return _made((mask.dim(), mask.numel()), mask).t(), _ALL, mask.numel()


def _one_each(args: Any, kwargs: Any) -> Assumed:
    repeats = args[0]
    if (size := kwargs.get("output_size")) is not None:
        return _made((size,), repeats), "", 0
    return _made(repeats.shape, repeats), "1 for each of {:,} elements is assumed", repeats.numel()


def _shortest_counts(args: Any, kwargs: Any) -> Assumed:
    minimum = _argument(args, kwargs, 2, "minlength", 0)
    length = max(1, minimum)
    weights = _argument(args, kwargs, 1, "weights", None)
    dtype = torch.long if weights is None else weights.dtype
    return _made((length,), args[0], dtype), "" if minimum else "{:,} is assumed", length


def _unique_values(args: Any, kwargs: Any) -> Assumed:
    """Whole numbers are labels, of which metrics accept only some; floats differ."""
    tensor = args[0]
    count = min(1, tensor.numel()) if is_exact(tensor.dtype) else tensor.numel()
    amount = "1 of {:,} is assumed" if is_exact(tensor.dtype) else _ALL
    return _unique((count,), tensor.shape, count, tensor), amount, tensor.numel()


def _unique_rows(args: Any, kwargs: Any) -> Assumed:
    tensor, dimension = args[:2]
    count = tensor.shape[dimension]
    return _unique(tensor.shape, (count,), count, tensor), _ALL, count


def _unique(shape: Sequence[int], inverse: Sequence[int], count: int, of: Tensor) -> Any:
    """Values, for each element the position of its value, and how often each value occurs."""
    return _made(shape, of, of.dtype), _made(inverse, of), _made((count,), of)


def _drawn(args: Any, kwargs: Any) -> Assumed:
    weights = args[0]
    # Torch draws a random number for each weight.
    torch.empty_like(weights)
    shape = *weights.shape[:-1], _argument(args, kwargs, 1, "num_samples", 1)
    return _made(shape, weights), "", 0


def _members(args: Any, kwargs: Any) -> Assumed:
    elements, others = args[:2]
    place = elements if isinstance(elements, Tensor) else others
    shape = elements.shape if isinstance(elements, Tensor) else ()
    return _made(shape, place, torch.bool), "", 0


def _counted(args: Any, kwargs: Any) -> Assumed:
    return _made((_argument(args, kwargs, 1, "bins", 100),), args[0], args[0].dtype), "", 0


def _all_boxes(args: Any, kwargs: Any) -> Assumed:
    count = len(args[0])
    return _made((count,), args[0]), _ALL, count


def _exponential(args: Any, kwargs: Any) -> Assumed:
    """Torch reads norms, and takes more products for larger ones: the most are assumed."""
    matrix = args[0]
    # A scaled copy, five powers and five sums of them. Source: compute_T18_scale_square in
    # aten/src/ATen/native/LinearAlgebra.cpp of torch.
    torch.empty((11, *matrix.shape), dtype=matrix.dtype, device=matrix.device)
    return _made(matrix.shape, matrix, matrix.dtype), "", 0


def assume_distinct(func: Any, args: Any, kwargs: Any) -> Any:
    """Take no two elements of a sparse matrix to be at the same place, which a product looks for.

    The operator runs as any other one.
    """
    for matrix in tensors_in(args):
        if matrix.layout is torch.sparse_coo:
            matrix._coalesced_(True)
    return NotImplemented


def _are_equal(args: Any, kwargs: Any) -> Assumed:
    return args[0].shape == args[1].shape, "", 0


_ALL = "all {:,} are assumed"
_MASKED = (
    "With fewer in your data a larger size fits: set a bound, as in x[mask.nonzero()[:bound, 0]]."
)
_OTHERWISE = "With another number in your data another size fits: search again on the GPU."

SHAPES: Mapping[str, tuple[str, str, Callable[[Any, Any], Assumed]]] = {
    "nonzero": ("A number of elements", _MASKED, _all_elements),
    "repeat_interleave": ("A number of repetitions", _OTHERWISE, _one_each),
    "bincount": ("The length of bincount", _OTHERWISE, _shortest_counts),
    **dict.fromkeys(
        ("_unique2", "_unique", "unique_consecutive"),
        ("The number of values of torch.unique", _OTHERWISE, _unique_values),
    ),
    "unique_dim": ("The number of slices of torch.unique", _OTHERWISE, _unique_rows),
    "nms": ("The number of boxes", _OTHERWISE, _all_boxes),
    # Kernels of these read values too: whether weights are valid, how many differ, their limits.
    "multinomial": ("", "", _drawn),
    "isin": ("", "", _members),
    "histc": ("", "", _counted),
    # As any check of all elements, these hold.
    "allclose": ("", "", lambda args, kwargs: (True, "", 0)),
    "equal": ("", "", _are_equal),
    # No matrix is singular.
    "_linalg_check_errors": ("", "", lambda args, kwargs: (None, "", 0)),
    "linalg_matrix_exp": ("", "", _exponential),
    # No two elements of a sparse tensor are at the same place.
    "_coalesce": ("", "", lambda args, kwargs: (args[0].clone()._coalesced_(True), "", 0)),
}
"""Operators whose kernels read values, as for the size of a result -> what that is, what a user can
do, and the result in the worst case."""
