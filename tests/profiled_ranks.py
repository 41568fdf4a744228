"""Trains two processes with the profiler, for test_rank_peaks.py; what rank zero knows is its last line."""

from __future__ import annotations

import json
import sys
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import MemoryProfiler

MIB = 2**20


class Uneven(LightningModule):
    """Rank 1 takes 64 MiB more in each step."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            torch.ones(16 * MIB)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    profiler = MemoryProfiler()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        callbacks=[profiler],
        logger=CSVLogger(sys.argv[1]),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Uneven(), DataLoader(TensorDataset(torch.zeros(24, 4)), batch_size=4))
    if trainer.is_global_zero:
        print("\n" + json.dumps({"peaks": profiler.summary.rank_peaks_bytes, "own": profiler.summary.peak_bytes}))  # noqa: T201
