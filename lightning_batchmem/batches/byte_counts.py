"""Bytes of samples and batches, counted and sent."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_batchmem.devices.tensors import copied, plain_tensors, tensors_in

# The usual types that NumPy has too.
_DTYPES_OF_NUMPY = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)


def batched_sizes(collate: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[int, ...]:
    """Bytes of a batch, and the lengths of its tensors in each dimension.

    Names and paths count only in a batch without tensors.
    """
    # The containers are new, since a collate function may take its samples apart.
    counter = _ByteCounter(collate([copied(sample, share_tensors=True) for sample in samples]))
    return counter.tensor_bytes or counter.other_bytes, *counter.lengths


def count_bytes(data: object) -> int:
    """Bytes of tensors, and of the other parts when they are pickled."""
    try:
        counter = _ByteCounter(data)
    # A user's object may refuse to be pickled in any way.
    except Exception:  # noqa: BLE001
        return sum(tensor.nbytes for tensor in tensors_in(data))
    return counter.tensor_bytes + counter.other_bytes


class _ByteCounter(pickle.Pickler):
    """Pickler that counts bytes and writes nothing; tensors count separately."""

    def __init__(self, value: object) -> None:
        # A pickler only calls the method `write` of its file.
        super().__init__(self, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensor_bytes = 0
        self.lengths: list[int] = []
        self.other_bytes = 0
        self.dump(value)

    def write(self, pickled: Any) -> None:
        self.other_bytes += memoryview(pickled).nbytes

    def persistent_id(self, value: Any) -> str | None:
        # Tensors of other layouts contain strided tensors, which are counted.
        if isinstance(value, Tensor) and value.layout is torch.strided:
            self.tensor_bytes += value.nbytes
            self.lengths += value.shape
            return "tensor"
        return None


def without_views(sample: Any) -> Any:
    """The sample, copied if a tensor in it is a view of a larger storage."""
    plain = [part for tensor in tensors_in(sample) for part in plain_tensors(tensor)]
    if any(part.untyped_storage().nbytes() > part.nbytes for part in plain):
        return copied(sample)
    return sample


def pickled(sample: Any) -> bytes:
    """The sample, pickled so that plain ``pickle`` reads it.

    Plain tensors become arrays, which takes a fifth of the time.
    """
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: _reduced}
    pickler.dump(sample)
    return file.getvalue()


def _reduced(tensor: Tensor) -> Any:
    is_plain = (
        tensor.dtype in _DTYPES_OF_NUMPY
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_neg() or vars(tensor))
    )
    if is_plain:
        return torch.from_numpy, (tensor.numpy(),)
    # The method of Tensor has no annotations.
    reduce: Any = tensor.__reduce_ex__
    return reduce(pickle.HIGHEST_PROTOCOL)
