"""The trainings of the benchmarks.

The networks are small enough for two cores and large enough to fill memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.caps import DEVICE_SHARE
from benchmarks.common import emit
from benchmarks.large_networks import convolution

MIB = 2**20
CLASSES = 10
# The vocabulary of the small language models has this many tokens.
TOKENS = 512
# The generator makes an image from this many random numbers.
LATENT = 32
# A sample of text has this many tokens.
LENGTH = 128

SAMPLES_RUN: Counter[int] = Counter()
"""Batch size -> samples given to ``training_step`` in this process."""

Sample = tuple[Tensor, Tensor]


class Residual(nn.Sequential):
    """The input plus its layers' output."""

    def forward(self, x: Tensor) -> Tensor:
        # torch does not annotate this method of nn.Sequential.
        return x + super().forward(x)  # type: ignore[no-any-return, no-untyped-call]


def conv_net(width: int = 16) -> nn.Module:
    """A residual convolutional network for 3 x 32 x 32 images."""
    stem = nn.Conv2d(3, width, 3, padding=1)
    blocks = [Residual(*convolution(width, width), nn.ReLU()) for _ in range(4)]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)
    return nn.Sequential(stem, *blocks[:2], nn.MaxPool2d(2), *blocks[2:], *head)


class UNet(nn.Module):
    """Two levels down and up with skip connections; a class for each of 1 x 64 x 64 pixels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def double(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3, padding=1),
                nn.ReLU(),
            )

        self.down1 = double(1, width)
        self.down2 = double(width, 2 * width)
        self.bottom = double(2 * width, 4 * width)
        self.up2 = double(6 * width, 2 * width)
        self.up1 = double(3 * width, width)
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
    """An encoder that predicts a token at each position."""

    def __init__(
        self, width: int = 128, layers: int = 3, heads: int = 4, tokens: int = TOKENS
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embedding(x)))
        return scores.transpose(1, 2)


class LSTM(nn.Module):
    """A two-layer LSTM over 64 features for each step."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, width, 2, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(x)[0][:, -1])
        return scores


def wide_mlp(width: int = 1024, layers: int = 12) -> nn.Module:
    """Large weights and small activations."""
    hidden = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


class GAN(nn.Module):
    """A generator of 1 x 32 x 32 images, and a discriminator."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(LATENT, 2 * width * 8 * 8),
            nn.Unflatten(1, (2 * width, 8, 8)),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, width // 2, 4, stride=2, padding=1),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
            nn.Conv2d(width // 2, 1, 3, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 2 * width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * width * 8 * 8, 1),
        )

    def imagine(self, count: int) -> Tensor:
        device = next(self.generator.parameters()).device
        images: Tensor = self.generator(torch.randn(count, LATENT, device=device))
        return images


@dataclass(eq=False)
class RandomSamples(Dataset[Sample]):
    """A million samples, each made from its index when it is read.

    The data set therefore holds no memory.
    """

    make: Callable[[torch.Generator], Sample]

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Sample:
        return self.make(torch.Generator().manual_seed(index))


def floats(g: torch.Generator, *, shape: tuple[int, ...]) -> Sample:
    return torch.randn(shape, generator=g), torch.randint(CLASSES, (), generator=g)


def _tokens(g: torch.Generator, *, length: int) -> Sample:
    inputs = torch.randint(TOKENS, (length,), generator=g)
    targets = torch.randint(TOKENS, (length,), generator=g)
    return inputs, targets


def _long_tailed_tokens(g: torch.Generator) -> Sample:
    is_long = torch.randint(64, (), generator=g) == 0
    return _tokens(g, length=2 * LENGTH if is_long else LENGTH // 2)


def _pixels(g: torch.Generator, *, side: int = 64) -> Sample:
    return torch.randn(1, side, side, generator=g), torch.randint(2, (side, side), generator=g)


def padded(samples: list[Sample]) -> Sample:
    inputs, targets = zip(*samples, strict=True)
    # Cross entropy leaves out targets of -100, which is the default of its ``ignore_index``.
    return pad_sequence(list(inputs), True), pad_sequence(list(targets), True, -100)


class Training(LightningModule):
    """Training and evaluation of a workload with cross entropy and AdamW."""

    def __init__(self, workload: Workload, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.workload = workload
        self.network = workload.network()
        self.automatic_optimization = workload.optimizers == 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch_size = len(batch[0])
        if batch_size not in SAMPLES_RUN:
            # The parent process gets the size now, since this step may end with SIGKILL.
            emit(last_new_size=batch_size)
        SAMPLES_RUN[batch_size] += batch_size

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return functional.cross_entropy(self.network(inputs), targets)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Sample]:
        return DataLoader(
            RandomSamples(self.workload.sample),
            batch_size=self.batch_size,
            collate_fn=self.workload.collate,
        )

    val_dataloader = train_dataloader


class Adversarial(Training):
    """A generator against a discriminator, with two optimizers under manual optimization."""

    network: GAN

    def training_step(self, batch: Any, batch_idx: int) -> None:
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
        real, _ = batch
        made = self.network.imagine(len(real)).detach()
        on_real = self.network.discriminator(real)
        on_made = self.network.discriminator(made)
        return functional.relu(1 - on_real).mean() + functional.relu(1 + on_made).mean()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        halves = (self.network.generator, self.network.discriminator)
        return [torch.optim.Adam(half.parameters(), lr=1e-4) for half in halves]


@dataclass(frozen=True)
class Workload:
    """A network, its data and the memory that it may use on the host."""

    network: Callable[[], nn.Module]
    # This function makes a sample with its target.
    sample: Callable[[torch.Generator], Sample]
    # On the host a training may use this many MiB beyond the use at the start of ``fit``.
    room_mib: int
    collate: Callable[[list[Sample]], Any] = default_collate
    training: type[Training] = Training
    # Each training step has this many steps of optimizers.
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
    "GAN": Workload(
        GAN, partial(floats, shape=(1, 32, 32)), 250, training=Adversarial, optimizers=2
    ),
    "LSTM": Workload(LSTM, partial(floats, shape=(100, 64)), 200),
    "transformer": Workload(Transformer, partial(_tokens, length=LENGTH), 300),
    "long-tailed text": Workload(Transformer, _long_tailed_tokens, 300, collate=padded),
    "wide MLP": Workload(wide_mlp, partial(floats, shape=(1024,)), 800),
}

# A step takes about a millisecond for each sample on one core, so that many steps can be timed.
QUICK_WORKLOADS = {
    "small CNN": Workload(partial(conv_net, 8), partial(floats, shape=(3, 32, 32)), 200),
    "small U-Net": Workload(UNet, partial(_pixels, side=32), 250),
    "small transformer": Workload(partial(Transformer, 64, 2), partial(_tokens, length=32), 200),
    "small LSTM": Workload(partial(LSTM, 96), partial(floats, shape=(50, 64)), 150),
    "small MLP": Workload(partial(wide_mlp, 512, 4), partial(floats, shape=(512,)), 100),
}
