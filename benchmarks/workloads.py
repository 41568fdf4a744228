"""What the benchmarks train: models of different kinds on random data, on CUDA also two at their real sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.networks import (
    CLASSES,
    GPT2,
    TOKENS,
    Conv,
    GenerativePair,
    Recurrent,
    Transformer,
    UNet,
    wide_mlp,
)
from benchmarks.resnet import IMAGE_CLASSES, resnet50

__all__ = ["CLASSES", "WORKLOADS", "Adversarial", "RandomSamples", "Training", "Workload", "module_for"]

IGNORED = -100
"""The target that cross entropy leaves out. Source: its ``ignore_index``."""

SHORTEST, LONGEST = 8, 96
"""Tokens in a sample of the ragged-length language model."""

Sample = tuple[Tensor, Tensor]


class RandomSamples(Dataset[Sample]):
    """Samples made on the spot from their index, so that the data set itself holds no memory."""

    def __init__(self, make: Callable[[torch.Generator], Sample], length: int) -> None:
        self.make = make
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        return self.make(torch.Generator().manual_seed(index))


def _floats(g: torch.Generator, *, shape: tuple[int, ...], classes: int = CLASSES) -> Sample:
    return torch.randn(shape, generator=g), torch.randint(classes, (), generator=g)


def _tokens(g: torch.Generator, *, length: int, vocabulary: int = TOKENS) -> Sample:
    return torch.randint(vocabulary, (length,), generator=g), torch.randint(vocabulary, (length,), generator=g)


def _ragged_tokens(g: torch.Generator) -> Sample:
    skewed = torch.rand((), generator=g).item() ** 3  # half of the samples are below an eighth of the range
    return _tokens(g, length=SHORTEST + round(skewed * (LONGEST - SHORTEST)))


def _pixels(g: torch.Generator) -> Sample:
    return torch.randn(1, 64, 64, generator=g), torch.randint(2, (64, 64), generator=g)


def _padded(samples: list[Sample]) -> Sample:
    inputs, targets = zip(*samples, strict=True)
    return (
        torch.nn.utils.rnn.pad_sequence(list(inputs), batch_first=True),
        torch.nn.utils.rnn.pad_sequence(list(targets), batch_first=True, padding_value=IGNORED),
    )


class Training(LightningModule):
    """Cross entropy and AdamW over a workload.

    Args:
        workload: what to train.
        batch_size: samples in each step.
        length: samples in the data set.
    """

    def __init__(self, workload: Workload, batch_size: int = 2, length: int = 100_000) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.length = length
        self.sample = workload.sample
        self.joined = workload.collate
        self.network = workload.network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return functional.cross_entropy(self.network(inputs), targets)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def collate(self, samples: list[Any]) -> Any:
        """One batch of samples."""
        return self.joined(samples)

    def train_dataloader(self) -> DataLoader[Sample]:
        data = RandomSamples(self.sample, self.length)
        return DataLoader(data, batch_size=self.batch_size, collate_fn=self.collate)


class Adversarial(Training):
    """A generator against a discriminator: two optimizers, stepped by hand."""

    def __init__(self, workload: Workload, batch_size: int = 2, length: int = 100_000) -> None:
        super().__init__(workload, batch_size, length)
        self.automatic_optimization = False

    @property
    def pair(self) -> GenerativePair:
        """The two networks."""
        assert isinstance(self.network, GenerativePair)
        return self.network

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        real, _ = batch
        loss: Tensor = real.new_zeros(())
        optimizers: Any = self.optimizers()
        for optimizer, loss_of in zip(optimizers, (self._generator_loss, self._discriminator_loss), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = loss_of(real)
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        return loss.detach()

    def _generator_loss(self, real: Tensor) -> Tensor:
        scores: Tensor = self.pair.discriminator(self.pair.imagine(len(real)))
        return -scores.mean()

    def _discriminator_loss(self, real: Tensor) -> Tensor:
        made = self.pair.imagine(len(real)).detach()
        on_real, on_made = self.pair.discriminator(real), self.pair.discriminator(made)
        return functional.relu(1 - on_real).mean() + functional.relu(1 + on_made).mean()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        halves = (self.pair.generator, self.pair.discriminator)
        return [torch.optim.Adam(half.parameters(), lr=1e-4) for half in halves]


@dataclass(frozen=True)
class Workload:
    """A network, how its samples are made, and a limit that a search on the host can reach in seconds.

    Args:
        network: makes the network.
        sample: makes one sample and its target.
        host_limit: memory limit of the process on the host.
        collate: makes a batch of samples.
        training: how it is trained.
        worst_case: what this package's finder is told about samples that differ in size.
        optimizers: how many step in each training step.
    """

    network: Callable[[], torch.nn.Module]
    sample: Callable[[torch.Generator], Sample]
    host_limit: str
    collate: Callable[[list[Sample]], Any] = default_collate
    training: type[Training] = Training
    worst_case: Literal["longest"] | None = None
    optimizers: int = 1


WORKLOADS = {
    "convolution": Workload(Conv, partial(_floats, shape=(3, 32, 32)), "850MiB"),
    "U-Net": Workload(UNet, _pixels, "850MiB"),
    "transformer": Workload(Transformer, partial(_tokens, length=64), "850MiB"),
    "ragged": Workload(Transformer, _ragged_tokens, "850MiB", collate=_padded, worst_case="longest"),
    "recurrent": Workload(Recurrent, partial(_floats, shape=(100, 64)), "850MiB"),
    "wide MLP": Workload(wide_mlp, partial(_floats, shape=(1024,)), "800MiB"),
    "GAN": Workload(GenerativePair, partial(_floats, shape=(1, 64, 64)), "850MiB", training=Adversarial, optimizers=2),
}
"""What each process may hold on the host is said in its ``host_limit``; on CUDA it is a share of the device."""

if torch.cuda.is_available():  # too large for a host
    WORKLOADS["ResNet-50"] = Workload(
        resnet50, partial(_floats, shape=(3, 224, 224), classes=IMAGE_CLASSES), host_limit="unused on CUDA"
    )
    WORKLOADS["GPT-2"] = Workload(GPT2, partial(_tokens, length=1024, vocabulary=50_257), host_limit="unused on CUDA")


def module_for(name: str, batch_size: int = 2) -> LightningModule:
    """The module that trains a workload with ``batch_size`` samples in each step."""
    workload = WORKLOADS[name]
    return workload.training(workload, batch_size)
