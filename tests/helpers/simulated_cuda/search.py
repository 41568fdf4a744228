"""A real Trainer and BatchFinder on a simulated device, and the training that follows."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Hashable
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_batchmem import BatchFinder, Plan
from tests.helpers.lawful import quiet_trainer
from tests.helpers.simulated_cuda.device import SimulatedCuda

SAMPLES = 10**7
SEEDS = range(5)


class Searched(NamedTuple):
    """What a search found, and how trainings of 200 steps ended, some of them for all seeds."""

    plan: Plan
    num_ooms: int
    seconds: float
    trains: bool
    trains_with_varied_sizes: bool
    real_deaths: int
    random_deaths: int
    steps_at_size: int
    sizes: int


def simulated_module(device: SimulatedCuda) -> LightningModule:
    """A module with tiny tensors, whose steps are replayed on the device.

    Nothing of the device is an attribute of the module.
    """

    class State(defaultdict[Tensor, Any]):
        def __init__(self, number: int) -> None:
            self.number = number

        def clear(self) -> None:
            device.drop(device.trace.optimizers[self.number].states)

    class Optimizer(torch.optim.Optimizer):
        def __init__(self, parameters: Any, number: int) -> None:
            super().__init__(parameters, {"lr": 0.1})
            self.number = number
            self.state = State(number)

        def step(self, closure: Any = None) -> Any:
            loss = closure()
            device.run_phase("optimizer_step", self.number)
            return loss

    class Module(LightningModule):
        batch_size = 2

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in device.trace.optimizers)
            self.automatic_optimization = len(self.layers) == 1

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            device.begin_step(len(batch))
            if self.automatic_optimization:
                return self.loss(0)
            for number, optimizer in enumerate(self.optimizers()):
                loss = self.loss(number)
                device.drop(device.trace.optimizers[number].gradients)
                self.manual_backward(loss, number)
                optimizer.step()
            return None

        def loss(self, number: int) -> Tensor:
            device.run_phase("forward", number)
            loss: Tensor = self.layers[number](torch.zeros(1)).mean()
            return loss

        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)
            device.drop(device.trace.gradients)

        def optimizer_zero_grad(self, *_: Any) -> None:
            self.zero_grad()

        def backward(self, loss: Tensor, number: int = 0) -> None:
            device.run_phase("backward", number)
            # torch does not annotate this method.
            loss.backward()  # type: ignore[no-untyped-call]

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            device.evaluation_step(len(batch))

        def configure_optimizers(self) -> list[Optimizer]:
            return [Optimizer(layer.parameters(), i) for i, layer in enumerate(self.layers)]

        def train_dataloader(self) -> DataLoader[Any]:
            # A DataLoader accepts any sequence, but its annotation requires a Dataset.
            return DataLoader(range(SAMPLES), batch_size=self.batch_size)  # type: ignore[arg-type]

        val_dataloader = train_dataloader

    return Module()


class SimulatedFinder(BatchFinder):
    """A BatchFinder on a simulated device."""

    def __init__(self, device: SimulatedCuda, **options: Any) -> None:
        super().__init__(**options)
        self._device = device

    def device_memory(self, device: torch.device) -> SimulatedCuda:
        return self._device


def search(device: SimulatedCuda, **options: Any) -> Searched:
    """Search, then train in the same process with the whole capacity.

    There are four kinds of trainings: with the last batch of this data set, with a last batch of
    another size in each epoch, and those of ``epochs_of_a_data_set`` and ``varied_epochs``.
    """
    finder = SimulatedFinder(device, **options)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = quiet_trainer(finder, max_steps=1, limit_val_batches=0.5)
    begin = time.perf_counter()
    # Without this stage, only the code before the first step runs.
    with mock.patch.object(Trainer, "_run_stage"):
        trainer.fit(simulated_module(device))
    seconds = time.perf_counter() - begin
    plan = finder.plan
    assert plan is not None
    num_ooms = device.num_ooms
    size = plan.batch_size
    full_batches = [size] * 24
    remainder = SAMPLES % size or max(1, size // 2)
    remainders = [max(1, epoch * 7919 % size) for epoch in range(8)]
    real = [trains(device, epochs_of_a_data_set(size, seed)) for seed in SEEDS]
    random = [trains(device, varied_epochs(size, seed)) for seed in SEEDS]
    return Searched(
        plan,
        num_ooms,
        seconds,
        trains=trains(device, [[*full_batches, remainder]] * 8),
        trains_with_varied_sizes=trains(device, [[*full_batches, last] for last in remainders]),
        real_deaths=real.count(False),
        random_deaths=random.count(False),
        steps_at_size=sum(trial.full_steps for trial in plan.trials if trial.batch_size == size),
        sizes=len({trial.batch_size for trial in plan.trials}),
    )


def epochs_of_a_data_set(size: int, seed: int) -> list[list[int]]:
    """The sizes of batches from this data set, with fewer full ones."""
    full_batches = [size] * (7, 12, 19, 40, 97)[seed]
    last = SAMPLES % size
    return [[*full_batches, last] if last else full_batches] * 10


def varied_epochs(size: int, seed: int) -> list[list[int]]:
    """Full batches, of which each fifth is replaced by one of random size."""
    random = Random(seed)
    return [
        [random.randint(1, size) if step % 5 == 4 else size for step in range(20)]
        for _ in range(10)
    ]


def trains(device: SimulatedCuda, epochs: list[list[int]]) -> bool:
    """Whether batches of these sizes fit, from the first step of a training on.

    An evaluation comes before each epoch.
    """
    device.drop(device.trace.gradients | device.trace.states)
    device.release_cached()
    layouts = set[Hashable]()
    try:
        for number, epoch in enumerate(epochs):
            # Before the first epoch, these are the two steps of Lightning's sanity check.
            device.evaluation_step(epoch[0])
            device.evaluation_step(epoch[-1] if number else epoch[0])
            for size in epoch:
                device.train_step(size)
            layout = device.layout()
            # From an earlier layout on, equal epochs do what they did before.
            if layout in layouts and epochs.count(epoch) == len(epochs):
                return True
            layouts.add(layout)
    except torch.OutOfMemoryError:
        return False
    return True
