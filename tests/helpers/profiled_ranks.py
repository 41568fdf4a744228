"""A rank of test_ranks.py, which trains with the profiler under DDP and FSDP2.

It writes the results to a file.
"""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import MemoryProfiler
from tests.helpers.lawful import MIB, quiet_trainer
from tests.helpers.profiled import At, Recorder


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
        "peaks": summary.memory.rank_peaks_bytes,
        "own": summary.memory.peak_bytes,
        "breakdown": asdict(summary.memory.breakdown),
    }


def profile(rank, directory):
    warnings.simplefilter("ignore")
    sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    found = [
        train(Uneven(), "ddp", directory / "ddp"),
        train(Sharded(), sharded, directory / "fsdp2"),
    ]
    (directory / f"{rank}.json").write_text(json.dumps(found))


class Reduced(Uneven):
    """Logs a value that Lightning reduces over the ranks at the end of an epoch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss


def stop(trainer, module):
    trainer.should_stop = True


def fail_on_rank_1(trainer, module):
    if module.global_rank == 1 and trainer.current_epoch == 1:
        raise KeyError("the user's error")


def train_after_bar(*callbacks, error=None, **options):
    """Train with a progress bar, which Lightning keeps on rank 0 only, before the profiler."""
    profiler = MemoryProfiler(csv=False)
    # Without this timeout, ranks that wait in different collectives would hang for half an hour.
    strategy = DDPStrategy(timeout=timedelta(seconds=20))
    defaults = {
        "devices": 2,
        "strategy": strategy,
        "max_epochs": 3,
        "log_every_n_steps": 1,
        "logger": Recorder(),
        "enable_progress_bar": True,
    }
    trainer = quiet_trainer(TQDMProgressBar(), profiler, *callbacks, **{**defaults, **options})
    with nullcontext() if error is None else pytest.raises(error):
        trainer.fit(Reduced(), DataLoader(TensorDataset(torch.zeros(24, 64)), batch_size=4))
    return len(profiler.summary.memory.rank_peaks_bytes)


def profile_after_bar(rank, directory):
    warnings.simplefilter("ignore")
    # The other rank loses its connection.
    error = KeyError if rank == 1 else RuntimeError
    found = {
        "whole": train_after_bar(),
        "max_steps": train_after_bar(max_steps=4, max_epochs=-1),
        "should_stop": train_after_bar(At(on_train_batch_end=stop)),
        "unlogged": train_after_bar(log_every_n_steps=0),
        # This training is the last one, because an error ends the process group.
        "error": train_after_bar(At(on_train_batch_start=fail_on_rank_1), error=error),
    }
    (directory / f"{rank}.json").write_text(json.dumps(found))
