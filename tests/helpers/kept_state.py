"""Trainings whose steps change what objects keep, for the contract: a case for each kind."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers.contract_cases import Case, Net, Noisy, given, shuffled


class _Scaled(Net):
    """Scales the loss by what the steps before have left."""

    def left(self) -> float:
        """Leave something for the next step; returns what was there."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.left())


class OnTensors(_Scaled):
    """Keeps an average on each parameter, and a list on a buffer."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        for parameter in self.parameters():
            parameter.average = parameter.detach().clone()
        self.steps_seen.hits = []

    def left(self) -> float:
        weight: Any = self.layers[0].weight
        weight.count = getattr(weight, "count", 0) + 1
        for parameter in self.parameters():
            parameter.average.lerp_(parameter.detach(), 0.5)
        self.steps_seen.hits.append(1)
        total = sum(parameter.average.sum().item() for parameter in self.parameters())
        return weight.count + len(self.steps_seen.hits) + total


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[int] = []


class InCallback(_Scaled):
    """Writes to a callback that it gives to the trainer."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.losses = Losses()

    def configure_callbacks(self) -> list[Callback]:
        return [self.losses]

    def left(self) -> float:
        self.losses.losses.append(1)
        return len(self.losses.losses)


class Draws(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)


class InHelpers(_Scaled):
    """Draws from a datamodule, and counts in a logger, that only the module knows."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.draws = Draws()
        self.notes = CSVLogger("unused")
        self.notes.count = 0

    def left(self) -> float:
        self.notes.count += 1
        return self.notes.count + torch.rand(1, generator=self.draws.generator).item()


class OnTrainer(_Scaled):
    def setup(self, stage: str) -> None:
        self.trainer.user = {"steps": [0]}

    def left(self) -> float:
        self.trainer.user["steps"].append(1)
        return len(self.trainer.user["steps"])


class InData(_Scaled):
    """Changes a data set, a sampler and a loader in attributes."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.rows: Any = Noisy(True)
        self.rows.levels = [0]
        self.held = DataLoader(Noisy(True), batch_size=4, shuffle=True)
        self.held.sampler.rounds = 0

    def left(self) -> float:
        self.rows.levels.append(1)
        self.held.sampler.rounds += 1
        drawn, _ = next(iter(self.held))
        return len(self.rows.levels) + self.held.sampler.rounds + drawn.sum().item()

    def train_dataloader(self) -> DataLoader[Any]:
        return shuffled(self.batch_size, self.rows)


class InPassedData(_Scaled):
    """Raises the level of the data set of a loader that was passed."""

    train_dataloader = Net.train_dataloader

    def left(self) -> float:
        rows = self.trainer.train_dataloader.dataset
        rows.level = getattr(rows, "level", 0) + 1
        return rows.level


class Guarded(Noisy):
    """Has a lock, an open file, and counters in memory that processes share."""

    def __init__(self) -> None:
        super().__init__(True)
        self.lock = threading.Lock()
        self.file: Any = open(__file__, "rb")  # noqa: SIM115
        self.seen = [0] * 4
        self.own = self
        self.count: Any = multiprocessing.Value("i", 0)
        self.shared = torch.zeros(2).share_memory_()


class InGuardedData(_Scaled):
    """Changes a data set that has a lock and an open file."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.rows: Any = Guarded()

    def left(self) -> float:
        with self.rows.lock, self.rows.count.get_lock():
            self.rows.seen[3] += 1
            self.rows.count.value += 1
            self.rows.shared += 1
        total = self.rows.seen[3] + self.rows.count.value + self.rows.shared.sum().item()
        return total + len(self.rows.file.readline())

    def on_train_end(self) -> None:
        self.rows.file.close()


class OnMachine(_Scaled):
    """Counts in the user's accelerator and cluster environment."""

    def left(self) -> float:
        accelerator: Any = self.trainer.accelerator
        environment: Any = self.trainer._accelerator_connector.cluster_environment
        accelerator.count = getattr(accelerator, "count", 0) + 1
        environment.steps.append(1)
        return accelerator.count + len(environment.steps)


class Machine(LightningEnvironment):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []


class Spawning(_Scaled):
    """Spawns generators from a sequence of seeds and from a generator."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.seeds = np.random.SeedSequence(1)
        self.generator = np.random.default_rng(2)

    def left(self) -> float:
        [seed] = self.seeds.spawn(1)
        [other] = self.generator.bit_generator.seed_seq.spawn(1)
        return np.random.default_rng(seed).random() + np.random.default_rng(other).random()


class Collecting(_Scaled):
    """Adds to a set that was larger before, and uses its order."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.pool = set(range(100))
        self.pool -= {number for number in range(100) if number not in (1, 8, 20)}

    def left(self) -> float:
        self.pool.add(40 + len(self.pool))
        return float(list(self.pool)[1])


KEPT: dict[str, Case] = {
    "on tensors": Case(OnTensors),
    "in a callback": Case(InCallback),
    "in a datamodule and a logger of the module": Case(InHelpers),
    "on the trainer": Case(OnTrainer),
    "in data sets, samplers and loaders": Case(InData),
    "in the data set of a loader that was passed": Case(
        InPassedData, fit=given(lambda size: shuffled(size, Noisy()))
    ),
    "in a data set with a lock": Case(InGuardedData),
    "in sequences of seeds": Case(Spawning),
    "in a set": Case(Collecting),
}


class OwnCpu(CPUAccelerator):
    """An accelerator of the user's."""


class CountingPrecision(Precision):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        self.steps.append(1)
        return super().pre_backward(tensor * (1 + 0.1 * len(self.steps)), module)


class CountingStrategy(SingleDeviceStrategy):
    def __init__(self) -> None:
        super().__init__(device=torch.device("cpu"))
        self.count = 0
        self.steps: list[int] = []

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        self.count += 1
        self.steps.append(1)
        loss: Any = super().training_step(*arguments, **keywords)
        return loss * (1 + 0.1 * (self.count + len(self.steps)))


PARTS: dict[str, tuple[Case, Callable[[], dict[str, Any]]]] = {
    "precision plugin": (Case(Net), lambda: {"plugins": [CountingPrecision()]}),
    "strategy": (Case(Net), lambda: {"strategy": CountingStrategy()}),
    "accelerator and cluster environment": (
        Case(OnMachine),
        lambda: {"accelerator": OwnCpu(), "plugins": [Machine()]},
    ),
}
