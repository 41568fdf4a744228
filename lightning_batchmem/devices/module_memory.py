"""Which module holds the memory at each moment of a step, exact in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_batchmem.devices.breakdown import state_tensors
from lightning_batchmem.devices.peaks import LiveStorages, PhasePeaks
from lightning_batchmem.devices.running_modules import RunningModules
from lightning_batchmem.devices.tensors import plain_tensors, tensors_in


class Moment(NamedTuple):
    """A moment of a step: its start, or right after an operator.

    Attributes:
        live_bytes: all bytes that are alive.
        num_events: so many storages were created or freed until then.
        phase: the phase in which it is; ``None`` at the start, and where no phases are marked.
        operator: the operator; ``None`` at the start.
        module: the name of the module that called it.
    """

    live_bytes: int
    num_events: int
    phase: str | None = None
    # torch does not annotate its operators.
    operator: Any = None
    module: str = ""


@dataclass(slots=True, eq=False)
class _Storage:
    size_bytes: int
    module: str
    # Parameters, gradients and optimizer states belong to the module of their parameter.
    is_owned: bool = False


class ModuleStorages(LiveStorages):
    """Notes when each storage of a step is created and freed, and in which module.

    It is entered before a step and left after it. The step is the user's own, and computes the same
    as without it.

    Args:
        module: the root of all modules.
        optimizers: the optimizers of the step.
        batch: the batch, as far as it is on the device.
        device_type: storages on devices of this type are counted.
        phases: marks the phases of the step; ``None`` where they are not needed.
    """

    def __init__(
        self,
        module: Module,
        optimizers: Iterable[Optimizer],
        batch: object,
        device_type: str,
        phases: PhasePeaks | None = None,
    ) -> None:
        super().__init__(device_type=device_type)
        self._root = module
        self._optimizers = list(optimizers)
        self._phases = phases
        self._running = RunningModules(module)
        self._hooks: list[RemovableHandle] = []
        self._owners: dict[int, str] = {}
        self._by_key: dict[int, _Storage] = {}
        # Storages that exist when the step begins.
        self._at_start: list[_Storage] = []
        # Each storage appears when it is created, and once more when it is freed.
        self._events: list[tuple[_Storage, bool]] = []
        self._is_backward = False
        # The moments after all operators, whose live bytes are not yet known.
        self._moments: list[Moment] = []
        # Whether an operator has just run; its arguments were there before.
        self._is_created = False
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
        self._mark(state_tensors(self._optimizers))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # This number is private in torch 2.5 to 2.14, as in its own ModuleTracker.
        is_backward = torch._C._current_graph_task_id() != -1
        if self._is_backward and not is_backward:
            self._running.end_backward()
        self._is_backward = is_backward
        kwargs = kwargs or {}
        self.track(args)
        self.track(kwargs.values())
        result = func(*args, **kwargs)
        self._is_created = True
        self.track((result,))
        self._is_created = False
        phase = None if self._phases is None else self._phases.phase
        moment = Moment(0, len(self._events), phase, func, self._running.innermost)
        self._moments.append(moment)
        return result

    def moments(self) -> list[Moment]:
        """Return the start of the step, and the moment after each operator."""
        live_bytes = [sum(storage.size_bytes for storage in self._at_start)]
        for storage, is_created in self._events:
            change = storage.size_bytes if is_created else -storage.size_bytes
            live_bytes.append(live_bytes[-1] + change)
        return [
            moment._replace(live_bytes=live_bytes[moment.num_events])
            for moment in (Moment(0, 0), *self._moments)
        ]

    def bytes_by_module(self, moment: Moment) -> dict[str, int]:
        """Return the bytes that each module holds itself, in the order of ``named_modules()``."""
        bytes_of = dict.fromkeys([name for name, _ in self._root.named_modules()], 0)
        for storage in self._alive_at(moment):
            bytes_of[storage.module] += storage.size_bytes
        return bytes_of

    def _alive_at(self, moment: Moment) -> Iterable[_Storage]:
        alive = dict.fromkeys(self._at_start)
        for storage, is_created in self._events[: moment.num_events]:
            if is_created:
                alive[storage] = None
            else:
                del alive[storage]
        return alive

    def _find_lasting(self, batch: object) -> None:
        """Count what exists before the step, each storage for the first module that owns it."""
        weights = []
        for name, module in self._root.named_modules():
            own_weights = list(module.parameters(recurse=False))
            weights += own_weights
            self._mark([*own_weights, *module.buffers(recurse=False)], name)
            for weight in own_weights:
                self._owners.setdefault(id(weight), name)
        for weight in weights:
            self._mark_gradient(weight)
            if weight.requires_grad:
                self._hooks.append(weight.register_post_accumulate_grad_hook(self._mark_gradient))
        for optimizer in self._optimizers:
            for weight, state in optimizer.state.items():
                owner = self._owners.get(id(weight), "")
                self._mark(tensors_in(state), owner)
        self._mark(state_tensors(self._optimizers))
        self.track(tensors_in(batch))

    def _mark_gradient(self, weight: Tensor) -> None:
        if weight.grad is not None:
            self._mark([weight.grad], self._owners.get(id(weight), ""))

    def _mark(self, tensors: Iterable[Tensor], module: str = "") -> None:
        """Set the module of storages that no module owns."""
        tensors = list(tensors)
        self.track(tensors)
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                storage = self._by_key.get(plain.untyped_storage()._cdata)
                if storage is not None and not storage.is_owned:
                    storage.is_owned = True
                    storage.module = module

    def _count(self, key: int, storage: Any, size_bytes: int) -> None:
        super()._count(key, storage, size_bytes)
        record = _Storage(size_bytes, "")
        self._by_key[key] = record
        if self._is_created:
            record.module = self._running.innermost
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
    if has_own_tensors(module):
        return "some parameters are of a type of their own, as under FSDP2"
    return ""


def has_own_tensors(module: Module) -> bool:
    """Whether some parameters are of a type of their own, such as DTensor."""
    return any(_has_own_dispatch(weight) for weight in module.parameters())


def _has_own_dispatch(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ not in (
        Tensor.__torch_dispatch__,
        torch.nn.Parameter.__torch_dispatch__,
    )
