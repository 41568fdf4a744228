"""Find, count and copy the tensors of nested data."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_batchmem.devices.foreign_values import value_or_none

# Objects of these types are skipped early, because text batches contain lists of thousands of them.
_LEAVES = frozenset(
    {str, bytes, bytearray, memoryview, range, int, float, bool, complex, type(None)}
)
# An object may make its items when they are read, and those theirs, without an end.
_MOST_LEVELS = 500
# Items of a sequence that may make them when they are read. A batch has fewer samples.
_MOST_READ = 10_000
_ITEMS = "A part of a batch, or of another object with tensors,"


def tensors_in(data: object) -> list[Tensor]:
    """List the tensors in nested data, in order.

    The data may be mappings, sequences, sets, data classes and objects with a method ``to``.
    """
    return value_or_none(_ITEMS, _tensors_in, data) or []


def _tensors_in(data: object) -> list[Tensor]:
    tensors: list[Tensor] = []
    _collect(data, tensors, set())
    return tensors


def _collect(data: Any, tensors: list[Tensor], parents: set[int]) -> None:
    # The class that an object says it has may be another one, or raise an error.
    if issubclass(type(data), Tensor):
        tensors.append(data)
    elif type(data) not in _LEAVES and id(data) not in parents:
        if len(parents) == _MOST_LEVELS:
            raise RecursionError(f"it has more than {_MOST_LEVELS} levels")
        # A batch may refer to itself, so its parents are not opened again.
        parents.add(id(data))
        for item in items_of(data):
            _collect(item, tensors, parents)
        parents.discard(id(data))


def items_of(data: object) -> list[Any]:
    """Return what ``tensors_in`` opens next, without the items that cannot be read."""
    return value_or_none(_ITEMS, _items, data) or []


# Torch's pytree does not open a UserDict, a set, a data class or a batch type. Lightning's
# apply_to_collection opens them, but builds every collection again.
def _items(data: object) -> list[Any]:
    if isinstance(data, Mapping):
        return list(data.values())
    if isinstance(data, (Sequence, Set)) and not isinstance(data, (str, bytes)):
        if isinstance(data, (list, tuple)):
            return list(islice(data, len(data)))
        # A sequence that raises no IndexError has no end but its length, and one that reads its
        # items from a file may be as long as the data set.
        return list(islice(data, min(len(data), _MOST_READ)))
    # A batch may refer to its model, but the weights are not part of the batch.
    if isinstance(data, (type, Module)):
        return []
    if is_dataclass(data):
        # A field may not be set yet, or be a property.
        return [value_or_none(_ITEMS, getattr, data, field.name, None) for field in fields(data)]
    # Lightning moves a batch with a method "to" to the device.
    if callable(getattr(data, "to", None)) and hasattr(data, "__dict__"):
        return list(vars(data).values())
    return []


def samples_in(batch: object) -> int | None:
    """Return the number of graphs, or the common first dimension of the tensors.

    If the dimensions differ, a list in the batch, such as one of images, counts with its length.
    The number is None if these differ too, if there are none, or if the batch does not tell them.
    Lightning's ``extract_batch_size`` guesses if they differ, and a caller cannot recognize the
    guess (2.6.6).
    """
    return value_or_none("The number of samples in a batch", _samples, batch)


def _samples(batch: object) -> int | None:
    # A flat batch of tensors is not walked through, since that is slow and this runs in every step.
    # A batch of a subclass may have a number of graphs.
    if type(batch) is list or type(batch) is tuple:
        sizes = set()
        for item in batch:
            if type(item) is not Tensor:
                break
            if shape := item.shape:
                sizes.add(shape[0])
        else:
            return sizes.pop() if len(sizes) == 1 else None
    for part in (batch, *items_of(batch)):
        # The batches of PyTorch Geometric have this attribute.
        if isinstance(graphs := getattr(part, "num_graphs", None), int):
            return graphs
    tensors = tensors_in(batch)
    samples = common_size(tensors)
    if samples is None and tensors:
        parts = [part for part in items_of(batch) if isinstance(part, (Tensor, list, tuple))]
        lengths = {len(part) for part in parts if not isinstance(part, Tensor) or part.dim() > 0}
        samples = lengths.pop() if len(lengths) == 1 else None
    return samples


def common_size(tensors: Iterable[Tensor]) -> int | None:
    """Return the first dimension of all tensors that have one; None if it differs."""
    sizes = {shape[0] for tensor in tensors if (shape := tensor.shape)}
    return sizes.pop() if len(sizes) == 1 else None


def copied(sample: Any, *, share_tensors: bool = False) -> Any:
    """Copy a sample, and share or clone its tensors.

    A clone does not have the larger storage that its tensor may be a view of. A sample that cannot
    be copied, such as one with a lock, is returned itself, with a warning.
    """
    tensors = tensors_in(sample)
    memo = {id(tensor): tensor if share_tensors else tensor.clone() for tensor in tensors}
    made = value_or_none("A sample that is copied", copy.deepcopy, sample, memo)
    return sample if made is None else made


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the strided tensors inside a tensor.

    These are the local shard of a DTensor, or the indices and values of a sparse tensor. Other
    layouts have none: sparse in rows or blocks, and oneDNN.
    """
    # DTensors, and jagged and quantized tensors, have this method.
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        # The names of a DTensor include its device mesh, which is not a tensor (torch 2.13).
        inner = [getattr(tensor, name) for name in names]
    elif tensor.layout is torch.sparse_coo:
        # Gradients of Embedding(sparse=True) have this layout. They may be uncoalesced, and
        # indices() raises an error for those.
        inner = [tensor._indices(), tensor._values()]
    else:
        if tensor.layout is torch.strided:
            yield tensor
        return
    for part in inner:
        if isinstance(part, Tensor):
            yield from plain_tensors(part)


def bytes_of(tensors: Iterable[Tensor], device: torch.device | None = None) -> int:
    """Return the bytes of the tensors on ``device``, or on all devices if it is None."""
    parts = (part for tensor in tensors for part in plain_tensors(tensor))
    return sum(part.nbytes for part in parts if device is None or is_on(part.device, device))


def is_on(place: torch.device, device: torch.device) -> bool:
    """Whether ``place`` is ``device``; a device without an index is any of its type."""
    return place.type == device.type and device.index in (None, place.index)


def has_own_tensors(module: Module) -> bool:
    """Whether some parameters are of a type of their own, such as DTensor."""
    plain = (Tensor.__torch_dispatch__, torch.nn.Parameter.__torch_dispatch__)
    return any(type(weight).__torch_dispatch__ not in plain for weight in module.parameters())
