"""A real Trainer and BatchFinder on a simulated device, and the training that follows."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
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


class Searched(NamedTuple):
    """What a search found, and whether 200 steps of training followed."""

    plan: Plan
    num_ooms: int
    trains: bool
    trains_with_varied_sizes: bool
    steps_at_size: int
    sizes: int


def simulated_module(device: SimulatedCuda) -> LightningModule:
    """A module with tiny tensors, whose steps are replayed on the device.

    Nothing of the device is an attribute of the module.
    """

    class State(defaultdict[Tensor, Any]):
        def clear(self) -> None:
            device.drop(device.trace.states)

    class Optimizer(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            device.run_phase("optimizer_step")
            return loss

    class Module(LightningModule):
        batch_size = 2

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            device.run_phase("forward", len(batch))
            loss: Tensor = self.layer(torch.zeros(1)).mean()
            return loss

        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)
            device.drop(device.trace.gradients)

        def optimizer_zero_grad(self, *_: Any) -> None:
            self.zero_grad()

        def backward(self, loss: Tensor) -> None:
            device.run_phase("backward")
            # torch does not annotate this method.
            loss.backward()  # type: ignore[no-untyped-call]

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            device.evaluation_step(len(batch))

        def configure_optimizers(self) -> Optimizer:
            optimizer = Optimizer(self.parameters(), {"lr": 0.1})
            optimizer.state = State()
            return optimizer

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
    """Search, then train 200 steps in the same process with the whole capacity.

    Evaluations and smaller batches of one size come in between; a second training has smaller
    batches of any size.
    """
    finder = SimulatedFinder(device, **options)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = quiet_trainer(finder, max_steps=1, limit_val_batches=0.5)
    # Without this stage, only the code before the first step runs.
    with mock.patch.object(Trainer, "_run_stage"):
        trainer.fit(simulated_module(device))
    plan = finder.plan
    assert plan is not None
    num_ooms = device.num_ooms
    size = plan.batch_size
    remainder = SAMPLES % size or max(1, size // 2)
    return Searched(
        plan,
        num_ooms,
        trains=_trains(device, size, lambda _: remainder),
        trains_with_varied_sizes=_trains(device, size, lambda epoch: max(1, epoch * 7919 % size)),
        steps_at_size=sum(trial.full_steps for trial in plan.trials if trial.batch_size == size),
        sizes=len({trial.batch_size for trial in plan.trials}),
    )


def _trains(device: SimulatedCuda, size: int, smaller: Callable[[int], int]) -> bool:
    device.drop(device.trace.gradients | device.trace.states)
    device.release_cached()
    try:
        for epoch in range(8):
            # Before the first epoch, these are the two steps of Lightning's sanity check.
            device.evaluation_step(size)
            device.evaluation_step(smaller(epoch) if epoch else size)
            for _ in range(24):
                device.train_step(size)
            device.train_step(smaller(epoch))
    except torch.OutOfMemoryError:
        return False
    return True
