"""Five models of different kinds on random data, small enough for two cores and large enough to fill memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

CLASSES = 10


class RandomSamples(Dataset[tuple[Tensor, Tensor]]):
    """Samples made on the spot from their index, so that the data set itself holds no memory."""

    def __init__(self, make: Callable[[torch.Generator], tuple[Tensor, Tensor]], length: int) -> None:
        self.make = make
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.make(torch.Generator().manual_seed(index))


class Conv(nn.Module):
    """A residual convolutional network for 3 x 32 x 32 images."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(4)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = x + block(x)
            if i == 1:
                x = functional.max_pool2d(x, 2)
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


class UNet(nn.Module):
    """Two levels down and up with skip connections; a class for each of 1 x 48 x 48 pixels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def double(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3, padding=1),
                nn.ReLU(),
            )

        self.down1, self.down2 = double(1, width), double(width, 2 * width)
        self.bottom = double(2 * width, 4 * width)
        self.up2, self.up1 = double(6 * width, 2 * width), double(3 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(functional.max_pool2d(first, 2))
        bottom = self.bottom(functional.max_pool2d(second, 2))
        up = self.up2(torch.cat([functional.interpolate(bottom, scale_factor=2.0), second], 1))
        up = self.up1(torch.cat([functional.interpolate(up, scale_factor=2.0), first], 1))
        scores: Tensor = self.head(up)
        return scores


class Transformer(nn.Module):
    """A small encoder over 64 tokens that predicts a token at each place."""

    def __init__(self, width: int = 128, tokens: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embedding(x)))
        return scores.transpose(1, 2)


class Recurrent(nn.Module):
    """A two-layer LSTM over 100 steps."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, width, 2, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(x)[0][:, -1])
        return scores


def wide_mlp() -> nn.Module:
    """Large weights and small activations: bound by the optimizer step at small batches."""
    return nn.Sequential(
        nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(),
        nn.Linear(2048, CLASSES),
    )  # fmt: skip


def _floats(*shape: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    return lambda g: (torch.randn(*shape, generator=g), torch.randint(CLASSES, (), generator=g))


def _tokens(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(512, (64,), generator=g), torch.randint(512, (64,), generator=g)


def _pixels(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(1, 48, 48, generator=g), torch.randint(2, (48, 48), generator=g)


@dataclass(frozen=True)
class Workload:
    """A network, how its samples are made, and a limit that a search on the host can reach in seconds.

    Args:
        network: makes the network.
        sample: makes one sample and its target.
        host_limit: memory limit of the process on the host.
    """

    network: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    host_limit: str


WORKLOADS = {
    "convolution": Workload(Conv, _floats(3, 32, 32), "800MiB"),
    "transformer": Workload(Transformer, _tokens, "800MiB"),
    "recurrent": Workload(Recurrent, _floats(100, 64), "800MiB"),
    "wide MLP": Workload(wide_mlp, _floats(1024), "1000MiB"),
    "U-Net": Workload(UNet, _pixels, "800MiB"),
}


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
        self.network = workload.network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return functional.cross_entropy(self.network(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(RandomSamples(self.sample, self.length), batch_size=self.batch_size)
