"""Values that a program may read from a device whose kernels do nothing.

What is made from the batch, from constants and from random numbers is known: such operators run a
second time on the host, over the bytes of the device, as far as that is cheap. What depends on
weights or on large products is unknown: one number stands for all its elements (``neutral.py``). A
shape that depends on unknown values takes the worst case, and the line of the project is named.

This file is executed before Lightning is imported, so it imports torch and the standard library
only, and neighbours that were loaded before (``VALUE_MODULES`` in ``child.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

# `_get_current_dispatch_mode` is private in torch 2.5 to 2.14.
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from lightning_batchmem.simulated_gpu.attention import OPERATORS, CudnnAttention
from lightning_batchmem.simulated_gpu.frames import Assumptions, is_initialization
from lightning_batchmem.simulated_gpu.known import (
    WRITTEN,
    Number,
    Uniform,
    covers_its_storage,
    has_state,
    is_known,
    is_parameter,
    is_small,
    is_storage_small,
    is_writable,
    make_known,
    mark_unknown,
    materialize,
    neutral_number,
    set_state,
    state_of,
    tensors_in,
)
from lightning_batchmem.simulated_gpu.neutral import CERTAIN_MASKS, evaluated
from lightning_batchmem.simulated_gpu.operators import (
    FRESH,
    Operator,
    constant_of,
    describe,
    is_on_device,
    on_host,
)
from lightning_batchmem.simulated_gpu.reads import Reads
from lightning_batchmem.simulated_gpu.shapes import Shapes

aten = torch.ops.aten

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

_WITHOUT_SIGN_CHANGE = frozenset({"add", "sub", "addcmul", "addcdiv", "lerp", "_foreach_add"})


# TorchDispatchMode.__init_subclass__ has no type annotations.
class Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the values that a program reads from the device, from ``enter`` to ``exit``.

    Operators of the thread that enters it are watched, and those of the backward passes that it
    starts. A process that it forks, such as a worker of a loader, is not.
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

    def __init__(self) -> None:
        # TorchDispatchMode.__init__ has no type annotations.
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators: dict[Any, Operator] = {}
        self._assumptions = Assumptions()
        self._shapes = Shapes(self._assumptions)
        self._reads = Reads(self._assumptions)
        self._is_on = False
        self._special: dict[str, Callable[[Any, Any, Any], Any]] = {
            "_local_scalar_dense": self._reads.scalar,
            "_to_copy": self._reads.to_copy,
            "copy": self._reads.copy,
            "nonzero": self._shapes.nonzero,
            "masked_select": self._masked_select,
            "repeat_interleave": self._shapes.repeat_interleave,
            "bincount": self._shapes.bincount,
            "_unique2": self._shapes.unique,
            "_unique": self._shapes.unique,
            "unique_consecutive": self._shapes.unique,
            "unique_dim": self._shapes.unique_rows,
            "multinomial": self._shapes.multinomial,
            "nms": self._shapes.nms,
            "equal": self._shapes.equal,
            "allclose": self._shapes.allclose,
            "isin": self._shapes.isin,
            "histc": self._shapes.histogram,
            "_linalg_check_errors": _skip_unknown,
            # A GradScaler finds nothing: what it writes to stays 0.
            "_amp_foreach_non_finite_check_and_unscale": _run_only,
            "resize": _resized,
            "lift_fresh": _lifted,
            **dict.fromkeys(OPERATORS, CudnnAttention(self._assumptions.sentences).count),
        }
        os.register_at_fork(after_in_child=self.exit)

    @property
    def assumptions(self) -> list[str]:
        """Sentences about what is assumed, each with a line of the project."""
        return self._assumptions.sentences

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
        if operator.is_exchange:
            return _exchanged(func, args, kwargs)
        if not operator.computes_values:
            _before_view(operator, args)
            return func(*args, **kwargs)
        if operator.name in _INDEXING:
            args = (args[0], self._shapes.without_masks(args), *args[2:])
        return _run(operator, func, args, kwargs)

    def _masked_select(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # broadcast_tensors has no type annotations.
        tensor, mask = torch.broadcast_tensors(*args[:2])  # type: ignore[no-untyped-call]
        index = aten.index.Tensor
        args = (tensor, self._shapes.without_masks((tensor, [mask])))
        return _run(describe(index), index, args, {})


def _run(operator: Operator, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator of the device, and note what is known about the results."""
    read = operator.read_tensors(args, kwargs)
    written = operator.written_tensors(args, kwargs)
    is_known_result = operator.is_cheap and _may_know(operator, read, written)
    result = func(*args, **kwargs)
    made = [tensor for tensor in operator.fresh_tensors(result) if tensor.is_cuda]
    if operator.name in FRESH:
        for tensor in made:
            set_state(tensor, Uniform(neutral_number(tensor.dtype), is_fresh=True))
        return result
    if is_known_result:
        constant = _constant_result(operator, args, read, written, made)
        if constant is not None:
            for tensor in (*written, *made):
                set_state(tensor, Uniform(constant, is_certain=True))
            return result
        on_device = [tensor for tensor in read if tensor.is_cuda]
        if _computed(operator, func, args, kwargs, on_device, written, made, result):
            return result
    keeps = not operator.overwrites and operator.name in _WITHOUT_SIGN_CHANGE
    for tensor in written:
        mark_unknown(tensor, evaluated(operator.name, args, tensor), keeps=keeps)
    for tensor in made:
        set_state(tensor, evaluated(operator.name, args, tensor))
    return result


