"""Values that a program may read from a device whose kernels do nothing.

What is made from the batch, from constants and from random numbers is known: such operators run a
second time on the host, over the bytes of the device, as far as that is cheap. What depends on
weights or on large products is unknown, and ``unknown.py`` has what is assumed about it.

This file is executed before Lightning is imported, so it imports torch and the standard library
only, and neighbours that were loaded before (``VALUE_MODULES`` in ``child.py``).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

# `_get_current_dispatch_mode` is private in torch 2.5 to 2.14.
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from lightning_batchmem.simulated_gpu.assumptions import (
    CUDNN_ATTENTION,
    Assumptions,
    CudnnAttention,
    Reads,
    is_initialization,
)
from lightning_batchmem.simulated_gpu.known import (
    UNREAD_BYTES,
    Number,
    Operator,
    covers_its_storage,
    describe,
    fill,
    has_state,
    host_view,
    is_exact,
    is_known,
    is_on_device,
    is_parameter,
    is_small,
    is_writable,
    make_known,
    mark_unknown,
    number_of,
    on_host,
    own_kernel,
    tensors_in,
    to_device,
)
from lightning_batchmem.simulated_gpu.one_rank import Exchanges, Refuse, raise_refusal
from lightning_batchmem.simulated_gpu.unknown import (
    SHAPES,
    assume_distinct,
    assumed_number,
    certain_byte,
)

aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)
_INDEXING = frozenset({"index", "index_put", "_index_put_impl", "_unsafe_index"})
_INITIALIZING = (
    *("normal_", "uniform_", "zero_", "fill_", "random_"),
    *("erfinv_", "mul_", "add_", "clamp_"),
)
"""What ``torch.nn.init`` calls."""
_HOST_FILLS = frozenset(
    getattr(getattr(aten, name), overload)
    for name in _INITIALIZING
    for overload in getattr(aten, name).overloads()
)


_IF_READ = "If a shape follows from it, search again on the GPU."


# TorchDispatchMode.__init_subclass__ has no type annotations.
class Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the values that a program reads from the device, from ``enter`` to ``exit``.

    Operators of the thread that enters it are watched, and those of the backward passes that it
    starts. A process that it forks, such as a worker of a loader, is not.

    Args:
        refuse: ends the process with a sentence.

    Attributes:
        add_assumption: adds a sentence of the library of the simulated GPU.
    """

    # Higher-order operators of torch 2.6 and later come here, and run as they are.
    supports_higher_order_operators = True

    # With these two, torch.compile compiles as without this mode: torch 2.5 reads the first one.

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether the mode is not part of the program."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether operators that are compiled do not come here."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch keeps dynamo out of ``__torch_dispatch__``; 2.9 does not."""
        return False

    def __init__(self, refuse: Refuse = raise_refusal) -> None:
        # TorchDispatchMode.__init__ has no type annotations.
        super().__init__()  # type: ignore[no-untyped-call]
        self._exchanges = Exchanges(refuse)
        self._operators: dict[Any, Operator] = {}
        self._assumptions = Assumptions()
        self.add_assumption = self._assumptions.add_of_library
        self._attention = CudnnAttention()
        self.reads = Reads(refuse)
        self._is_on = False
        self._special: dict[str, Callable[[Any, Any, Any], Any]] = {
            "_local_scalar_dense": self._scalar,
            "_to_copy": self._to_copy,
            "copy": self._copy,
            "masked_select": self._masked_select,
            "lift_fresh": _lifted,
            **dict.fromkeys(("mm", "addmm", "_sparse_addmm"), assume_distinct),
            **dict.fromkeys(CUDNN_ATTENTION, self._attention.count),
        }
        os.register_at_fork(after_in_child=self.exit)

    @property
    def assumptions(self) -> list[str]:
        """Sentences about what is assumed, with lines of the project."""
        return [*self._assumptions.sentences, *self._attention.sentences]

    def enter(self) -> None:
        """Watch operators from now on."""
        self._is_on = True
        # TorchDispatchMode.__enter__ has no type annotations.
        self.__enter__()  # type: ignore[no-untyped-call]

    def exit(self) -> None:
        """Watch no operators any more."""
        self._is_on = False
        # Another mode that was entered later would have to be left first.
        if _get_current_dispatch_mode() is self:
            # TorchDispatchMode.__exit__ has no type annotations.
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    # torch.compiler.disable imports dynamo, which takes a second.
    @_disable_dynamo
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if types and any(map(_has_own_dispatch, types)):
            # DTensor looks at shapes in a FakeTensorMode, which comes after this mode.
            if any(kind.__name__ == "FakeTensor" for kind in types):
                return func(*args, **kwargs)
            # The operators that such a tensor calls come here.
            return NotImplemented
        if not is_on_device(args, kwargs) or not self._is_on:
            if func in _HOST_FILLS and is_initialization(args[0]):
                return args[0]
            return func(*args, **kwargs)
        operator = self._operators.get(func)
        if operator is None:
            if not hasattr(func, "_schema"):
                return func(*args, **kwargs)
            operator = self._operators[func] = describe(func)
        if (special := self._special.get(operator.name)) is not None:
            result = special(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if operator.name in SHAPES:
            return self._shaped(operator.name, func, args, kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._exchanges.run(func, args, kwargs)
        if operator.reads_inside:
            return self._opened(func, args, kwargs)
        if operator.keeps_values:
            return func(*args, **kwargs)
        if operator.name in _INDEXING:
            args = (args[0], self._without_masks(args), *args[2:])
        return _run(operator, func, args, kwargs)

    def _shaped(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator whose kernel reads values to find the size of its result."""
        tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
        if all(is_known(tensor) and is_small(tensor) for tensor in tensors):
            values = on_host(func, args, kwargs)
            if values is not NotImplemented:
                return to_device(values, tensors[0].device)
        what, advice, assume = SHAPES[name]
        result, amount, number = assume(args, kwargs)
        # All of no elements are none.
        if amount and number > 0:
            self._assumptions.add(what, amount, number, advice, tensors[0])
        return result

    def _masked_select(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # broadcast_tensors has no type annotations.
        tensor, mask = torch.broadcast_tensors(*args[:2])  # type: ignore[no-untyped-call]
        return self.__torch_dispatch__(aten.index.Tensor, (), (tensor, [mask]))

    def _without_masks(self, args: Sequence[Any]) -> list[Any]:
        """The indices in the arguments of an operator, with positions instead of masks."""
        indices: list[Any] = []
        for index in args[1]:
            if not isinstance(index, Tensor) or not index.is_cuda or index.dtype not in _MASKS:
                indices.append(index)
                continue
            # There are as many places as values that are put there.
            count = len(args[2]) if len(args) > 2 and args[2].dim() > 0 else 0
            if 1 < count < index.numel() and len(args[1]) == 1 and not is_known(index):
                places = index.new_empty((count, index.dim()), dtype=torch.long)
            else:
                places = self._shaped("nonzero", aten.nonzero.default, (index,), {})
            indices += places.unbind(1)
        return indices

    def _scalar(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the one value of a tensor, for ``item``, ``bool`` and the like."""
        tensor = args[0]
        if is_known(tensor):
            return func(host_view(tensor))
        return torch.tensor(self._read(tensor), dtype=tensor.dtype).item()

    def _to_copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return a copy of a tensor, perhaps on another device."""
        source = args[0]
        device = torch.device(kwargs.get("device") or source.device)
        if source.layout is not torch.strided or source.is_cuda == (device.type == "cuda"):
            return NotImplemented
        options = {key: kwargs[key] for key in ("dtype", "memory_format") if key in kwargs}
        made = torch.empty_like(source, device=device, **options)
        if _is_unread(source, made):
            # Fresh memory of zeros, of which no page is touched.
            memory = mmap.mmap(-1, made.untyped_storage().nbytes())
            zeros = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
            made.set_(zeros, 0, made.shape, made.stride())
        return self._copy(func, (made, source), kwargs)

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Write a tensor into another one, perhaps on another device: what may be read."""
        target, source = args[:2]
        are_strided = target.layout is source.layout is torch.strided
        if target.is_cuda == source.is_cuda or not are_strided:
            return NotImplemented
        if target.is_cuda:
            if not target.is_contiguous() and target.stride() != source.stride():
                # Torch copies through a contiguous tensor of the device.
                torch.empty_like(target, memory_format=torch.contiguous_format)
            if is_parameter(source) or is_parameter(target) or not is_small(target):
                mark_unknown(target)
            elif is_writable(target, overwrites=True):
                make_known(target, source)
            return target
        # The memory that torch needs for a copy to the host. Source: copy_kernel_cuda in
        # aten/src/ATen/native/cuda/Copy.cu of torch 2.14.
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        converts = non_blocking and target.dtype != source.dtype
        if converts or not source.is_contiguous():
            dtype = target.dtype if converts else source.dtype
            torch.empty(source.shape, dtype=dtype, device=source.device)
        if _is_unread(source, target):
            return target
        return target.copy_(host_view(source) if is_known(source) else self._read(source))

    def _opened(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator so that those inside of it come here too."""
        kernel = own_kernel(func)

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return kernel(*args, **kwargs)

        return _run(self._operators[func], func, args, kwargs, run)

    def _read(self, tensor: Tensor) -> Number:
        """The unknown number that the host reads; a whole number is named."""
        self.reads.count()
        number = number_of(tensor)
        if tensor.dtype == torch.bool:
            # Of a mask with both values the first is false.
            return number == 1
        # Bytes are data: images, or a storage that a search saves.
        if is_exact(tensor.dtype) and tensor.dtype != torch.uint8:
            self._assumptions.add(
                "A whole number", "{:,} is assumed", int(number), _IF_READ, tensor
            )
        return number


def _run(operator: Operator, func: Any, args: Any, kwargs: dict[str, Any], run: Any = None) -> Any:
    """Run an operator of the device, perhaps its own way, and note what is known of the results."""
    read, written = operator.read_and_written(args, kwargs)
    # Both before it runs, since it may write to what it reads.
    is_writable_now = [is_writable(tensor, overwrites=operator.overwrites) for tensor in written]
    may_know = all(map(is_known, read)) and all(is_writable_now)
    result = (run or func)(*args, **kwargs)
    if operator.name.startswith(("empty", "new_empty")):
        # A kernel that is not an operator of torch may write to it.
        return result
    changed = [one for one in (*written, *tensors_in([result])) if one.is_cuda]
    byte = certain_byte(operator.name, args)
    # Zeros read nothing, and other checks of known values are computed.
    if (
        byte is not None
        and not (read and may_know)
        and all(_may_fill(tensor, byte) for tensor in changed)
    ):
        for tensor in changed:
            fill(tensor, byte)
        return result
    if may_know and operator.is_cheap(read, changed):
        values = on_host(func, args, kwargs)
        if values is not NotImplemented:
            for tensor in written:
                make_known(tensor)
            _take(result, values)
            return result
    for tensor in changed:
        mark_unknown(tensor, assumed_number(operator.name, args, tensor))
    return result


def _may_fill(tensor: Tensor, byte: int) -> bool:
    # Zeros touch no memory of the host.
    has_room = byte == 0 or is_small(tensor)
    return has_room and covers_its_storage(tensor) and not is_parameter(tensor)


def _take(result: Any, values: Any) -> None:
    """Write what the host has computed into the results of the device."""
    for tensor, value in zip(tensors_in([result]), tensors_in([values]), strict=True):
        # What a kernel keeps for itself may differ from that of the host.
        if tensor.shape != value.shape:
            mark_unknown(tensor)
        # What was written in place is there. A length may lie on the host.
        elif tensor.is_cuda and tensor.data_ptr() != value.data_ptr():
            make_known(tensor, value)


def _lifted(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``torch.tensor`` copies its data out of sight, and then calls this operator."""
    if not has_state(args[0]):
        make_known(args[0])
    return func(*args, **kwargs)


def _is_unread(source: Tensor, target: Tensor) -> bool:
    """Whether a copy to the host is left out: many floats of unknown values."""
    if target.is_cuda or target.nbytes <= UNREAD_BYTES or is_exact(target.dtype):
        return False
    return not (is_known(source) and is_small(source))


def _has_own_dispatch(kind: Any) -> bool:
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
