"""Which module holds the memory at the peak of a step, exact in bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_batchmem.devices.breakdown import state_tensors
from lightning_batchmem.devices.peaks import LiveStorages
from lightning_batchmem.devices.tensors import plain_tensors, tensors_in

_Part = Literal[
    "parameters_bytes",
    "gradients_bytes",
    "optimizer_state_bytes",
    "activations_bytes",
    "temporary_bytes",
    "other_bytes",
]


@dataclass(frozen=True)
class ModuleMemory:
    """Live bytes of one module at the peak of a step, without those of its submodules.

    Args:
        name: the name of the module in ``named_modules()``; empty for the LightningModule itself,
            which has everything that is in no other module: the loss, and the optimizer step.
        class_name: the name of its class.
        parameters_bytes: its parameters and buffers.
        gradients_bytes: gradients of its parameters.
        optimizer_state_bytes: optimizer state of its parameters.
        activations_bytes: tensors of its forward pass that were alive when backward began.
        temporary_bytes: all other tensors that it created: those of the forward and backward pass
            and of the optimizer step that nothing keeps.
        other_bytes: the batch, and tensors that were created before the step.
    """

    name: str
    class_name: str
    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_state_bytes: int = 0
    activations_bytes: int = 0
    temporary_bytes: int = 0
    other_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_state_bytes
            + self.activations_bytes
            + self.temporary_bytes
            + self.other_bytes
        )


@dataclass(frozen=True)
class PeakByModule:
    """The live bytes at the peak of a step, by module.

    Args:
        modules: every module that holds memory, itself or in its submodules, in the order of
            ``named_modules()``. The sum over all of them is :attr:`peak_bytes`.
        operator: the operator that allocated at the peak, for example ``"aten.addmm.default"``;
            empty if the peak was before the first one.
        operator_module: the name of the module that called it.
        batch_size: samples of the step; ``None`` if its batch does not show them.
    """

    modules: tuple[ModuleMemory, ...]
    operator: str
    operator_module: str
    batch_size: int | None = None

    @property
    def peak_bytes(self) -> int:
        """Highest live bytes of the step."""
        return sum(module.total_bytes for module in self.modules)


@dataclass(slots=True, eq=False)
class _Storage:
    size_bytes: int
    module: str
    part: _Part
    # torch does not annotate its operators.
    operator: Any


class _RunningModules:
    """Knows the innermost module whose forward or backward pass runs now.

    ``torch.utils.module_tracker.ModuleTracker`` (2.13) does not know which module was entered last,
    and its hooks keep the graph of a checkpointed block alive, which takes memory of its own.
    """

    def __init__(self, root: Module) -> None:
        # The root counts as no module, as do modules that it does not know.
        self._names = {id(module): name for name, module in root.named_modules() if name}
        self._in_forward: list[str] = []
        self._in_backward: list[str] = []
        self._handles: list[RemovableHandle] = []

    @property
    def innermost(self) -> str:
        """The name of the module; empty outside all modules."""
        # A checkpointed block runs forward inside backward.
        running = self._in_forward or self._in_backward
        return running[-1] if running else ""

    def watch(self) -> None:
        """Follow the passes of all modules from now on."""
        self._handles = [
            register_module_forward_pre_hook(self._begin_forward),
            register_module_forward_hook(self._end_forward, always_call=True),
        ]

    def unwatch(self) -> None:
        """Remove the hooks of modules; those of a graph end with it."""
        for handle in self._handles:
            handle.remove()

    def end_backward(self) -> None:
        """Leave all modules whose backward pass no input has ended."""
        self._in_backward = []

    def _begin_forward(self, module: Module, inputs: object) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self._in_forward.append(name)
            self._add_hooks(inputs, partial(self._end_backward_of, name))

    def _end_forward(self, module: Module, inputs: object, outputs: object) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self._in_forward.pop()
            self._add_hooks(outputs, partial(self._begin_backward_of, name))

    def _add_hooks(self, data: object, hook: Callable[[object], None]) -> None:
        """Call a function before the backward pass of the operators that made the tensors."""
        for tensor in tensors_in(data):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(hook)

    def _begin_backward_of(self, name: str, _: object) -> None:
        if name in self._in_backward:
            return
        # The last submodule made the same tensor, and has begun before.
        place = len(self._in_backward)
        while place > 0 and self._in_backward[place - 1].startswith(f"{name}."):
            place -= 1
        self._in_backward.insert(place, name)

    def _end_backward_of(self, name: str, _: object) -> None:
        if name in self._in_backward:
            self._in_backward.remove(name)


class ModuleStorages(LiveStorages):
    """Notes when each storage of a step is created and freed, and in which module.

    It is entered before a step and left after it. The step is the user's own, and computes the same
    as without it.

    Args:
        module: the root of all modules.
        optimizers: the optimizers of the step.
        batch: the batch, as far as it is on the device.
        device_type: storages on devices of this type are counted.
    """

    def __init__(
        self,
        module: Module,
        optimizers: Iterable[Optimizer],
        batch: object,
        device_type: str,
    ) -> None:
        super().__init__(device_type=device_type)
        self._root = module
        self._optimizers = list(optimizers)
        self._running = _RunningModules(module)
        self._hooks: list[RemovableHandle] = []
        self._owners: dict[int, str] = {}
        self._by_key: dict[int, _Storage] = {}
        # Storages that exist when the step begins.
        self._at_start: list[_Storage] = []
        # Each storage appears when it is created, and once more when it is freed.
        self._events: list[tuple[_Storage, bool]] = []
        self._is_backward = False
        # The operator that has just run; None while its arguments are looked through.
        self._operator: Any = None
        self._find_lasting(batch)

    def __enter__(self) -> ModuleStorages:
        self._running.watch()
        # TorchDispatchMode.__enter__ has no type annotations.
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        # TorchDispatchMode.__exit__ has no type annotations.
        super().__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]
        self._running.unwatch()
        for hook in self._hooks:
            hook.remove()
        self._mark(state_tensors(self._optimizers), "optimizer_state_bytes")

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # This number is private in torch 2.5 to 2.13, as in its own ModuleTracker.
        is_backward = torch._C._current_graph_task_id() != -1
        if self._is_backward and not is_backward:
            self._running.end_backward()
        elif is_backward and not self._is_backward:
            for storage in self._by_key.values():
                if storage.part == "temporary_bytes":
                    storage.part = "activations_bytes"
        self._is_backward = is_backward
        kwargs = kwargs or {}
        self.track(args)
        self.track(kwargs.values())
        result = func(*args, **kwargs)
        self._operator = func
        self.track((result,))
        self._operator = None
        return result

    def peak_by_module(self, batch_size: int | None) -> PeakByModule:
        """Return the memory at the highest moment of the step."""
        alive = dict.fromkeys(self._at_start)
        live_bytes = sum(storage.size_bytes for storage in alive)
        peak_bytes = live_bytes
        # The peak is after so many events.
        num_events = 0
        for number, (storage, is_created) in enumerate(self._events, 1):
            live_bytes += storage.size_bytes if is_created else -storage.size_bytes
            if live_bytes > peak_bytes:
                peak_bytes = live_bytes
                num_events = number
        for storage, is_created in self._events[:num_events]:
            if is_created:
                alive[storage] = None
            else:
                del alive[storage]
        bytes_of: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        for storage in alive:
            bytes_of[storage.module][storage.part] += storage.size_bytes
        holders = {""}
        for name in bytes_of:
            while name not in holders:
                holders.add(name)
                name = name.rpartition(".")[0]
        modules = [
            ModuleMemory(name, type(module).__name__, **bytes_of[name])
            for name, module in self._root.named_modules()
            if name in holders
        ]
        last = self._events[num_events - 1][0] if num_events else None
        return PeakByModule(
            tuple(modules),
            operator="" if last is None else str(last.operator),
            operator_module="" if last is None else last.module,
            batch_size=batch_size,
        )

    def _find_lasting(self, batch: object) -> None:
        """Count what exists before the step, each storage for the first module that owns it."""
        weights = []
        for name, module in self._root.named_modules():
            own_weights = list(module.parameters(recurse=False))
            weights += own_weights
            self._mark([*own_weights, *module.buffers(recurse=False)], "parameters_bytes", name)
            for weight in own_weights:
                self._owners.setdefault(id(weight), name)
        for weight in weights:
            self._mark_gradient(weight)
            if weight.requires_grad:
                self._hooks.append(weight.register_post_accumulate_grad_hook(self._mark_gradient))
        for optimizer in self._optimizers:
            for weight, state in optimizer.state.items():
                owner = self._owners.get(id(weight), "")
                self._mark(tensors_in(state), "optimizer_state_bytes", owner)
        self._mark(state_tensors(self._optimizers), "optimizer_state_bytes")
        self._mark(tensors_in(batch), "other_bytes")

    def _mark_gradient(self, weight: Tensor) -> None:
        if weight.grad is not None:
            self._mark([weight.grad], "gradients_bytes", self._owners.get(id(weight), ""))

    def _mark(self, tensors: Iterable[Tensor], part: _Part, module: str = "") -> None:
        """Set the part and the module of storages that have no part that lasts."""
        tensors = list(tensors)
        self.track(tensors)
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                storage = self._by_key.get(plain.untyped_storage()._cdata)
                lasting = ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes")
                if storage is not None and storage.part not in lasting:
                    storage.part = part
                    storage.module = module

    def _count(self, key: int, storage: Any, size_bytes: int) -> None:
        super()._count(key, storage, size_bytes)
        record = _Storage(size_bytes, "", "other_bytes", self._operator)
        self._by_key[key] = record
        if self._operator is not None:
            record.module = self._running.innermost
            record.part = "temporary_bytes"
            self._events.append((record, True))
        else:
            self._at_start.append(record)

    def _forget(self, key: int, size_bytes: int) -> None:
        super()._forget(key, size_bytes)
        self._events.append((self._by_key.pop(key), False))


def why_not_possible(module: Module, *, is_compiled: bool) -> str:
    """Return why the memory of a step cannot be divided among modules; empty if it can."""
    if is_compiled:
        return "torch.compile compiled a part of the step"
    if not LiveStorages.is_possible():
        return "another dispatch mode is active"
    if any(_has_own_dispatch(weight) for weight in module.parameters()):
        return "some parameters are of a type of their own, as under FSDP2"
    return ""


def _has_own_dispatch(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ not in (
        Tensor.__torch_dispatch__,
        torch.nn.Parameter.__torch_dispatch__,
    )
