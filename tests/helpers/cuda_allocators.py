"""Cases of ``tests/gpu/test_cuda_allocators.py``: other allocators, and settings of torch's own."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import BatchFinder, MemoryProfiler
from tests.helpers.cuda_stub import gpu_trainer, mib, print_case
from tests.helpers.plans import search_notes


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
        "peaks_mib": [mib(trial.memory.peak_bytes) for trial in trials],
        "held_mib": [mib(trial.memory.held_bytes) for trial in trials],
    }


class Texts(Linear):
    """Four layers, on sequences of many lengths."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
        self.layer = nn.Sequential(nn.Linear(16, 256), *layers)

    def train_dataloader(self) -> DataLoader[Any]:
        samples = [torch.zeros(2 + 7 * index % 253, 16) for index in range(20_000)]
        return DataLoader(
            samples, self.batch_size, shuffle=True, collate_fn=lambda each: [pad_sequence(each)]
        )


def ragged() -> dict[str, Any]:
    """A search and the training after it, with another shape in nearly every step."""
    finder = BatchFinder(min_steps_per_epoch=None, objective="memory")
    trainer = gpu_trainer(finder, max_steps=150, max_epochs=-1)
    trainer.fit(Texts())
    return {
        "size": finder.plan.batch_size,
        "verified": finder.plan.verified,
        "steps": trainer.global_step,
        "notes": search_notes(finder.plan),
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
    "ragged": ragged,
    "snapshot": snapshot,
}

if __name__ == "__main__":
    print_case(CASES)
