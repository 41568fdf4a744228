"""What the memory of a training step is made of: exact bytes, every storage counted once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

# The names with "as" are imported from here by modules that do not use devices.tensors yet.
from lightning_batchmem.devices.tensors import copied as copied
from lightning_batchmem.devices.tensors import is_on as is_on
from lightning_batchmem.devices.tensors import list_state_bytes as list_state_bytes
from lightning_batchmem.devices.tensors import plain_tensors as plain_tensors
from lightning_batchmem.devices.tensors import samples_in as samples_in
from lightning_batchmem.devices.tensors import tensors_in as tensors_in


@dataclass(frozen=True)
class MemoryBreakdown:
    """What fills the memory at the peak of a step; the fields add up to :attr:`peak_bytes`.

    The first four are the storages that are alive *when a step begins*, each counted in the first part that holds it.
    From its second step on Lightning keeps the gradients through the next forward (``zero_grad`` runs after
    ``training_step``), so they are part of the peak there. Where somebody frees them between two steps (a manual
    ``zero_grad`` at the end of ``training_step``) they are 0 here, and inside ``activations_bytes`` instead.

    Args:
        parameters_bytes: parameters and buffers of the module.
        gradients_bytes: gradients that were alive when the step began.
        optimizer_state_bytes: state of the optimizers, and parameters that only they know (master copies).
        batch_bytes: the batch, as far as it lies on the measured device.
        activations_bytes: the peak less all other parts: activations, and temporaries of backward and of the optimizer
            with them; on the host also the heap that they leave behind.
        other_bytes: what was in use when the step began and is none of the above: workspaces and tensors that the user
            keeps on a GPU; interpreter and libraries on the host (there as it was before the first step, since the
            resident set still holds what a step has freed). Below 0 where not all of the tensors are resident
            (swapped out, or mapped from a file and never touched).
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    batch_bytes: int
    activations_bytes: int
    other_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Sum of the parts: the peak of the step, in bytes."""
        return self.start_bytes + self.activations_bytes

    @property
    def start_bytes(self) -> int:
        """What was in use when the step began, in bytes: every part but the activations."""
        known = self.parameters_bytes + self.gradients_bytes + self.optimizer_state_bytes + self.batch_bytes
        return known + self.other_bytes

    def at_peak(self, peak_bytes: int) -> MemoryBreakdown:
        """The same parts under another peak: what it holds beyond the start of the step is activations.

        A peak below the start (the host's two readings may differ by some pages) is taken off the rest, so that the
        activations are never negative and the sum stays exact.

        Args:
            peak_bytes: the peak of the step, in bytes.
        """
        below = min(0, peak_bytes - self.start_bytes)
        activations = max(0, peak_bytes - self.start_bytes)
        return replace(self, activations_bytes=activations, other_bytes=self.other_bytes + below)


def measure_breakdown(
    module: Module,
    optimizers: Iterable[Optimizer],
    batch: object,
    device: torch.device,
    *,
    start_bytes: int,
    peak_bytes: int | None = None,
) -> MemoryBreakdown:
    """What the memory of a step is made of; to be called when the step begins, with the batch on the device.

    Args:
        module: the module that is trained.
        optimizers: its optimizers.
        batch: the batch of the step, however nested.
        device: tensors elsewhere are not counted.
        start_bytes: what is in use now, in bytes.
        peak_bytes: the peak of the step in bytes, where it is known already; else see :meth:`MemoryBreakdown.at_peak`.

    Returns:
        The parts; without ``peak_bytes`` the activations are 0.

    Example:
        >>> linear = torch.nn.Linear(3, 5)
        >>> measure_breakdown(linear, [], torch.ones(2, 3), torch.device("cpu"), start_bytes=1000, peak_bytes=1500)
        MemoryBreakdown(parameters_bytes=80, gradients_bytes=0, optimizer_state_bytes=0, batch_bytes=24,\
 activations_bytes=500, other_bytes=896)
    """
    optimizers = list(optimizers)
    weights = list(module.parameters())
    groups = [optimizer.param_groups for optimizer in optimizers]
    inner = [one for optimizer in optimizers for one in vars(optimizer).values() if isinstance(one, Optimizer)]
    states = [list(optimizer.state.values()) for optimizer in (*optimizers, *inner)]
    seen: set[tuple[torch.device, int]] = set()

    def held(tensors: Iterable[Tensor]) -> int:
        return sum(_held_bytes(tensor, device, seen) for tensor in tensors)

    parameters = held(weights) + held(module.buffers())
    masters = [tensor for tensor in tensors_in(groups) if tensor.is_leaf]
    gradients = held(tensor.grad for tensor in (*weights, *masters) if tensor.grad is not None)
    state = held(masters) + held(tensors_in(states))
    data = held(tensors_in(batch))
    rest = start_bytes - parameters - gradients - state - data
    breakdown = MemoryBreakdown(parameters, gradients, state, data, 0, rest)
    return breakdown if peak_bytes is None else breakdown.at_peak(peak_bytes)


def _held_bytes(tensor: Tensor, device: torch.device, seen: set[tuple[torch.device, int]]) -> int:
    """Bytes of the storages behind a tensor that lie on ``device`` and were not ``seen``."""
    held_bytes = 0
    for plain in () if is_lazy(tensor) else plain_tensors(tensor):
        if is_on(plain.device, device):
            storage = plain.untyped_storage()
            key = (plain.device, storage.data_ptr())
            if key not in seen:
                seen.add(key)
                held_bytes += storage.nbytes()
    return held_bytes
