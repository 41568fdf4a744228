"""Modules of Lightning that train the networks, with data of the host or of the device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import emit
from benchmarks.networks.images import ConvolutionalGan
from benchmarks.networks.record import Network, Sample

SAMPLES_RUN: Counter[int] = Counter()
"""Batch size -> samples given to a :class:`HostTraining` in this process."""

SAMPLES = 10_000_030
"""Samples of a project. Most sizes leave a smaller last batch, and no usual size leaves one."""

EPOCH_BATCHES = 20
"""Batches in an epoch of a project's training: the last ones of the data set."""

BATCHES_RUN: list[int] = []
"""The size of each batch given to a :class:`Project` in this process.

A search restores the module, but not this list.
"""


class Training(LightningModule):
    """A training of one of the networks, whose data a subclass has."""

    def __init__(self, network: Network, device_bytes: int = 0, batch_size: int = 2) -> None:
        super().__init__()
        self.network = network
        arguments = (device_bytes,) if network.fills_device else ()
        self.module: Any = network.module(*arguments)
        self.batch_size = batch_size
        self.automatic_optimization = not network.is_adversarial

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def loss(self, batch: Any) -> Tensor:
        inputs, target = batch
        return self.network.loss(self.module(inputs), target)

    def configure_optimizers(self) -> Any:
        if self.network.is_adversarial:
            halves = (self.module.generator, self.module.discriminator)
            return [self.network.optimizer(half.parameters()) for half in halves]
        return self.network.optimizer(self.module.parameters())


@dataclass(eq=False)
class RandomSamples(Dataset[Sample]):
    """A million samples, each made from its index when it is read.

    The data set therefore holds no memory.
    """

    network: Network

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Sample:
        return self.network.sample(torch.Generator().manual_seed(index))


class HostTraining(Training):
    """A training on random samples of the host, with an evaluation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch_size = len(batch[0])
        if batch_size not in SAMPLES_RUN:
            # The parent process gets the size now, since this step may end with SIGKILL.
            emit(last_new_size=batch_size)
        SAMPLES_RUN[batch_size] += batch_size

    def train_dataloader(self) -> DataLoader[Sample]:
        return DataLoader(
            RandomSamples(self.network),
            batch_size=self.batch_size,
            collate_fn=self.network.collate,
        )

    val_dataloader = train_dataloader


class AdversarialHostTraining(HostTraining):
    """A generator against a discriminator, with two optimizers under manual optimization."""

    module: ConvolutionalGan

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer, loss_of in zip(optimizers, (self._generator_loss, self.loss), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss_of(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def _generator_loss(self, batch: Any) -> Tensor:
        scores: Tensor = self.module.discriminator(self.module.imagine(len(batch[0])))
        return -scores.mean()

    def loss(self, batch: Any) -> Tensor:
        real, _ = batch
        made = self.module.imagine(len(real)).detach()
        on_real = self.module.discriminator(real)
        on_made = self.module.discriminator(made)
        return functional.relu(1 - on_real).mean() + functional.relu(1 + on_made).mean()


def host_training(network: Network, batch_size: int = 2) -> HostTraining:
    kind = AdversarialHostTraining if network.is_adversarial else HostTraining
    return kind(network, batch_size=batch_size)


class Project(Training):
    """A training whose batches are made on the device, where Lightning would copy them to.

    The data set has numbers only, so that large batches cost no time on the host.
    """

    def __init__(self, network: Network, device_bytes: int = 0, batch_size: int = 2) -> None:
        super().__init__(network, device_bytes, batch_size)
        # The training begins so many batches before the end of the data set; None: at the start.
        self.epoch_batches: int | None = None

    def transfer_batch_to_device(
        self, batch: Tensor, device: torch.device, dataloader_idx: int
    ) -> list[Tensor]:
        return self.network.batch(len(batch), device, torch.empty)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        BATCHES_RUN.append(len(batch[0]))
        return self.loss(batch)

    def train_dataloader(self) -> DataLoader[Any]:
        first = 0
        if self.epoch_batches is not None:
            batches = -(-SAMPLES // self.batch_size)
            first = (batches - self.epoch_batches) * self.batch_size
        # A DataLoader takes any sequence, but is annotated with Dataset.
        return DataLoader(range(max(0, first), SAMPLES), batch_size=self.batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(range(SAMPLES), batch_size=self.batch_size)  # type: ignore[arg-type]


class AdversarialProject(Project):
    """A GAN: two optimizers, which are stepped by hand."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        BATCHES_RUN.append(len(batch[0]))
        optimizers: Any = self.optimizers()
        generator, discriminator = optimizers
        judged = self._judged(batch[0]) - self._judged(self._images(batch))
        discriminator.zero_grad()
        self.manual_backward(judged)
        discriminator.step()
        fooled = self._judged(self._images(batch))
        generator.zero_grad()
        self.manual_backward(fooled)
        generator.step()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.module.discriminator(self._images(batch))

    def _judged(self, images: Tensor) -> Tensor:
        scores: Tensor = self.module.discriminator(images)
        return scores.mean()

    def _images(self, batch: list[Tensor]) -> Tensor:
        noise = torch.randn(len(batch[0]), 64, device=self.device)
        images: Tensor = self.module.generator(noise)
        return images


def project(network: Network, device_bytes: int = 0, batch_size: int = 2) -> Project:
    kind = AdversarialProject if network.is_adversarial else Project
    return kind(network, device_bytes, batch_size)
