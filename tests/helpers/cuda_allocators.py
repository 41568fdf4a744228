"""Cases of ``tests/gpu/test_cuda_allocators.py``: other allocators, and settings of torch's own."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.cuda_networks import project
from lightning_batchmem import BatchFinder, MemoryProfiler
from tests.helpers.cuda_stub import gpu_trainer, mib, print_case


class Linear(LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2
        self.layer = nn.Linear(64, 64)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(256, 64)), batch_size=self.batch_size)


def error_of_training(*callbacks: Callback) -> str:
    """The error that ends a training, or an empty text."""
    try:
        gpu_trainer(*callbacks, max_steps=3).fit(Linear())
    # The error is the result.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


def pluggable() -> dict[str, Any]:
    """Trainings with an allocator that counts nothing.

    The memory of the stub's device is memory of the host, so the C library can allocate it.
    """
    allocator = torch.cuda.memory.CUDAPluggableAllocator("libc.so.6", "malloc", "free")
    torch.cuda.memory.change_current_allocator(allocator)
    return {
        "plain": error_of_training(),
        "profiler": error_of_training(MemoryProfiler(csv=False)),
        "finder": error_of_training(BatchFinder(max_batch_size=16, objective="memory")),
    }


def of_driver() -> dict[str, Any]:
    """A search with the allocator of the driver."""
    return {
        "backend": torch.cuda.get_allocator_backend(),
        "error": error_of_training(BatchFinder(max_batch_size=16, objective="memory")),
    }


def no_cache() -> dict[str, Any]:
    """A search where the allocator keeps nothing, and so counts nothing."""
    finder = BatchFinder(max_batch_size=16, objective="memory")
    error = error_of_training(finder)
    trials = [] if finder.plan is None else finder.plan.trials
    return {
        "error": error,
        "peaks_mib": [mib(trial.peak_bytes) for trial in trials],
        "held_mib": [mib(trial.held_bytes) for trial in trials],
    }


def expandable() -> dict[str, Any]:
    """The notes of a search in which the allocator reserves much more than the tensors take."""
    finder = BatchFinder(min_batch_size=2048, min_steps_per_epoch=None, objective="memory")
    gpu_trainer(finder, max_steps=1).fit(project("mlp", torch.cuda.mem_get_info()[1]))
    (trial,) = (
        trial
        for trial in finder.plan.trials
        if trial.batch_size == finder.plan.batch_size and trial.kind == "rehearsal"
    )
    return {
        "size": finder.plan.batch_size,
        "tensors_mib": mib(trial.peak_bytes),
        "reserved_mib": mib(trial.held_bytes),
        "notes": finder.plan.notes,
    }


def snapshot() -> dict[str, Any]:
    """The events in each snapshot of the allocator that a search takes."""
    events = []
    take = torch._C._cuda_memorySnapshot

    def counted(*arguments: Any) -> Any:
        taken = take(*arguments)
        events.append(sum(map(len, taken["device_traces"])))
        return taken

    torch.cuda.memory._record_memory_history(context=None)
    with mock.patch("torch._C._cuda_memorySnapshot", counted):
        gpu_trainer(BatchFinder(max_batch_size=16, objective="memory"), max_steps=1).fit(Linear())
    torch.cuda.memory._record_memory_history(enabled=None)
    return {"events": events}


CASES = {
    "pluggable": pluggable,
    "of_driver": of_driver,
    "no_cache": no_cache,
    "expandable": expandable,
    "snapshot": snapshot,
}

if __name__ == "__main__":
    print_case(CASES)
