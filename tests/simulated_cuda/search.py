"""A real Trainer and BatchFinder on a simulated device, and the training that follows."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_batchmem.batch_finder
from lightning_batchmem import BatchFinder, Plan
from tests.simulated_cuda.device import SimulatedCuda

SAMPLES = 10**7


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, device: SimulatedCuda, size: int) -> Tensor:
        ctx.device, ctx.size = device, size
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.device.run_phase("backward", ctx.size)
        return gradients[0], None, None


class _State(dict[Any, Any]):
    """State of an optimizer whose storages lie on the simulated device."""

    device: SimulatedCuda

    def clear(self) -> None:
        super().clear()
        self.device.drop_optimizer_state()


class SimulatedModule(LightningModule):
    """Replays the steps of the device's network in a Trainer; its own tensors are tiny."""

    def __init__(self, device: SimulatedCuda, samples: int = SAMPLES) -> None:
        super().__init__()
        self.batch_size = 2
        self.layer = nn.Linear(1, 1)
        vars(self)["simulated"] = {"device": device}.get  # a function, which the search does not restore
        self.data = TensorDataset(torch.zeros(1, 1).expand(samples, 1))
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        device: SimulatedCuda = vars(self)["simulated"]("device")
        self._size = len(batch[0])
        device.run_phase("forward", self._size)
        return _Backward.apply(self.layer(batch[0][:1]).mean(), device, self._size)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        vars(self)["simulated"]("device").evaluation_step(len(batch[0]))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)
        vars(self)["simulated"]("device").run_phase("optimizer_step", self._size)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        vars(self)["simulated"]("device").drop_gradients()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.state = state = _State()
        state.device = vars(self)["simulated"]("device")
        return optimizer

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=self.batch_size)


@dataclass
class Searched:
    """What a search found, and whether 200 steps of training followed."""

    plan: Plan
    num_ooms: int
    trains: bool
    trains_with_varied_sizes: bool
    retries: int

    @property
    def steps_at_size(self) -> int:
        return sum(trial.full_steps for trial in self.plan.trials if trial.batch_size == self.plan.batch_size)

    @property
    def sizes(self) -> int:
        return len({trial.batch_size for trial in self.plan.trials})


def search(device: SimulatedCuda, **options: Any) -> Searched:
    """Search on a fresh device, then train 200 steps in the same process with the whole capacity.

    Evaluations and smaller batches of one size come in between; a second training has smaller batches of any size.
    """
    device.fresh()
    device.load_model()
    finder = BatchFinder(**options)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with mock.patch.object(lightning_batchmem.batch_finder, "device_memory_for", return_value=device):
        trainer = Trainer(
            accelerator="cpu",
            callbacks=[finder],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_steps=1,
            limit_val_batches=0.5,
        )
        with mock.patch.object(Trainer, "_run_stage"):  # only what comes before the first step
            trainer.fit(SimulatedModule(device))
    assert finder.plan is not None
    num_ooms, size = device.allocator.num_ooms, finder.plan.batch_size
    trains = []
    retries = 0
    remainder = SAMPLES % size or size // 2
    for smaller in (lambda _: remainder, lambda epoch: max(1, (epoch * 7919) % size)):
        device.drop_gradients()
        device.drop_optimizer_state()
        device.release_cached()
        before = device.allocator.num_alloc_retries
        trains.append(_trains(device, size, smaller))
        retries = retries or device.allocator.num_alloc_retries - before
    return Searched(finder.plan, num_ooms, trains[0], trains[1], retries)


def _trains(device: SimulatedCuda, size: int, smaller: Any) -> bool:
    try:
        for epoch in range(8):
            device.train_steps(size, 24)
            device.train_step(smaller(epoch))
            device.evaluation_step(size)
            device.evaluation_step(smaller(epoch))
    except torch.OutOfMemoryError:
        return False
    return True
