"""The module whose forward or backward pass runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch.nn import Module
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from lightning_batchmem.devices.tensors import tensors_in


class RunningModules:
    """Follows which module is the innermost whose forward or backward pass runs now.

    ``torch.utils.module_tracker.ModuleTracker`` (2.13) does not have the order of the modules,
    and its hooks keep the graph of a checkpointed block alive, which takes memory of its own.
    """

    def __init__(self, root: Module) -> None:
        # The root counts as no module, as do modules without a name in it.
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