def _may_know(operator: Operator, read: list[Tensor], written: list[Tensor]) -> bool:
    """Whether the results are known, if they can be computed."""
    if not all(map(is_known, read)):
        return False
    for tensor in written:
        # A part of an unknown storage stays unknown.
        is_whole = operator.overwrites and covers_its_storage(tensor)
        if is_parameter(tensor) or not (is_whole or is_writable(tensor)):
            return False
    return True


def _constant_result(
    operator: Operator, args: Any, read: list[Tensor], written: list[Tensor], made: list[Tensor]
) -> Number:
    """The number in all elements of the results; None if there is none."""
    if not all(map(covers_its_storage, written)):
        return None
    constant = constant_of(operator.name, args)
    if constant is None and len(made) == 1 and made[0].dtype == torch.bool and read:
        is_uniform = all(t.is_cuda and isinstance(state_of(t), Uniform) for t in read)
        if is_uniform and operator.name in CERTAIN_MASKS:
            return evaluated(operator.name, args, made[0]).number
    return constant


def _computed(
    operator: Operator,
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    read: list[Tensor],
    written: list[Tensor],
    made: list[Tensor],
    result: Any,
) -> bool:
    """Compute the results on the host; False if they are too large, or the host has no kernel."""
    existing = [*read, *written]
    if not operator.is_short(read, [*written, *made]):
        return False
    if not all(map(is_small, (*existing, *made))) or not all(map(is_storage_small, existing)):
        return False
    for tensor in existing:
        materialize(tensor)
    values = on_host(func, args, kwargs)
    if values is NotImplemented:
        return False
    for tensor in written:
        set_state(tensor, WRITTEN)
    both = zip(operator.fresh_tensors(result), operator.fresh_tensors(values), strict=True)
    for tensor, value in both:
        # A length may lie on the host, where the operator has written it.
        if not tensor.is_cuda:
            continue
        # What a kernel keeps for itself may differ from that of the host.
        if tensor.shape == value.shape:
            make_known(tensor, value)
        else:
            mark_unknown(tensor)
    return True


def _before_view(operator: Operator, args: Any) -> None:
    """Write the bytes of a number that a view may read as another type."""
    if operator.name in ("view", "view_as_real", "view_as_complex"):
        for tensor in tensors_in(args[:1]):
            if tensor.is_cuda and is_known(tensor) and is_storage_small(tensor):
                materialize(tensor)


def _exchanged(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Exchange tensors in a group of one rank: it receives what it sends."""
    leaves = tree_leaves(args)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda]
    # Memory for what is received is fresh.
    are_known = all(map(is_writable, tensors))
    for tensor in tensors:
        if are_known:
            materialize(tensor)
    result = func(*args, **kwargs)
    for tensor in tensors:
        if are_known:
            set_state(tensor, WRITTEN)
        else:
            mark_unknown(tensor)
    return result


def _resized(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    bytes_before = tensor.untyped_storage().nbytes()
    result = func(*args, **kwargs)
    if 0 < bytes_before < tensor.untyped_storage().nbytes():
        # The stub moves no bytes inside of the device.
        set_state(tensor, Uniform(0))
    return result


def _lifted(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``torch.tensor`` copies its data out of sight, and then calls this operator."""
    if not has_state(args[0]):
        set_state(args[0], WRITTEN)
    return func(*args, **kwargs)


def _skip_unknown(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Errors of a factorization are found in known values only."""
    return func(*args, **kwargs) if all(map(is_known, tensors_in(args))) else None


def _run_only(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _has_own_dispatch(kind: Any) -> bool:
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
