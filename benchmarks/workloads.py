"""The trainings of the benchmarks: networks of different kinds on random data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.caps import DEVICE_SHARE
from benchmarks.common import emit
from benchmarks.networks import CLASSES, GAN, LSTM, TOKENS, Transformer, UNet, conv_net, wide_mlp

MIB = 2**20
LENGTH = 128
"""Tokens in a sample of the small transformer."""

IGNORED = -100
"""Target that cross entropy leaves out. Source: its ``ignore_index``."""

SAMPLES_RUN: Counter[int] = Counter()
"""Batch size -> samples given to ``training_step`` in this process."""

Sample = tuple[Tensor, Tensor]


@dataclass(eq=False)
class RandomSamples(Dataset[Sample]):
    """A million samples made from their index when they are read, so that the data set holds no memory."""

    make: Callable[[torch.Generator], Sample]

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Sample:
        return self.make(torch.Generator().manual_seed(index))


def floats(g: torch.Generator, *, shape: tuple[int, ...]) -> Sample:
    return torch.randn(shape, generator=g), torch.randint(CLASSES, (), generator=g)


def _tokens(g: torch.Generator, *, length: int) -> Sample:
    return torch.randint(TOKENS, (length,), generator=g), torch.randint(TOKENS, (length,), generator=g)


def _long_tailed_tokens(g: torch.Generator) -> Sample:
    is_long = torch.randint(64, (), generator=g) == 0
    return _tokens(g, length=2 * LENGTH if is_long else LENGTH // 2)


def _pixels(g: torch.Generator) -> Sample:
    return torch.randn(1, 64, 64, generator=g), torch.randint(2, (64, 64), generator=g)


def _padded(samples: list[Sample]) -> Sample:
    inputs, targets = zip(*samples, strict=True)
    return pad_sequence(list(inputs), True), pad_sequence(list(targets), True, IGNORED)


class Training(LightningModule):
    """Training and evaluation of a workload with cross entropy and AdamW.

    Args:
        workload: the network and its data.
        batch_size: samples in each batch.
    """

    def __init__(self, workload: Workload, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.workload = workload
        self.network = workload.network()
        self.automatic_optimization = workload.optimizers == 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.count(len(batch[0]))
        return self.loss(batch)

    def count(self, batch_size: int) -> None:
        """Count the samples of a step before it runs."""
        if batch_size not in SAMPLES_RUN:
            emit(last_new_size=batch_size)  # known even if the process is killed in this step
        SAMPLES_RUN[batch_size] += batch_size

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def loss(self, batch: Any) -> Tensor:
        """The loss of one batch."""
        inputs, targets = batch
        return functional.cross_entropy(self.network(inputs), targets)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Sample]:
        return DataLoader(
            RandomSamples(self.workload.sample), batch_size=self.batch_size, collate_fn=self.workload.collate
        )

    val_dataloader = train_dataloader


class Adversarial(Training):
    """A generator against a discriminator, with two optimizers under manual optimization."""

    network: GAN

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.count(len(batch[0]))
        optimizers: Any = self.optimizers()
        for optimizer, loss_of in zip(optimizers, (self._generator_loss, self.loss), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss_of(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def _generator_loss(self, batch: Any) -> Tensor:
        scores: Tensor = self.network.discriminator(self.network.imagine(len(batch[0])))
        return -scores.mean()

    def loss(self, batch: Any) -> Tensor:
        """The loss of the discriminator."""
        real, _ = batch
        made = self.network.imagine(len(real)).detach()
        on_real, on_made = self.network.discriminator(real), self.network.discriminator(made)
        return functional.relu(1 - on_real).mean() + functional.relu(1 + on_made).mean()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        halves = (self.network.generator, self.network.discriminator)
        return [torch.optim.Adam(half.parameters(), lr=1e-4) for half in halves]


@dataclass(frozen=True)
class Workload:
    """A network, its data and the memory that it may use on the host.

    Args:
        network: makes the network.
        sample: makes one sample and its target.
        room_mib: memory on the host beyond the use at the start of ``fit``, in MiB.
        collate: makes a batch of samples.
        training: the LightningModule.
        optimizers: optimizer steps in each training step.
    """

    network: Callable[[], torch.nn.Module]
    sample: Callable[[torch.Generator], Sample]
    room_mib: int
    collate: Callable[[list[Sample]], Any] = default_collate
    training: type[Training] = Training
    optimizers: int = 1

    @property
    def room_bytes(self) -> int:
        """Bytes beyond the use at the start of ``fit``; on CUDA bytes in total."""
        if torch.cuda.is_available():
            return int(DEVICE_SHARE * torch.cuda.get_device_properties(0).total_memory)
        return self.room_mib * MIB


WORKLOADS = {
    "ConvNet": Workload(conv_net, partial(floats, shape=(3, 32, 32)), 600),
    "U-Net": Workload(UNet, _pixels, 500),
    "GAN": Workload(GAN, partial(floats, shape=(1, 32, 32)), 250, training=Adversarial, optimizers=2),
    "LSTM": Workload(LSTM, partial(floats, shape=(100, 64)), 200),
    "transformer": Workload(Transformer, partial(_tokens, length=LENGTH), 300),
    "long-tailed text": Workload(Transformer, _long_tailed_tokens, 300, collate=_padded),
    "wide MLP": Workload(wide_mlp, partial(floats, shape=(1024,)), 800),
}


def module_for(name: str, batch_size: int = 2) -> Training:
    """The module that trains a workload."""
    workload = WORKLOADS[name]
    return workload.training(workload, batch_size)
