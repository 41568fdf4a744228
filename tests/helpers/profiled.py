"""Small trainings for tests of the profiler, and a logger that keeps what it is given."""

from __future__ import annotations

import csv

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.lawful import MIB, quiet_trainer

METRICS = {
    "memory/peak_allocated_mib",
    "memory/limit_mib",
    "throughput/samples_per_s",
    "throughput/step_ms",
    "throughput/data_wait_pct",
    "utilization/cpu_pct",
    "batch/size",
}


def no_work(step, where):
    """Do nothing; a spawned worker can unpickle this function, unlike a local one."""


class Net(LightningModule):
    """A regression on 4 numbers.

    ``work(step, where)`` is called in forward, backward and the optimizer's step.
    """

    def __init__(self, work=None):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.work = work or no_work
        self.steps = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.work(self.steps, "forward")
        loss = nn.functional.mse_loss(self.layer(x), y)
        loss.register_hook(lambda gradient: self.work(self.steps, "backward"))
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.work(self.steps, "optimizer_step")

    def on_train_batch_end(self, *_):
        self.steps += 1

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Validated(Net):
    def validation_step(self, batch, batch_idx):
        self.work(self.steps, "validation")


def data(samples=24, batch_size=4):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)


def trainer_for(tmp_path, *callbacks, **options):
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    defaults = {
        "devices": 1,
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "enable_checkpointing": saves,
    }
    return quiet_trainer(*callbacks, default_root_dir=tmp_path, **{**defaults, **options})


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def csv_rows(tmp_path):
    (path,) = tmp_path.rglob("memory_per_batch.csv")
    return rows(path)


class Recorder(DummyLogger):
    """Keeps what is logged, by its origin.

    ``ours`` has (step, metrics) of training, ``others`` those of evaluations and ranks, and
    ``lightnings`` the steps at which Lightning logs.
    """

    def __init__(self):
        super().__init__()
        self.ours = []
        self.others = []
        self.lightnings = []

    def log_metrics(self, metrics, step=None):
        if "loss" in metrics:
            self.lightnings.append(step)
        elif "throughput/step_ms" in metrics:
            self.ours.append((step, metrics))
        else:
            self.others.append((step, metrics))


def spike(device_memory, at_step, where, mib):
    def work(step, now):
        if step == at_step and now == where:
            device_memory.use(mib * MIB)
            device_memory.free()

    return work
