"""Operators that read values on the host, or copy them between host and device.

This file is executed before Lightning is imported, so it imports torch and the standard library
only, and neighbours that were loaded before.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor

from lightning_batchmem.simulated_gpu.frames import Assumptions
from lightning_batchmem.simulated_gpu.known import (
    UNREAD_BYTES,
    WRITTEN,
    Uniform,
    covers_its_storage,
    host_view,
    is_exact,
    is_known,
    is_parameter,
    is_small,
    is_storage_small,
    is_writable,
    mark_unknown,
    materialize,
    set_state,
    state_of,
)
from lightning_batchmem.simulated_gpu.neutral import number_of

READ_STEP = 1e-4
"""Each read of an unknown float is smaller by about this share."""


class Reads:
    """The values that the host reads from the device, and those that it copies there.

    An unknown value is the same in a second read. Different positive floats become a little smaller
    from read to read: optimizers and callbacks end a training whose loss does not change.

    Args:
        assumptions: whole numbers that are read are named there, since they may become a shape.
    """

    def __init__(self, assumptions: Assumptions) -> None:
        self._assumptions = assumptions
        self._count = 0

    def scalar(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the one value of a tensor, for ``item``, ``bool`` and the like."""
        tensor = args[0]
        if is_known(tensor) and is_storage_small(tensor):
            materialize(tensor)
            return func(host_view(tensor))
        number = self._read(tensor)
        return complex(number) if tensor.is_complex() else number

    def to_copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return a copy of a tensor, perhaps on another device."""
        source = args[0]
        device = torch.device(kwargs.get("device") or source.device)
        if source.layout is not torch.strided or source.is_cuda == (device.type == "cuda"):
            return NotImplemented
        options = {key: kwargs[key] for key in ("dtype", "memory_format") if key in kwargs}
        made = torch.empty_like(source, device=device, **options)
        if made.is_cuda:
            _copy_to_device(made, source)
            return made
        non_blocking = bool(kwargs.get("non_blocking", False))
        if not _is_unread(source, made):
            return self._copy_to_host(made, source, non_blocking)
        _take_temporary(made, source, non_blocking)
        # Fresh memory of zeros, of which no page is touched.
        zeros = torch.frombuffer(mmap.mmap(-1, made.untyped_storage().nbytes()), dtype=torch.uint8)
        return made.set_(zeros.untyped_storage(), 0, made.shape, made.stride())

    def copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Write a tensor into another one, perhaps on another device."""
        target, source = args[:2]
        are_strided = target.layout is source.layout is torch.strided
        if target.is_cuda == source.is_cuda or not are_strided:
            return NotImplemented
        if target.is_cuda:
            if not target.is_contiguous():
                # Torch copies through a contiguous tensor of the device.
                torch.empty_like(target, memory_format=torch.contiguous_format)
            _copy_to_device(target, source)
            return target
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if not _is_unread(source, target):
            return self._copy_to_host(target, source, non_blocking)
        _take_temporary(target, source, non_blocking)
        return target

    def _copy_to_host(self, target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        _take_temporary(target, source, non_blocking)
        if is_known(source) and is_storage_small(source):
            materialize(source)
            return target.copy_(host_view(source))
        return target.fill_(self._read(source))

    def _read(self, tensor: Tensor) -> bool | int | float:
        """The number that the host reads; a whole number is named."""
        number = self._number(tensor)
        # Bytes are data: images, or a storage that a search saves.
        if is_exact(tensor.dtype) and tensor.dtype not in (torch.bool, torch.uint8):
            self._assumptions.add("a whole number", f"{number} is assumed", tensor)
        return number

    def _number(self, tensor: Tensor) -> bool | int | float:
        number = number_of(tensor)
        # Of a mask with both values the first is false.
        if number is None:
            return False
        state = state_of(tensor)
        is_guess = isinstance(state, Uniform) and not state.is_certain and not state.was_read
        if not is_guess or not isinstance(number, float) or number <= 0:
            return number
        number /= 1.0 + READ_STEP * self._count
        self._count += 1
        # A copy to the host has this type. The steps are lost in types of two bytes.
        if tensor.dtype == torch.float32:
            number = torch.tensor(number, dtype=tensor.dtype).item()
        set_state(tensor, Uniform(number, was_read=True))
        return number


def _copy_to_device(target: Tensor, source: Tensor) -> None:
    """Copy what may be read: whole numbers, masks, and floats that are neither many nor weights."""
    is_whole = covers_its_storage(target)
    if is_parameter(target) or is_parameter(source) or not is_small(target):
        mark_unknown(target)
    elif is_whole or is_writable(target):
        if not is_whole:
            materialize(target)
        host_view(target).copy_(source)
        set_state(target, WRITTEN)


def _is_unread(source: Tensor, target: Tensor) -> bool:
    """Whether a copy to the host is left out: many floats of unknown values."""
    if target.nbytes <= UNREAD_BYTES or is_exact(target.dtype):
        return False
    return not (is_known(source) and is_small(source) and is_storage_small(source))


def _take_temporary(target: Tensor, source: Tensor, non_blocking: bool) -> None:
    """Request, and free, the memory of the device that torch needs for a copy to the host."""
    # Source: copy_kernel_cuda in aten/src/ATen/native/cuda/Copy.cu of torch 2.14.
    converts = non_blocking and target.dtype != source.dtype
    if converts or not source.is_contiguous():
        dtype = target.dtype if converts else source.dtype
        torch.empty(source.shape, dtype=dtype, device=source.device)
