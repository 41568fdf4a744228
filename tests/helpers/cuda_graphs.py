"""Cases of ``tests/gpu/test_cuda_graphs.py``: ``torch.compile(mode="reduce-overhead")``."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import BatchFinder, MemoryProfiler, find_batch_size_of_loop
from tests.helpers.cuda_stub import gpu_trainer, mib, print_case
from tests.helpers.profiled import csv_rows

WIDTH = 1024
PROFILED_SIZE = 2048
LIMIT_SHARE = 0.95
"""Share of the free memory that a search may use."""


def mlp() -> nn.Module:
    layers = (layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    return nn.Sequential(*layers)


class Mlp(LightningModule):
    """An MLP of four layers."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.layers = mlp()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0].expand(-1, WIDTH).contiguous()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(1_000_000, 1)), batch_size=self.batch_size)


class CompiledMlp(Mlp):
    """The same; its steps are recorded in CUDA graphs."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__(batch_size)
        self.layers.compile(mode="reduce-overhead")


def search() -> dict[str, Any]:
    """The size that a search finds."""
    module = CompiledMlp()
    finder = BatchFinder(min_steps_per_epoch=None, objective="memory")
    gpu_trainer(finder, max_steps=3).fit(module)
    trials = (f"{one.batch_size} {one.kind}: {one.outcome}" for one in finder.plan.trials)
    return {"size": module.batch_size, "tried": list(trials)}


def train(size: str) -> dict[str, Any]:
    """The error of a training at a size, within the share of the memory that a search may use."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    fraction = LIMIT_SHARE * free_bytes / total_bytes
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        gpu_trainer(max_steps=10).fit(CompiledMlp(int(size)))
    except torch.OutOfMemoryError as error:
        return {"error": str(error)}
    return {"error": ""}


def pool() -> dict[str, Any]:
    """What the search of a plain loop leaves in the cache."""
    layers = mlp().cuda()
    compiled = torch.compile(layers, mode="reduce-overhead")
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        compiled(batch).square().mean().backward()
        optimizer.step()

    def make_batch(size: int) -> Tensor:
        return torch.zeros(size, WIDTH, device="cuda")

    plan = find_batch_size_of_loop(
        step, make_batch, model=layers, optimizer=optimizer, max_batch_size=2048
    )
    reserved_bytes = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    return {
        "size": plan.batch_size,
        "reserved_mib": mib(reserved_bytes),
        "left_mib": mib(reserved_bytes - torch.cuda.memory_reserved()),
    }


def peaks(folder: str, module: LightningModule) -> list[tuple[str, str]]:
    """The peaks of allocated and of reserved MiB in six steps, as the profiler writes them."""
    trainer = gpu_trainer(MemoryProfiler(), max_steps=6, default_root_dir=folder)
    trainer.fit(module)
    rows = csv_rows(Path(folder))
    return [(row["peak_allocated_mib"], row["peak_reserved_mib"]) for row in rows]


def profile() -> dict[str, Any]:
    """The profiler's peaks of the same steps, with and without graphs."""
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        return {
            "eager": peaks(first, Mlp(PROFILED_SIZE)),
            "graphs": peaks(second, CompiledMlp(PROFILED_SIZE)),
        }


CASES = {"search": search, "train": train, "pool": pool, "profile": profile}

if __name__ == "__main__":
    print_case(CASES)
