"""Find, count and copy the tensors of nested data."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

# Text batches contain lists of thousands of these.
_LEAVES = frozenset({str, bytes, bytearray, memoryview, range, int, float, bool, complex, type(None)})


def tensors_in(data: object) -> list[Tensor]:
    """List the tensors in nested mappings, sequences, sets, data classes and objects with a method ``to``, in order."""
    found: list[Tensor] = []
    _collect(data, found, set())
    return found


def _collect(data: Any, found: list[Tensor], parents: set[int]) -> None:
    if isinstance(data, Tensor):
        found.append(data)
    elif type(data) not in _LEAVES and id(data) not in parents:  # a batch may refer to itself
        parents.add(id(data))
        for item in _items(data):
            _collect(item, found, parents)
        parents.discard(id(data))


# torch's pytree does not open a UserDict, a set, a data class or a batch type; Lightning's apply_to_collection
# opens them, but builds every collection again.
def _items(data: object) -> Iterable[Any]:
    if isinstance(data, Mapping):
        return data.values()
    if isinstance(data, (Sequence, Set)) and not isinstance(data, (str, bytes)):
        return data
    if isinstance(data, (type, Module)):  # a batch may refer to its model
        return ()
    if is_dataclass(data):
        return [getattr(data, field.name, None) for field in fields(data)]  # a field may not be set yet
    if callable(getattr(data, "to", None)) and hasattr(data, "__dict__"):  # Lightning moves such a batch to the device
        return vars(data).values()
    return ()


def samples_in(batch: object) -> int | None:
    """Return the number of graphs, or the common first dimension of the tensors; None if they differ or there are none.

    Lightning's ``extract_batch_size`` guesses if they differ, and a caller cannot recognize the guess (2.6.6).
    """
    # the walk is slow, and this runs in every step
    if type(batch) in (list, tuple) and all(type(item) is Tensor for item in _items(batch)):
        return _common_size(batch)  # type: ignore[arg-type]
    for one in (batch, *_items(batch)):
        if isinstance(graphs := getattr(one, "num_graphs", None), int):  # PyTorch Geometric's batches
            return graphs
    return _common_size(tensors_in(batch))


def _common_size(tensors: Iterable[Tensor]) -> int | None:
    sizes = {shape[0] for tensor in tensors if (shape := tensor.shape)}
    return sizes.pop() if len(sizes) == 1 else None


def copied(sample: Any, *, share_tensors: bool = False) -> Any:
    """Copy a sample; its tensors are shared or cloned, without the larger storage that they may be a view of."""
    memo = {id(tensor): tensor if share_tensors else tensor.clone() for tensor in tensors_in(sample)}
    return copy.deepcopy(sample, memo)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the strided tensors inside a tensor: a DTensor's local shard, a sparse one's indices and values."""
    if hasattr(tensor, "__tensor_flatten__"):  # DTensor, jagged and quantized tensors
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]  # a DTensor also names its device mesh (torch 2.13)
    elif type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ and (wrapped := tensors_in(vars(tensor))):
        inner = wrapped  # for example torch.masked.MaskedTensor, which has no __tensor_flatten__
    elif tensor.layout is not torch.strided:
        inner = list(_sparse_parts(tensor))
    else:
        yield tensor
        return
    for part in inner:
        if isinstance(part, Tensor):
            yield from plain_tensors(part)


def bytes_of(tensors: Iterable[Tensor], device: torch.device | None = None) -> int:
    """Return the bytes of the tensors, and of the parts of sparse ones, on ``device`` or anywhere."""
    parts = (part for tensor in tensors for part in plain_tensors(tensor))
    return sum(part.nbytes for part in parts if device is None or is_on(part.device, device))


def _sparse_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout is torch.sparse_coo:  # gradients of Embedding(sparse=True); indices() refuses uncoalesced ones
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()  # oneDNN's layout has no storage


def is_on(place: torch.device, device: torch.device) -> bool:
    """Whether ``place`` is ``device``; a device without an index is any of its type."""
    return place.type == device.type and device.index in (None, place.index)
