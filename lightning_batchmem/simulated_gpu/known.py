"""What is known about the memory of a device whose kernels do nothing, and how it is computed.

Device memory is host memory on the stub of the CUDA runtime. The values of a storage are known if
its bytes are those that a real device would hold. Of an unknown storage one number stands for all
elements: 1.0 for floats, 0 for whole numbers, or what an operator says (``unknown.py``). For masks
it is 1 if all elements are true, 0 if none is, and 0.5 if some are. What is known is an attribute
of the storage, and ends with it.

This file is executed before Lightning is imported, so it imports torch and the standard library
only.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MIB = 2**20
MOST_ELEMENTS = 2**24
"""Values of at most this many elements are computed: positions, lengths, masks and boxes.

An operator on more takes longer on the host than all the rest of a step.
"""
EAGER_BYTES = 64 * 1024
"""Unknown whole numbers up to this size are written, so that reads inside of torch find them."""
UNREAD_BYTES = 4 * MIB
"""Floats of unknown value above this size are not written where they are copied to the host."""

Number = bool | int | float

# DeepSpeed replaces it by a function that makes tensors of the device.
_empty = torch.empty

# With the library of the simulated GPU.
_PROCESS = ctypes.CDLL(None)


def is_known(tensor: Tensor) -> bool:
    """Whether the values of a tensor are those of a real device."""
    if not tensor.is_cuda:
        return True
    # A lazily conjugated or negated tensor has other values than its bytes.
    if not _is_strided(tensor) or is_parameter(tensor) or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.untyped_storage().__dict__.get("_number", 0) is None


def has_state(tensor: Tensor) -> bool:
    """Whether an operator that was watched has made this tensor, or written to it."""
    return _is_strided(tensor) and "_number" in tensor.untyped_storage().__dict__


def make_known(tensor: Tensor, values: Tensor | None = None) -> Tensor:
    """Note that the values of a tensor are known, and write them where they are given."""
    if values is not None and tensor.numel() > 0:
        host_view(tensor).copy_(values)
    tensor.untyped_storage().__dict__["_number"] = None
    return tensor


def fill(tensor: Tensor, value: int) -> None:
    """Make each byte of a tensor known. Zeros touch no memory of the host."""
    storage = tensor.untyped_storage()
    address, size = ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
    _PROCESS.cudaMemset(address, value, size)
    make_known(tensor)


def mark_unknown(tensor: Tensor, number: Number | None = None) -> Tensor:
    """Note that unknown values were written to a tensor; by default the neutral number."""
    if not _is_strided(tensor):
        return tensor
    number = neutral_number(tensor.dtype) if number is None else number
    tensor.untyped_storage().__dict__["_number"] = number
    is_small = is_exact(tensor.dtype) and tensor.nbytes <= EAGER_BYTES
    if (is_small or tensor.numel() == 1) and covers_its_storage(tensor):
        host_view(tensor).fill_(number)
    return tensor


def number_of(value: Any) -> Number:
    """The number that stands for a tensor, or a number itself."""
    if not isinstance(value, Tensor):
        # A scalar of the program.
        scalar: Number = value
        return scalar
    number: Number | None = None
    if not is_known(value):
        if _is_strided(value) and is_exact(value.dtype):
            number = value.untyped_storage().__dict__.get("_number")
    # Looking at more than this for each operator takes longer than all the rest.
    elif 0 < value.nbytes <= UNREAD_BYTES and not value.is_complex():
        values = host_view(value) if value.is_cuda else value
        if value.dtype == torch.bool:
            number = (int(values.any()) + int(values.all())) / 2
        # Any of known whole numbers may be picked: the largest makes the largest shape.
        elif value.numel() == 1 or is_exact(value.dtype):
            number = values.max().item()
    return neutral_number(value.dtype) if number is None else number


def neutral_number(dtype: torch.dtype) -> Number:
    """The number that stands for unknown values of this type."""
    return 0 if is_exact(dtype) and dtype != torch.bool else 1


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
    return _is_strided(tensor) and tensor.numel() <= MOST_ELEMENTS


def is_writable(tensor: Tensor, *, overwrites: bool) -> bool:
    """Whether a tensor is known after known values are written to it.

    A part of an unknown storage stays unknown, and so does a weight.
    """
    if is_parameter(tensor) or not _is_strided(tensor):
        return False
    return is_known(tensor) or (overwrites and covers_its_storage(tensor))


def covers_its_storage(tensor: Tensor) -> bool:
    """Whether a write to this tensor leaves no byte of its storage as it was."""
    if tensor.nbytes < tensor.untyped_storage().nbytes():
        return False
    # Elements of an expanded tensor share bytes.
    is_dense: bool = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return is_dense


def host_view(tensor: Tensor) -> Tensor:
    """Return a tensor of the host over the bytes of a tensor of the device."""
    storage = tensor.untyped_storage()
    made = _empty(0, dtype=tensor.dtype, device="cpu")
    if storage.nbytes() == 0:
        return made.new_empty(tensor.shape)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    all_bytes = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return made.set_(all_bytes, tensor.storage_offset(), tensor.shape, tensor.stride())


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of an operator, and those in its lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, Tensor):
                    yield item


def is_on_device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator has a tensor of the device, or makes one."""
    for tensor in tensors_in(args):
        if tensor.is_cuda:
            return True
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        return True
    return any(tensor.is_cuda for tensor in tensors_in(kwargs.values()))


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


