"""Memory breakdown of a step, exact in bytes, with every storage counted once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_batchmem.devices.optimizers import state_tensors
from lightning_batchmem.devices.tensors import is_on, plain_tensors, tensors_in
from lightning_batchmem.plan.records import mib

PARTS = (
    ("parameters and buffers", "parameters_bytes"),
    ("gradients", "gradients_bytes"),
    ("optimizer state", "optimizer_state_bytes"),
    ("batch data", "batch_bytes"),
    ("activations and temporaries", "activations_bytes"),
    ("other", "other_bytes"),
)
"""Names of the parts, and of the fields of :class:`MemoryBreakdown`."""


@dataclass(frozen=True)
class MemoryBreakdown:
    """The parts of the memory at the peak of a step; they add up to :attr:`peak_bytes`.

    The first four are the storages alive *at the start of a step*, each counted in the first part
    that holds it. From the second step on, Lightning keeps gradients during the next forward
    (``zero_grad`` runs after ``training_step``), so they are part of the peak. Gradients that are
    freed between two steps, for example by ``zero_grad`` at the end of a manual step, count as they
    are when an optimizer steps.

    Args:
        parameters_bytes: parameters and buffers of the module.
        gradients_bytes: gradients at the start of the step, or when an optimizer steps if these are
            more.
        optimizer_state_bytes: state of the optimizers, and parameters that only they hold (master
            copies).
        batch_bytes: the batch, as far as it is on the measured device.
        activations_bytes: the peak minus all other parts: activations, and temporary tensors of
            backward and of the optimizer; on a CPU also freed memory that the heap keeps.
        other_bytes: memory in use at the start of the step that is none of the above: workspaces
            and the user's own tensors on a GPU; interpreter and libraries on a CPU, measured
            before the first step because the process later includes memory that a step freed.
            Negative if some tensors are not in memory (swapped out, or mapped from a file and never
            read).
        kept_bytes: what steps have kept since the step in which the parts were measured, up to the
            step with the highest peak: outputs in a list, a metric, a cache.
        step: the step in which the parts were measured; None without steps.
        outside_bytes: bytes on the device outside this process's allocator at that time: contexts,
            NCCL, other processes; None if unknown. They are not a part of the peak.
        phase: the phase of the peak of that step: ``"forward"``, ``"backward"`` or
            ``"optimizer step"``; empty if it is unknown.

    Example:
        >>> MemoryBreakdown(80, 80, 160, 24, 500, 896).peak_bytes
        1740
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    batch_bytes: int
    activations_bytes: int
    other_bytes: int
    kept_bytes: int = 0
    step: int | None = None
    outside_bytes: int | None = None
    phase: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{mib(getattr(self, field))} {name}" for name, field in PARTS)

    @property
    def peak_bytes(self) -> int:
        """Sum of the parts: the peak of the step, in bytes."""
        return self.start_bytes + self.activations_bytes

    @property
    def start_bytes(self) -> int:
        """Bytes in use at the start of the step: all parts but the activations."""
        known_bytes = (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_state_bytes
            + self.batch_bytes
        )
        return known_bytes + self.other_bytes + self.kept_bytes

    def at_peak(
        self, peak_bytes: int, *, gradients_bytes: int = 0, kept_bytes: int = 0
    ) -> MemoryBreakdown:
        """Return the same parts with the activations of another peak.

        Args:
            peak_bytes: the peak.
            gradients_bytes: the gradients when an optimizer stepped.
            kept_bytes: what steps have kept since these parts were measured.
        """
        above_bytes = peak_bytes - self.start_bytes
        room_bytes = max(0, above_bytes)
        kept_bytes = min(kept_bytes, room_bytes)
        more_bytes = min(max(0, gradients_bytes - self.gradients_bytes), room_bytes - kept_bytes)
        return replace(
            self,
            gradients_bytes=self.gradients_bytes + more_bytes,
            activations_bytes=room_bytes - kept_bytes - more_bytes,
            # Two readings of the host may differ by some pages. Activations are never negative, and
            # the sum stays exact.
            other_bytes=self.other_bytes + min(0, above_bytes),
            kept_bytes=kept_bytes,
        )


def measure_breakdown(
    module: Module,
    optimizers: Iterable[Optimizer],
    batch: object,
    device: torch.device,
    *,
    start_bytes: int,
    peak_bytes: int | None = None,
) -> MemoryBreakdown:
    """Measure the parts at the start of a step, with the batch on the device.

    Without ``peak_bytes`` the activations are 0.
    """
    optimizers = list(optimizers)
    weights, trained = _trained(module, optimizers)
    # The tensors of each part. A storage counts in the first part that has it.
    parts = (
        [*weights, *module.buffers()],
        _gradients(weights, trained),
        [*trained, *state_tensors(optimizers)],
        tensors_in(batch),
    )
    counted: dict[tuple[torch.device, int], int] = {}
    part_bytes = []
    for tensors in parts:
        storages = _storage_bytes(tensors, device)
        new_storages = storages.keys() - counted.keys()
        part_bytes.append(sum(storages[address] for address in new_storages))
        counted |= storages
    parameters_bytes, gradients_bytes, state_bytes, batch_bytes = part_bytes
    other_bytes = start_bytes - sum(part_bytes)
    breakdown = MemoryBreakdown(
        parameters_bytes, gradients_bytes, state_bytes, batch_bytes, 0, other_bytes
    )
    return breakdown if peak_bytes is None else breakdown.at_peak(peak_bytes)


def gradient_bytes(module: Module, optimizers: Iterable[Optimizer], device: torch.device) -> int:
    """Return the bytes of the gradients that exist now on a device."""
    return sum(_storage_bytes(_gradients(*_trained(module, optimizers)), device).values())


def _trained(module: Module, optimizers: Iterable[Optimizer]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of a module, and the tensors that optimizers change.

    Tensors that are not weights are master copies of weights in another precision.
    """
    trained = tensors_in([optimizer.param_groups for optimizer in optimizers])
    return list(module.parameters()), [tensor for tensor in trained if tensor.is_leaf]


def _gradients(weights: list[Tensor], trained: list[Tensor]) -> list[Tensor]:
    return [tensor.grad for tensor in (*weights, *trained) if tensor.grad is not None]


def _storage_bytes(
    tensors: Iterable[Tensor], device: torch.device
) -> dict[tuple[torch.device, int], int]:
    """Return the size of each storage of the tensors on a device, by its address."""
    sizes = {}
    for tensor in tensors:
        # A lazy parameter has no storage before the first forward pass.
        if is_lazy(tensor):
            continue
        for part in plain_tensors(tensor):
            if is_on(part.device, device):
                storage = part.untyped_storage()
                sizes[storage.device, storage.data_ptr()] = storage.nbytes()
    return sizes
