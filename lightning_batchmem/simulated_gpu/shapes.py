"""Operators whose result has a shape that depends on values.

For unknown values the shape is the largest one, and the line of the project is named. Where the
largest one has no bound, or would be an error of the program, another one is assumed and named.

This file is executed before Lightning is imported, so it imports torch and the standard library
only, and neighbours that were loaded before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_batchmem.simulated_gpu.frames import Assumptions
from lightning_batchmem.simulated_gpu.known import (
    Uniform,
    is_exact,
    is_known,
    is_storage_small,
    make_known,
    materialize,
    neutral_number,
    set_state,
    tensors_in,
)
from lightning_batchmem.simulated_gpu.operators import on_host, to_device

aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)

Assumed = Callable[[Any, Any], tuple[Any, str]]
"""Arguments of an operator -> its result in the worst case, and what is assumed."""


class Shapes:
    """Runs operators whose kernels read values to find the size of their result.

    Args:
        assumptions: each size that is assumed is named there.
    """

    def __init__(self, assumptions: Assumptions) -> None:
        self._assumptions = assumptions

    def nonzero(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the positions of a mask."""
        return self._run(func, args, kwargs, _all_elements, "a number of elements")

    def repeat_interleave(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return each position as often as a tensor has it."""
        if kwargs.get("output_size") is not None:
            return NotImplemented
        return self._run(func, args, kwargs, _one_each, "a number of repetitions")

    def bincount(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Count each of the numbers from 0 to the largest."""
        what = "" if _minimum(args, kwargs) else "the length of bincount"
        return self._run(func, args, kwargs, _shortest_counts, what)

    def unique(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the different values of a tensor."""
        what = "the number of values of torch.unique"
        return self._run(func, args, kwargs, _unique_values, what)

    def unique_rows(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the different slices of a tensor."""
        what = "the number of slices of torch.unique"
        return self._run(func, args, kwargs, _unique_rows, what)

    def multinomial(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Draw positions. The kernel reads whether the weights are valid."""
        return self._run(func, args, kwargs, _drawn, "")

    def isin(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Tell which elements are in a set, whose kernel reads the number of different ones."""
        return self._run(func, args, kwargs, _members, "")

    def histogram(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Count values. The kernel reads their limits."""
        return self._run(func, args, kwargs, _counted, "")

    def nms(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the boxes that overlap no better one."""
        return self._run(func, args, kwargs, _all_boxes, "the number of boxes")

    def equal(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compare two tensors, on the host."""
        return self._run(func, args, kwargs, _are_same, "the result of torch.equal")

    def allclose(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compare two tensors, on the host. As any check of all elements, this one holds."""
        return self._run(func, args, kwargs, lambda *_: (True, ""), "")

    def without_masks(self, args: Sequence[Any]) -> list[Any]:
        """The indices in the arguments of an operator, with positions instead of masks."""
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, Tensor) and index.is_cuda and index.dtype in _MASKS:
                indices += self._positions(index, args)
            else:
                indices.append(index)
        return indices

    def _positions(self, mask: Tensor, args: Sequence[Any]) -> tuple[Tensor, ...]:
        is_put = len(args) > 2 and len(args[1]) == 1 and args[2].dim() > 0
        if is_put and not is_known(mask) and 1 < (count := len(args[2])) < mask.numel():
            # There are as many places as values.
            return _unknown((mask.dim(), count), mask.device).unbind(0)
        positions: Tensor = self.nonzero(aten.nonzero.default, (mask,), {})
        return positions.unbind(1)

    def _run(
        self, func: Any, args: Any, kwargs: dict[str, Any], assumed: Assumed, what: str
    ) -> Any:
        tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
        if all(is_known(t) and is_storage_small(t) for t in tensors):
            for tensor in tensors:
                if tensor.is_cuda:
                    materialize(tensor)
            values = on_host(func, args, kwargs)
            if values is not NotImplemented:
                return to_device(values, tensors[0].device)
        made, amount = assumed(args, kwargs)
        if what:
            self._assumptions.add(what, amount, tensors[0])
        return made


def _unknown(shape: Sequence[int], device: torch.device) -> Tensor:
    """A tensor of indices."""
    made = torch.empty(shape, dtype=torch.long, device=device)
    set_state(made, Uniform(0))
    return made


def _all_elements(args: Any, kwargs: Any) -> tuple[Tensor, str]:
    mask = args[0]
    made = _unknown((mask.dim(), mask.numel()), mask.device).t()
    return made, f"all {mask.numel():,} are assumed"


def _one_each(args: Any, kwargs: Any) -> tuple[Tensor, str]:
    repeats = args[0]
    return _unknown(repeats.shape, repeats.device), "1 for each element is assumed"


def _minimum(args: Any, kwargs: Any) -> int:
    minimum: int = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    return minimum


def _shortest_counts(args: Any, kwargs: Any) -> tuple[Tensor, str]:
    length = max(1, _minimum(args, kwargs))
    made = _unknown((length,), args[0].device)
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    if weights is not None:
        made = made.to(torch.float if weights.dtype == torch.float else torch.double)
        set_state(made, Uniform(1.0))
    return made, f"{length} is assumed"


def _unique_values(args: Any, kwargs: Any) -> tuple[tuple[Tensor, ...], str]:
    """Whole numbers are labels, of which metrics accept only some; floats differ."""
    tensor = args[0]
    count = min(1, tensor.numel()) if is_exact(tensor.dtype) else tensor.numel()
    values = torch.empty(count, dtype=tensor.dtype, device=tensor.device)
    set_state(values, Uniform(neutral_number(tensor.dtype)))
    inverse = _unknown(tensor.shape, tensor.device)
    counts = _unknown((count,), tensor.device)
    return (values, inverse, counts), f"{count:,} of {tensor.numel():,} is assumed"


def _unique_rows(args: Any, kwargs: Any) -> tuple[tuple[Tensor, ...], str]:
    tensor, dimension = args[:2]
    values = torch.empty_like(tensor)
    set_state(values, Uniform(neutral_number(tensor.dtype)))
    count = tensor.shape[dimension]
    inverse = _unknown((count,), tensor.device)
    counts = _unknown((count,), tensor.device)
    return (values, inverse, counts), f"all {count:,} are assumed"


def _drawn(args: Any, kwargs: Any) -> tuple[Tensor, str]:
    weights = args[0]
    count = args[1] if len(args) > 1 else kwargs["num_samples"]
    # Torch draws a random number for each weight.
    torch.empty_like(weights)
    return _unknown((*weights.shape[:-1], count), weights.device), ""


def _members(args: Any, kwargs: Any) -> tuple[Tensor, str]:
    elements, others = args[:2]
    place = elements if isinstance(elements, Tensor) else others
    shape = elements.shape if isinstance(elements, Tensor) else ()
    made = torch.empty(shape, dtype=torch.bool, device=place.device)
    set_state(made, Uniform(True))
    return made, ""


def _counted(args: Any, kwargs: Any) -> tuple[Tensor, str]:
    bins = args[1] if len(args) > 1 else kwargs.get("bins", 100)
    made = torch.empty(bins, dtype=args[0].dtype, device=args[0].device)
    set_state(made, Uniform(1.0))
    return made, ""


def _all_boxes(args: Any, kwargs: Any) -> tuple[Tensor, str]:
    boxes = args[0]
    made = torch.empty(len(boxes), dtype=torch.long, device=boxes.device)
    return make_known(made, torch.arange(len(boxes))), f"all {len(boxes):,} are assumed"


def _are_same(args: Any, kwargs: Any) -> tuple[bool, str]:
    left, right = args[:2]
    is_same = left.shape == right.shape and left.data_ptr() == right.data_ptr()
    return is_same, f"{is_same} is assumed"
