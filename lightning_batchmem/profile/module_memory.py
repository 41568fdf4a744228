"""The memory of a step by module: parameters by arithmetic, activations as autograd saves them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer

from lightning_batchmem.devices.foreign_values import error_text
from lightning_batchmem.devices.optimizers import with_wrapped
from lightning_batchmem.devices.tensors import bytes_of, is_on, plain_tensors, tensors_in


@dataclass(frozen=True)
class ModuleMemory:
    """The bytes of one module, without those of its submodules.

    Args:
        name: the name of the module in ``named_modules()``; empty for the LightningModule itself.
        class_name: the name of its class.
        parameters_bytes: its parameters and buffers.
        gradients_bytes: gradients of its parameters.
        optimizer_state_bytes: optimizer state of its parameters.
        activations_bytes: tensors that its forward pass saves for backward.
    """

    name: str
    class_name: str
    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_state_bytes: int = 0
    activations_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_state_bytes
            + self.activations_bytes
        )


@dataclass(frozen=True)
class PeakByModule:
    """The bytes at the peak of a step, by module.

    Args:
        modules: every module that takes memory, in the order of ``named_modules()``; empty if they
            could not be measured.
        peak_bytes: the peak of the step; None if it is unknown.
        batch_size: samples of the step; None if its batch does not show them.
        why_not: why they could not be measured; empty if they were.
    """

    modules: tuple[ModuleMemory, ...] = ()
    peak_bytes: int | None = None
    batch_size: int | None = None
    why_not: str = ""


# torch checks here that there are no hooks. Both names are private in torch 2.5.1 to 2.14.
_DISABLE = "_saved_tensors_hooks_disable"
# Here it adds hooks.
_PUSH = "_push_saved_tensors_default_hooks"


class SavedTensors:
    """Calls a function with each tensor that autograd saves, as long as the step allows hooks.

    ``disable_saved_tensors_hooks``, which ``torch.func.grad`` calls, raises an error where there
    are hooks. So these end before it. Hooks of the step itself are called instead of these.

    Args:
        save: is called with each tensor.
        end: is called with the reason if the step forbids hooks.
    """

    # torch calls only the hooks that were added last, so all profilers of a step share them.
    _entered: ClassVar[list[SavedTensors]] = []
    _hooks: ClassVar[ExitStack] = ExitStack()
    _disable = getattr(torch._C._autograd, _DISABLE)
    _push = getattr(torch._C._autograd, _PUSH)

    def __init__(self, save: Callable[[Tensor], object], end: Callable[[str], object]) -> None:
        self._save = save
        self._end = end

    @staticmethod
    def replace_others() -> bool:
        """Whether hooks of somebody else would not be called beside these."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is not None and top[0] is not _save_all

    def __enter__(self) -> None:
        if not self._entered:
            hooks = torch.autograd.graph.saved_tensors_hooks(_save_all, _unchanged)
            self._hooks.enter_context(hooks)
            vars(torch._C._autograd).update({_DISABLE: self._end_all, _PUSH: self._check_others})
        self._entered.append(self)

    def __exit__(self, *_: object) -> None:
        self._entered.remove(self)
        if not self._entered:
            vars(torch._C._autograd).update({_DISABLE: self._disable, _PUSH: self._push})
            self._hooks.close()

    @classmethod
    def _check_others(cls, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        # Activation checkpointing and save_on_cpu keep nothing on the device.
        if not (getattr(pack, "__module__", None) or "").startswith("torch."):
            cls._refuse_all("the step has hooks on saved tensors itself")
        cls._push(pack, unpack)

    @classmethod
    def _refuse_all(cls, reason: str) -> None:
        for one in cls._entered:
            one._end(reason)

    @classmethod
    def _end_all(cls, *arguments: Any, **keywords: Any) -> None:
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        # Hooks of the step itself, above these, are an error without these too.
        if top is not None and top[0] is _save_all:
            cls._hooks.close()
            cls._refuse_all("the step forbids hooks on saved tensors, as torch.func.grad does")
        cls._disable(*arguments, **keywords)


def _save_all(tensor: Tensor) -> tuple[Tensor, int]:
    for one in SavedTensors._entered:
        one._save(tensor)
    return tensor, _version(tensor)


def _version(tensor: Tensor) -> int:
    # A tensor of a project may refuse every function. The name is private in torch 2.5.1 to 2.14.
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._version


def _unchanged(saved: tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor. With hooks, torch does not check that it has not changed."""
    tensor, version = saved
    if _version(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace"
            f" operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version};"
            f" expected version {version} instead."
        )
    return tensor


class ModuleStep:
    """Divides the memory of one steady step among the modules.

    The step runs the same operators as without it.

    Args:
        device: the device of the step.
    """

    def __init__(self, device: torch.device) -> None:
        # What was measured, or why it was not; None until then.
        self.peak: PeakByModule | None = None
        self._device = device
        self._root = Module()
        self._optimizers: Sequence[Optimizer] = ()
        self._hooks = ExitStack()
        self._names: dict[int, str] = {}
        # The names of the modules that run forward now, the innermost one last.
        self._running = [""]
        # The addresses of storages that are not activations, or that a module has already.
        self._counted: set[int] = set()
        self._activations_bytes: Counter[str] = Counter()

    def begin(self, module: Module, optimizers: Sequence[Optimizer], batch: object) -> None:
        """Begin to note what autograd saves for backward."""
        self._root = module
        self._optimizers = optimizers
        self.peak = None
        self._counted.clear()
        self._activations_bytes.clear()
        self._names = {id(part): name for name, part in module.named_modules()}
        if SavedTensors.replace_others():
            self.refuse("the training has hooks on saved tensors itself")
            return
        self._storages_of([*module.parameters(), *module.buffers(), *tensors_in(batch)])
        end_forward = register_module_forward_hook(self._end_forward, always_call=True)
        self._hooks.callback(end_forward.remove)
        self._hooks.callback(register_module_forward_pre_hook(self._begin_forward).remove)
        self._hooks.enter_context(SavedTensors(self._save, self.refuse))

    def close(self) -> None:
        """Stop to measure, also in the middle of a step."""
        self._hooks.close()

    def end(self, samples: int | None, peak_bytes: int | None) -> None:
        """Use what was measured, and the gradients and states that exist now."""
        if self.peak is not None:
            return
        optimizers = [one for optimizer in self._optimizers for one in with_wrapped(optimizer)]
        counted: set[Tensor] = set()
        modules = []
        for name, module in self._root.named_modules():
            # A weight of two modules belongs to the first one.
            weights = [one for one in module.parameters(recurse=False) if one not in counted]
            counted.update(weights)
            states = [one.state.get(weight) for one in optimizers for weight in weights]
            # A wrapper may share its state with the optimizer that it holds.
            tensors = {id(tensor): tensor for tensor in tensors_in(states)}.values()
            memory = ModuleMemory(
                name,
                type(module).__name__,
                bytes_of([*weights, *module.buffers(recurse=False)], self._device),
                bytes_of([one.grad for one in weights if one.grad is not None], self._device),
                bytes_of(tensors, self._device),
                self._activations_bytes[name],
            )
            if memory.total_bytes:
                modules.append(memory)
        self.peak = PeakByModule(tuple(modules), peak_bytes, samples)

    def refuse(self, reason: str) -> None:
        """Note why nothing can be measured."""
        self.peak = PeakByModule(why_not=f"No table of the modules: {reason}.")

    def _begin_forward(self, module: Module, inputs: object) -> None:
        # Another module, such as a metric, belongs to the one that calls it.
        self._running.append(self._names.get(id(module), self._running[-1]))

    def _end_forward(self, module: Module, inputs: object, outputs: object) -> None:
        self._running.pop()

    def _save(self, tensor: Tensor) -> None:
        # What backward computes again is freed soon. This number is private in torch 2.5 to 2.14.
        if torch._C._current_graph_task_id() == -1 and self.peak is None:
            try:
                self._activations_bytes[self._running[-1]] += self._storages_of([tensor])
            # The wrappers of torch.func have no storage, and a project may have its own tensors.
            except Exception as error:  # noqa: BLE001
                self.refuse(f"a tensor that autograd saves has no memory ({error_text(error)})")

    def _storages_of(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of the storages that were not counted before."""
        count_bytes = 0
        parts = (part for tensor in tensors for part in plain_tensors(tensor))
        for part in parts:
            storage = part.untyped_storage()
            if is_on(part.device, self._device) and storage.data_ptr() not in self._counted:
                self._counted.add(storage.data_ptr())
                count_bytes += storage.nbytes()
        return count_bytes
