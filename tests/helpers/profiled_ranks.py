"""A rank of test_totals.py, which trains with the profiler under DDP and FSDP2.

It writes the results to a file.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import MemoryProfiler
from tests.helpers.lawful import MIB, quiet_trainer


class Uneven(LightningModule):
    """Rank 1 takes 64 MiB more in each step."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 32, bias=False), torch.nn.Linear(32, 2, bias=False)
        )

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            torch.ones(16 * MIB)
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Sharded(Uneven):
    def configure_model(self):
        from torch.distributed._composable.fsdp import fully_shard

        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


def train(module, strategy, directory):
    profiler = MemoryProfiler()
    options = {"devices": 2, "strategy": strategy, "max_epochs": 2, "log_every_n_steps": 1}
    trainer = quiet_trainer(profiler, logger=CSVLogger(directory), **options)
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(24, 64)), batch_size=4))
    summary = profiler.summary
    return {
        "peaks": summary.rank_peaks_bytes,
        "own": summary.peak_bytes,
        "breakdown": asdict(summary.breakdown),
    }


def profile(rank, directory):
    warnings.simplefilter("ignore")
    sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    found = [
        train(Uneven(), "ddp", directory / "ddp"),
        train(Sharded(), sharded, directory / "fsdp2"),
    ]
    (directory / f"{rank}.json").write_text(json.dumps(found))
