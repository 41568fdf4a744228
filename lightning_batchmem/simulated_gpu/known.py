"""What is known about the memory of a device whose kernels do nothing.

Device memory is host memory on the stub of the CUDA runtime. A storage on it is in one of three
states, which is an attribute of the storage and ends with it:

- ``WRITTEN``: its bytes are the values that a real device would hold;
- ``Uniform``, certain: each of its elements is this number, but its bytes are not written yet, so
  that large blocks of zeros touch no memory;
- ``Uniform``, not certain, or no state: the values are unknown. The number stands for all of them.
  Fresh memory is of this kind, since a kernel that is not an operator of torch may write to it; but
  it becomes known when an operator writes known values to a part of it.

This file is executed before Lightning is imported, so it imports torch and the standard library
only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

MIB = 2**20
EXACT_BYTES = 1024 * MIB
"""Whole numbers and masks of at most this size are computed: they decide about shapes."""
FLOAT_BYTES = 64 * MIB
"""The same for other numbers, whose work is larger: random masks, boxes and positions."""
EAGER_BYTES = 64 * 1024
"""Uniform memory up to this size is written at once, so that reads inside of torch find it."""
EAGER_FLOATS = 1
"""The same for unknown floats: only numbers are read."""
UNREAD_BYTES = 4 * MIB
"""Floats of unknown value above this size are not written where they are copied to the host."""

Number = bool | int | float | None
"""None is a mask of which some elements are true, and others are not."""


@dataclass(slots=True)
class Uniform:
    """A number that stands for all elements of a storage."""

    number: Number
    is_certain: bool = False
    is_fresh: bool = False
    was_read: bool = False
    # A shape was made of this mask, and the line is named.
    was_named: bool = False

    def is_named_now(self) -> bool:
        """Note that the line is named; False if it was before."""
        is_first = not self.was_named
        self.was_named = True
        return is_first


class Written:
    """The state of a storage whose bytes are the values of a real device."""


WRITTEN: Final = Written()
State = Written | Uniform


def state_of(tensor: Tensor) -> State:
    """What is known about the storage of a tensor; a new guess if nothing is."""
    if tensor.layout is not torch.strided:
        return Uniform(neutral_number(tensor.dtype))
    storage = tensor.untyped_storage()
    found: State | None = storage.__dict__.get("_simulated_state")
    if found is None:
        found = Uniform(neutral_number(tensor.dtype))
        storage.__dict__["_simulated_state"] = found
    return found


def has_state(tensor: Tensor) -> bool:
    """Whether an operator that was watched has made this tensor, or written to it."""
    is_strided = tensor.layout is torch.strided
    return is_strided and "_simulated_state" in tensor.untyped_storage().__dict__


def set_state(tensor: Tensor, state: State) -> None:
    """Replace what is known about the whole storage of a tensor."""
    if tensor.layout is not torch.strided:
        return
    if isinstance(state, Uniform) and _is_eager(tensor, state):
        host_view(tensor).fill_(_filling(state.number))
        if state.is_certain:
            state = WRITTEN
    tensor.untyped_storage().__dict__["_simulated_state"] = state


def _is_eager(tensor: Tensor, state: Uniform) -> bool:
    """Whether the number of a storage is written at once."""
    if state.is_fresh or tensor.nbytes > EAGER_BYTES or not covers_its_storage(tensor):
        return False
    is_often_read = state.is_certain or is_exact(tensor.dtype)
    return is_often_read or tensor.numel() <= EAGER_FLOATS


def is_writable(tensor: Tensor) -> bool:
    """Whether known values may be written to a part of its storage."""
    state = state_of(tensor)
    is_fresh = isinstance(state, Uniform) and state.is_fresh
    return is_storage_small(tensor) and (is_fresh or is_known(tensor))


def is_known(tensor: Tensor) -> bool:
    """Whether the values of a tensor are those of a real device."""
    if not tensor.is_cuda:
        return True
    # A lazily conjugated or negated tensor has other values than its bytes.
    if is_parameter(tensor) or tensor.is_conj() or tensor.is_neg():
        return False
    state = state_of(tensor)
    return state is WRITTEN or (isinstance(state, Uniform) and state.is_certain)


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a weight. Masks and indices may be parameters, and are none here."""
    # The check of an instance is slow, and most tensors are of this type.
    return (
        type(tensor) is not Tensor
        and isinstance(tensor, torch.nn.Parameter)
        and not is_exact(tensor.dtype)
    )


def is_exact(dtype: torch.dtype) -> bool:
    """Whether values of this type are whole numbers or truth values."""
    return not (dtype.is_floating_point or dtype.is_complex)


def is_small(tensor: Tensor) -> bool:
    """Whether the values of a tensor may be computed on the host."""
    if tensor.layout is not torch.strided:
        return False
    return tensor.nbytes <= (EXACT_BYTES if is_exact(tensor.dtype) else FLOAT_BYTES)


def neutral_number(dtype: torch.dtype) -> Number:
    """The number that stands for unknown values of this type."""
    if dtype == torch.bool:
        return True
    return 0 if is_exact(dtype) else 1.0


def covers_its_storage(tensor: Tensor) -> bool:
    """Whether a write to this tensor leaves no byte of its storage as it was."""
    storage_bytes = tensor.untyped_storage().nbytes()
    if tensor.nbytes < storage_bytes:
        return False
    if tensor.is_contiguous():
        return True
    # Elements of an expanded tensor share bytes.
    strides = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )
    dense = 1
    for stride, size in strides:
        if stride != dense:
            return False
        dense *= size
    return True


def host_view(tensor: Tensor) -> Tensor:
    """Return a tensor of the host over the bytes of a tensor of the device."""
    storage = tensor.untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype)
    if storage.nbytes() == 0:
        return made.new_empty(tensor.shape)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    all_bytes = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return made.set_(all_bytes, tensor.storage_offset(), tensor.shape, tensor.stride())


def materialize(tensor: Tensor) -> None:
    """Write the bytes of a storage that is fresh, or uniform and certain."""
    state = state_of(tensor)
    if isinstance(state, Uniform) and (state.is_certain or state.is_fresh):
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        whole = host_view(tensor.as_strided((count,), (1,), 0))
        whole.fill_(_filling(state.number))
        set_state(tensor, WRITTEN)


def is_storage_small(tensor: Tensor) -> bool:
    """Whether the whole storage may be written on the host."""
    limit = EXACT_BYTES if is_exact(tensor.dtype) else FLOAT_BYTES
    return tensor.untyped_storage().nbytes() <= limit


def mark_unknown(tensor: Tensor, guess: Uniform | None = None, *, keeps: bool = False) -> None:
    """Note that unknown values were written to a part or the whole of a storage.

    Args:
        tensor: the part.
        guess: the number that stands for these values; by default the neutral one.
        keeps: whether an unknown storage keeps its number, as in a sum in place.
    """
    number = neutral_number(tensor.dtype) if guess is None else guess.number
    before = state_of(tensor)
    keeps = keeps or not covers_its_storage(tensor)
    if keeps and isinstance(before, Uniform) and not (before.is_certain or before.is_fresh):
        number = before.number
    set_state(tensor, Uniform(number))


def make_known(made: Tensor, values: Tensor) -> Tensor:
    """Write values of the host into a new tensor of the device."""
    if made.numel() > 0:
        host_view(made).copy_(values)
    set_state(made, WRITTEN)
    return made


def _filling(number: Number) -> bool | int | float:
    return True if number is None else number


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of an operator, and those in its lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, Tensor):
                    yield item
