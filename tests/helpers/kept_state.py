"""Trainings whose steps change what objects keep, for the contract: a case for each kind."""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from tests.helpers.contract_cases import SAMPLES, Case, Net, Noisy, given, shuffled


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
        self.trainer.steps_of_user = 0

    def left(self) -> float:
        self.trainer.steps_of_user += 1
        return self.trainer.steps_of_user


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
    """Counts in the user's accelerator."""

    def left(self) -> float:
        accelerator: Any = self.trainer.accelerator
        accelerator.count = getattr(accelerator, "count", 0) + 1
        return float(accelerator.count)


class Collecting(_Scaled):
    """Adds to a set that was larger before, and uses its order."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.pool = set(range(100))
        self.pool -= {number for number in range(100) if number not in (1, 8, 20)}

    def left(self) -> float:
        self.pool.add(40 + len(self.pool))
        return float(list(self.pool)[1])


class Tracked(Callback):
    """Is known outside of the trainer, with the trainer's logger and profiler."""

    # An attribute of a class, which nothing restores.
    known: ClassVar[SimpleNamespace]

    def __init__(self) -> None:
        self.counts = SimpleNamespace(steps=2, inner=[SimpleNamespace(steps=3)])
        self.averages = {"all": [np.zeros(2)]}
        self.losses = [0.0] * 20_000

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        Tracked.known = SimpleNamespace(
            callback=self, logger=trainer.logger, profiler=trainer.profiler
        )


class FindsRealObjects(_Scaled):
    """Looks for a callback, a logger and a profiler by identity, type, membership and place."""

    def left(self) -> float:
        trainer = self.trainer
        known = Tracked.known
        callbacks = trainer.callbacks
        assert any(one is known.callback for one in callbacks)
        assert known.callback in callbacks
        assert callbacks[callbacks.index(known.callback)] is known.callback
        assert [one for one in callbacks if type(one) is Tracked] == [known.callback]
        assert self.logger is trainer.loggers[0] is known.logger
        assert known.logger in self.loggers
        assert type(self.logger) is CSVLogger
        assert trainer.profiler is known.profiler
        assert type(trainer.profiler) is SimpleProfiler
        return 1.0


class InObjectOfCallback(_Scaled):
    """Changes what objects and containers in a callback, a logger and a profiler keep."""

    def left(self) -> float:
        known = Tracked.known
        callback = next(one for one in self.trainer.callbacks if isinstance(one, Tracked))
        callback.counts.steps += 1
        callback.counts.inner[0].steps += 1
        callback.averages["all"][0] += 1
        callback.losses.append(1.0)
        own = [vars(one).setdefault("own", SimpleNamespace(n=0)) for one in vars(known).values()]
        for one in own:
            one.n += 1
        counts = callback.counts.steps + callback.counts.inner[0].steps + len(own) * own[0].n
        return counts + callback.averages["all"][0].sum() + len(callback.losses) / 1000


class InViews(_Scaled):
    """Changes an array, a view of it and a tensor over the memory of another one."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.table = np.zeros(4)
        self.head = self.table[:2]
        self.values = torch.zeros(3)
        self.same_values = self.values.numpy()

    def left(self) -> float:
        self.table += 1
        self.head[0] += 1
        self.values += 1
        self.same_values[0] += 1
        assert self.table[0] == self.head[0]
        assert self.values[0] == self.same_values[0]
        return float(self.table.sum() + self.values.sum())


class InClosure(_Scaled):
    """A hook fills a list that is an attribute too."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        features: list[float] = []
        self.features = features
        self.layers[0].register_forward_hook(
            lambda module, inputs, output: features.append(output.mean().item())
        )

    def left(self) -> float:
        # The forward pass of this step comes before.
        return self.features[-1] + len(self.features)


class Shuffles(Sampler[int]):
    """Shuffles a long list of its own again and again."""

    def __init__(self) -> None:
        self.order = list(range(20_000))
        self.random = random.Random(1)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.random.shuffle(self.order)
        return iter([index for index in self.order if index < SAMPLES])


class Counting(Noisy):
    """Counts its reads in a long list."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = [0] * 20_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        self.reads[index] += 1
        return x + 0.1 * self.reads[index], y


class Plain(_Scaled):
    """Gets its loader."""

    train_dataloader = Net.train_dataloader

    def left(self) -> float:
        return 1.0


def with_sampler(size: int) -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=size, sampler=Shuffles())


_TRACKED = partial(Case, trainer={"profiler": "simple"}, callbacks=lambda: [Tracked()])

KEPT: dict[str, Case] = {
    "in no copy of a callback": _TRACKED(FindsRealObjects),
    "in an object of a callback": _TRACKED(InObjectOfCallback),
    "in an array and its views": Case(InViews),
    "in a list of an attribute and a closure": Case(InClosure),
    "in a long list of a sampler": Case(Plain, fit=given(with_sampler)),
    "in a long list of a data set": Case(Plain, fit=given(lambda size: shuffled(size, Counting()))),
    "on tensors": Case(OnTensors),
    "in a callback": Case(InCallback),
    "in a datamodule and a logger of the module": Case(InHelpers),
    "on the trainer": Case(OnTrainer),
    "in data sets, samplers and loaders": Case(InData),
    "in the data set of a loader that was passed": Case(
        InPassedData, fit=given(lambda size: shuffled(size, Noisy()))
    ),
    "in a data set with a lock": Case(InGuardedData),
    "in a set": Case(Collecting),
}


class OwnCpu(CPUAccelerator):
    """An accelerator of the user's."""


class CountingPrecision(Precision):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        self.count += 1
        return super().pre_backward(tensor * (1 + 0.1 * self.count), module)


class CountingStrategy(SingleDeviceStrategy):
    def __init__(self) -> None:
        super().__init__(device=torch.device("cpu"))
        self.count = 0

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        self.count += 1
        loss: Any = super().training_step(*arguments, **keywords)
        return loss * (1 + 0.1 * self.count)


PARTS: dict[str, tuple[Case, Callable[[], dict[str, Any]]]] = {
    "precision plugin": (Case(Net), lambda: {"plugins": [CountingPrecision()]}),
    "strategy": (Case(Net), lambda: {"strategy": CountingStrategy()}),
    "accelerator": (Case(OnMachine), lambda: {"accelerator": OwnCpu()}),
}
