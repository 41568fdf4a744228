"""Ways to train for ``benchmarks.trace``: a small network, each with one more feature."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

SAMPLES = 256
FEATURES, CLASSES = 6, 3
Batch = tuple[Tensor, Tensor, Tensor]


class Samples(Dataset[tuple[int, Tensor, Tensor]]):
    """An index, features with ``noise`` added each time that a sample is read, and a class."""

    def __init__(self, noise: Callable[[], Tensor] | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index] + (self.noise() if self.noise else 0), self.y[index]


class OwnNoise:
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(2)

    def __call__(self) -> Tensor:
        return torch.randn(FEATURES, generator=self.generator)


def global_noise() -> Tensor:
    """Draws from the three generators that a process has."""
    return torch.randn(FEATURES) + random.random() + float(np.random.random())


def sgd(net: Net) -> Any:
    return torch.optim.SGD(net.parameters(), lr=1e-2)


def momentum(net: Net) -> Any:
    return torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)


def adam(net: Net) -> Any:
    return torch.optim.Adam(net.parameters(), lr=1e-2)


def one_cycle(net: Net) -> Any:
    """A schedule over as many steps as the Trainer says there will be."""
    optimizer = momentum(net)
    total_steps = int(net.trainer.estimated_stepping_batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Net(LightningModule):
    """Two linear layers with a layer ``between`` them."""

    def __init__(
        self,
        batch_size: int,
        *,
        between: Callable[[], nn.Module] = nn.ReLU,
        optimizers: Callable[[Net], Any] = sgd,
        noise: Callable[[], Tensor] | None = None,
        shuffle: bool = False,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.layers = nn.Sequential(nn.Linear(FEATURES, 16), between(), nn.Linear(16, CLASSES))
        self.make_optimizers, self.noise, self.shuffle = optimizers, noise, shuffle

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        _, x, y = batch
        loss = functional.cross_entropy(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self.make_optimizers(self)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(self.noise), batch_size=self.batch_size, shuffle=self.shuffle)


class Adversarial(Net):
    """Two optimizers, stepped by hand."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.automatic_optimization = False
        self.critic = nn.Linear(CLASSES, 1)

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        _, x, y = batch
        first, second = self.optimizers()  # type: ignore[attr-defined]  # a list of two
        scores = self.layers(x)
        loss = functional.cross_entropy(scores, y) - self.critic(scores).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        judged = self.critic(self.layers(x).detach()).square().mean()
        second.zero_grad()
        self.manual_backward(judged)
        second.step()
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.layers.parameters(), lr=1e-2),
            torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9),
        ]


class Validated(Net):
    """A validation after each epoch."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        _, x, y = batch
        self.log("val_loss", functional.cross_entropy(self.layers(x), y))

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(), batch_size=self.batch_size)


def early_stopping() -> list[Callback]:
    return [EarlyStopping("val_loss", patience=2), ModelCheckpoint(monitor="val_loss", save_top_k=2)]


@dataclass(frozen=True)
class Way:
    """Factories of the module and the callbacks, and arguments of the Trainer."""

    module: Callable[[int], Net]
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list


WAYS = {
    "SGD, nothing random": Way(Net),
    "SGD with momentum": Way(lambda size: Net(size, optimizers=momentum)),
    "Adam": Way(lambda size: Net(size, optimizers=adam)),
    "OneCycleLR over estimated_stepping_batches": Way(lambda size: Net(size, optimizers=one_cycle)),
    "BatchNorm": Way(lambda size: Net(size, between=lambda: nn.BatchNorm1d(16))),
    "dropout": Way(lambda size: Net(size, between=lambda: nn.Dropout(0.3))),
    "shuffled data": Way(lambda size: Net(size, shuffle=True)),
    "augmentation (torch, numpy, random)": Way(lambda size: Net(size, noise=global_noise)),
    "data set with its own generator": Way(lambda size: Net(size, noise=OwnNoise())),
    "gradient accumulation": Way(lambda size: Net(size, optimizers=adam), trainer={"accumulate_grad_batches": 2}),
    "bf16-mixed": Way(Net, trainer={"precision": "bf16-mixed"}),
    "manual optimization, two optimizers": Way(Adversarial),
    "validation": Way(Validated),
    "EarlyStopping and ModelCheckpoint": Way(
        Validated, trainer={"enable_checkpointing": True}, callbacks=early_stopping
    ),
}
