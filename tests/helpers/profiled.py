"""Small trainings and callbacks for tests of the profiler, and a logger that keeps its metrics."""

from __future__ import annotations

import csv

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import Plan, Trial
from lightning_batchmem.plan.records import Chosen, TrialMemory
from tests.helpers.lawful import MIB, quiet_trainer

METRICS = {
    "memory/peak_process_mib",
    "memory/used_pct",
    "speed/samples_per_s",
    "speed/step_ms",
    "speed/data_wait_pct",
    "speed/cpu_utilization_pct",
    "speed/batch_size",
}


OWN_LOGS = "lightning_batchmem_logs/version_0"
"""The folder of a Trainer without loggers."""


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


class Evaluated(Net):
    """Uses 5 MiB in a step of an evaluation."""

    def __init__(self, device_memory):
        super().__init__()
        self.use = lambda: (device_memory.use(5 * MIB), device_memory.free())

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.use()
        return torch.zeros(())

    test_step = predict_step = validation_step


def failing(at_step, error=None):
    def work(step, where):
        if step == at_step:
            raise error or KeyError("the user's error")

    return work


class Gan(LightningModule):
    """Manual optimization with two optimizers; the second forward and first backward need more."""

    def __init__(self, device_memory, fail_at=None):
        super().__init__()
        self.automatic_optimization = False
        self.one = nn.Linear(4, 1)
        self.two = nn.Linear(4, 1)
        self.device_memory = device_memory
        self.fail_at = fail_at

    def training_step(self, batch, batch_idx):
        sizes = ((self.one, 10, 50), (self.two, 30, 20))
        for (layer, forward, backward), optimizer in zip(sizes, self.optimizers(), strict=True):
            self.device_memory.use(forward * MIB)
            loss = layer(batch[0]).square().mean()
            loss.register_hook(lambda gradient, mib=backward: self.device_memory.use(mib * MIB))
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.device_memory.free()
            failing(self.fail_at)(batch_idx, "backward")
            optimizer.step()

    def configure_optimizers(self):
        sgd = torch.optim.SGD(self.one.parameters(), 0.1)
        adam = torch.optim.Adam(self.two.parameters(), 0.1)
        return sgd, adam


class Planned(Callback):
    """Has a plan, like a BatchFinder: fixed memory and 2 MiB a sample."""

    def __init__(self, fixed_mib=1.0, limit_mib=1024):
        trials = tuple(
            Trial(size, "ok", TrialMemory({"forward": int((fixed_mib + 2 * size) * MIB)}))
            for size in (2, 4)
        )
        self.plan = Plan(Chosen(4, "memory", ""), trials, limit_mib * MIB)


class At(Callback):
    """Calls functions in hooks."""

    def __init__(self, **hooks):
        for name, function in hooks.items():
            setattr(
                self, name, lambda trainer, module, *_, function=function: function(trainer, module)
            )


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
        elif METRICS & metrics.keys():
            self.ours.append((step, metrics))
        else:
            self.others.append((step, metrics))


def spike(device_memory, at_step, where, mib):
    def work(step, now):
        if step == at_step and now == where:
            device_memory.use(mib * MIB)
            device_memory.free()

    return work
