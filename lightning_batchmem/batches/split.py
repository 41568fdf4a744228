"""Split a batch along its first dimension."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.devices.tensors import common_size, items_of, tensors_in


class Part(NamedTuple):
    """Consecutive samples of a batch."""

    batch: Any
    samples: int


def splittable_samples(batch: object) -> int | None:
    """Return the common first dimension of all tensors; None if there is none.

    Sparse and nested tensors cannot be sliced along it.
    """
    return value_or_none("The number of samples in a batch", _splittable_samples, tensors_in(batch))


def _splittable_samples(tensors: list[Tensor]) -> int | None:
    if any(tensor.is_nested or tensor.layout is not torch.strided for tensor in tensors):
        return None
    return common_size(tensors)


def has_number_of_samples(batch: object) -> bool:
    """Whether each part of the batch would have the number of samples of the whole batch.

    It is taken to have it where this cannot be read.
    """
    samples = splittable_samples(batch)
    if samples is None:
        return False
    return value_or_none("A number in a batch", _has_number, batch, samples) is not False


def _has_number(batch: object, number: int) -> bool:
    leaves = _leaves_in(batch, number, set())
    numbers = [leaf for leaf in leaves if isinstance(leaf, Integral) or _is_scalar(leaf)]
    return any(one == number for one in numbers)


def split(batch: object, num_parts: int) -> list[Part]:
    """Split a batch with a common first dimension into parts that differ by at most one sample.

    The tensors of the parts are views. Tensors without dimensions are in every part, and lists of
    other objects are split if they have as many items as the batch has samples. Containers are
    copied, and what they hold is not, because a lock or a generator cannot be.
    """
    samples = common_size(tensors_in(batch)) or 0
    leaves = list(_leaves_in(batch, samples, set()))
    sliced = [leaf for leaf in leaves if _has_samples(leaf, samples)]
    whole = {id(leaf): leaf for leaf in leaves}
    bounds = [samples * number // num_parts for number in range(num_parts + 1)]
    return [
        Part(
            copy.deepcopy(batch, whole | {id(leaf): leaf[begin:end] for leaf in sliced}),
            end - begin,
        )
        for begin, end in pairwise(bounds)
    ]


def _leaves_in(data: object, samples: int | None, seen: set[int]) -> Iterator[Any]:
    """Yield what has one item for each sample, and what has no items."""
    if id(data) in seen:
        return
    seen.add(id(data))
    is_opened = not (isinstance(data, Tensor) or _has_samples(data, samples))
    items = list(items_of(data)) if is_opened else []
    if not items:
        yield data
    for item in items:
        yield from _leaves_in(item, samples, seen)


def _has_samples(data: Any, samples: int | None) -> bool:
    """Whether this is a tensor, or a sequence of one item for each sample, such as texts."""
    if isinstance(data, Tensor):
        return data.dim() > 0
    is_array = isinstance(data, np.ndarray) and data.ndim > 0
    is_sequence = is_array or isinstance(data, list | tuple)
    return is_sequence and len(data) == samples and not tensors_in(data)


def _is_scalar(data: object) -> bool:
    return isinstance(data, Tensor) and data.dim() == 0