_PRODUCTS = ("mm", "mv", "dist", "conv", "linear", "attention", "linalg", "cholesky", "solve")
"""Parts of names. The work of these operators is not bounded by the size of their tensors."""
_READING = ("linalg_eig", "svd", "lstsq", "pinv", "sqrth", "polar", "to_sparse")
"""Parts of names. Inside of these operators torch reads what others of them have found."""
_PRODUCT_OPERATIONS = 2**31
"""Multiplications of a product that is computed at most: about a second on one core."""

_OVERWRITING = frozenset(
    {
        *("fill", "zero", "copy", "normal", "uniform", "random", "exponential", "geometric"),
        *("log_normal", "cauchy", "bernoulli", "_foreach_zero", "_foreach_copy"),
    }
)
"""In place they do not read what they overwrite."""

_KEEPING = frozenset(
    {
        *("_unsafe_view", "record_stream"),
        # A GradScaler finds nothing: what it writes to stays 0.
        "_amp_foreach_non_finite_check_and_unscale",
    }
)
"""They write no values, though their schema does not say so."""


@dataclass(frozen=True, slots=True)
class Operator:
    """What the schema of an operator has about it.

    Attributes:
        name: without the underscore of one that writes to its first argument.
        runs_on_host: whether the host may run it too. Operators of others may do anything.
        is_product: whether its work is not bounded by the size of its tensors.
        reads_inside: whether it calls operators whose results it reads.
        reads_shapes: whether it reads no values.
        keeps_values: whether it writes no values: it returns a view, or changes a shape.
        arguments: their names.
        written: names of those to which it writes.
        overwrites: whether it does not read them.
    """

    name: str
    runs_on_host: bool
    is_product: bool
    reads_inside: bool
    reads_shapes: bool
    keeps_values: bool
    arguments: tuple[str, ...]
    written: frozenset[str]
    overwrites: bool

    def read_and_written(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors whose values decide about the results, and those to which it writes."""
        if not self.written:
            values = () if self.reads_shapes else (*args, *kwargs.values())
            return [*tensors_in(values)], []
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        written = [given[name] for name in self.written if name in given]
        unread = self.written if self.overwrites else ()
        read = [value for name, value in given.items() if name not in unread]
        return [*tensors_in(read)], [*tensors_in(written)]

    def is_cheap(self, read: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
        """Whether the host computes it in about a second."""
        if not self.runs_on_host or not all(map(is_small, (*read, *made))):
            return False
        # An optimizer changes the states of all weights at once.
        if sum(one.numel() for one in made) > MOST_ELEMENTS:
            return False
        if not self.is_product:
            return True
        longest = max((size for tensor in read for size in tensor.shape[-1:]), default=1)
        return longest * sum(tensor.numel() for tensor in made) <= _PRODUCT_OPERATIONS


def describe(function: Any) -> Operator:
    """Read the schema of an operator."""
    schema = function._schema
    written = [one for one in schema.arguments if one.alias_info and one.alias_info.is_write]
    name: str = function.overloadpacket.__name__
    if written:
        name = name.removesuffix("_")
    is_out = any(argument.kwarg_only for argument in written)
    returns_views = any(result.alias_info is not None for result in schema.returns)
    only_reshapes = torch.Tag.inplace_view in function.tags
    return Operator(
        name=name,
        runs_on_host=function.namespace in ("aten", "prims", "torchvision"),
        is_product=any(part in name for part in _PRODUCTS),
        reads_inside=any(part in name for part in _READING),
        reads_shapes=name.endswith("_like") or name.startswith("new_"),
        keeps_values=(not written and returns_views) or only_reshapes or name in _KEEPING,
        arguments=tuple(argument.name for argument in schema.arguments),
        written=frozenset(argument.name for argument in written),
        overwrites=is_out or (bool(written) and name in _OVERWRITING),
    )


def on_host(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on the bytes of the device; NotImplemented if the host has no kernel.

    Any other error is one of the program: on a device it would be an assert.
    """
    host_args = [_host_value(value) for value in args]
    host_kwargs = {key: _host_value(value) for key, value in kwargs.items()}
    try:
        return func(*host_args, **host_kwargs)
    except NotImplementedError:
        return NotImplemented
    except RuntimeError as error:
        if "not implemented for" in str(error):
            return NotImplemented
        raise


# Where an operator of the device may have its kernel.
_KERNELS = (
    torch.DispatchKey.CUDA,
    torch.DispatchKey.CompositeExplicitAutograd,
    torch.DispatchKey.CompositeExplicitAutogradNonFunctional,
    torch.DispatchKey.CompositeImplicitAutograd,
)


def own_kernel(func: Any) -> Any:
    """The kernel of an operator, which is called without those who watch operators.

    Its name is private in torch 2.5 to 2.14.
    """
    keys = filter(func.has_kernel_for_dispatch_key, _KERNELS)
    return functools.partial(func._op_dk, next(keys))


def _host_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return host_view(value) if value.is_cuda else value
    if isinstance(value, (list, tuple)):
        return [_host_value(item) for item in value]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    # The generator of the device has no values.
    return None if isinstance(value, torch.Generator) else value


def to_device(values: Any, device: torch.device) -> Any:
    """Return known tensors of the device with these values of the host."""
    if isinstance(values, Tensor):
        return make_known(torch.empty_like(values, device=device), values)
    if isinstance(values, (list, tuple)):
        return tuple(to_device(value, device) for value in values)
    return values
