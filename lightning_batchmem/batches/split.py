"""Split a batch along its first dimension."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_batchmem.devices.tensors import common_size, items_of, tensors_in


class Part(NamedTuple):
    """Consecutive samples of a batch."""

    batch: Any
    samples: int


def splittable_samples(batch: object) -> int | None:
    """Return the common first dimension of all tensors; None if there is none.

    Sparse and nested tensors cannot be sliced along it.
    """
    tensors = tensors_in(batch)
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return None
    return common_size(tensors)


def split(batch: object, num_parts: int) -> list[Part]:
    """Split a batch with a common first dimension into parts that differ by at most one sample.

    The tensors of the parts are views. Tensors without dimensions are in every part, and lists of
    other objects are split if they have as many items as the batch has samples. Containers are
    copied, and what they hold is not, because a lock or a generator cannot be.
    """
    tensors = tensors_in(batch)
    samples = common_size(tensors) or 0
    whole: dict[int, Any] = {id(tensor): tensor for tensor in tensors if not tensor.shape}
    whole |= {id(leaf): leaf for leaf in _leaves_in(batch, set())}
    sliced = [tensor for tensor in tensors if tensor.shape]
    sliced += _columns_in(batch, samples, set())
    bounds = [samples * number // num_parts for number in range(num_parts + 1)]
    return [
        Part(
            copy.deepcopy(batch, whole | {id(column): column[begin:end] for column in sliced}),
            end - begin,
        )
        for begin, end in pairwise(bounds)
    ]


def _leaves_in(data: object, seen: set[int]) -> Iterator[object]:
    """Yield what has no items and is no tensor."""
    if isinstance(data, Tensor) or id(data) in seen:
        return
    seen.add(id(data))
    items = list(items_of(data))
    if not items:
        yield data
    for item in items:
        yield from _leaves_in(item, seen)


def _columns_in(data: object, samples: int, seen: set[int]) -> Iterator[Any]:
    """Yield sequences of one item for each sample, such as a list of texts."""
    if isinstance(data, str | bytes | Tensor) or id(data) in seen:
        return
    seen.add(id(data))
    is_array = isinstance(data, np.ndarray) and data.ndim > 0
    is_sequence = is_array or isinstance(data, list | tuple)
    # mypy does not see that the data has a length.
    if is_sequence and len(data) == samples and not tensors_in(data):  # type: ignore[arg-type]
        yield data
        return
    for item in items_of(data):
        yield from _columns_in(item, samples, seen)
