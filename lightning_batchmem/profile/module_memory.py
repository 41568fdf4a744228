"""The memory of a step by module: parameters by arithmetic, activations as autograd saves them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_batchmem.devices.breakdown import state_tensors
from lightning_batchmem.devices.running_modules import RunningModules
from lightning_batchmem.devices.tensors import is_on, plain_tensors, tensors_in


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
        modules: every module that holds memory, itself or in its submodules, in the order of
            ``named_modules()``.
        peak_bytes: the peak of the step; None if it is unknown.
        batch_size: samples of the step; ``None`` if its batch does not show them.
    """

    modules: tuple[ModuleMemory, ...]
    peak_bytes: int | None
    batch_size: int | None = None

    @property
    def other_bytes(self) -> int | None:
        """What no module holds: the batch, temporary tensors, workspaces (host: the program)."""
        if self.peak_bytes is None:
            return None
        return self.peak_bytes - sum(module.total_bytes for module in self.modules)


class ModuleBytes:
    """Counts the storages of a step on one device, each for the first module that has it.

    Between ``begin`` and ``end_forward`` it notes what autograd saves for backward. The step runs
    the same operators as without it.
    """

    def __init__(self, root: Module, device: torch.device, batch: object) -> None:
        self._root = root
        self._device = device
        self._running = RunningModules(root)
        self._hooks: Any = None
        # The addresses of storages that were counted.
        self._counted: set[int] = set()
        self._bytes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._owners: dict[int, str] = {}
        for name, module in root.named_modules():
            weights = list(module.parameters(recurse=False))
            self._count([*weights, *module.buffers(recurse=False)], name, "parameters_bytes")
            for weight in weights:
                self._owners.setdefault(id(weight), name)
        self._weights = set(self._counted)
        # The batch is no activation.
        self._storages_of(tensors_in(batch))

    def begin(self) -> None:
        """Begin the forward pass."""
        self._running.watch()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved)
        self._hooks.__enter__()

    def end_forward(self) -> None:
        """End the forward pass; later calls do nothing."""
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None
            self._running.unwatch()

    def peak(
        self, optimizers: Sequence[Optimizer], peak_bytes: int | None, batch_size: int | None
    ) -> PeakByModule:
        """Return the bytes of all modules, with the gradients and states that exist now."""
        # Activations are free by now, and other storages may have their addresses.
        self._counted = self._weights
        for weight in self._root.parameters():
            if weight.grad is not None:
                self._count([weight.grad], self._owners[id(weight)], "gradients_bytes")
        for optimizer in optimizers:
            for trained, state in optimizer.state.items():
                owner = self._owners.get(id(trained), "")
                self._count(tensors_in(state), owner, "optimizer_state_bytes")
        self._count(state_tensors(optimizers), "", "optimizer_state_bytes")
        holders = {""}
        for name in self._bytes:
            while name not in holders:
                holders.add(name)
                name = name.rpartition(".")[0]
        modules = [
            ModuleMemory(name, type(module).__name__, **self._bytes[name])
            for name, module in self._root.named_modules()
            if name in holders
        ]
        return PeakByModule(tuple(modules), peak_bytes, batch_size)

    def _save(self, tensor: Tensor) -> Tensor:
        self._count([tensor], self._running.innermost, "activations_bytes")
        return tensor

    def _count(self, tensors: Iterable[Tensor], module: str, part: str) -> None:
        self._bytes[module][part] += self._storages_of(tensors)

    def _storages_of(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of the storages that were not counted before."""
        count_bytes = 0
        for tensor in tensors:
            for part in plain_tensors(tensor):
                if not is_on(part.device, self._device):
                    continue
                storage = part.untyped_storage()
                if storage.data_ptr() not in self._counted:
                    self._counted.add(storage.data_ptr())
                    count_bytes += storage.nbytes()
        return count_bytes
