"""The networks of ``benchmarks.cuda_search``: nine kinds that fill devices of 0.75 to 4 GiB.

A batch is made on the device, where Lightning would copy it to: the data set has numbers only, so
that large batches cost no time on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from benchmarks.large_networks import Residual, UNet, convolution

SAMPLES = 10_000_030
"""Samples of the data set. Most sizes leave a smaller last batch, and no usual size leaves one."""

EPOCH_BATCHES = 20
"""Batches in an epoch of the training: the last ones of the data set."""

BATCHES_RUN: list[int] = []
"""The size of each batch given to ``training_step`` in this process.

A search restores the module, but not this list.
"""


class Network(NamedTuple):
    """A kind of network.

    Its samples are the shapes and types of the tensors of one sample, the target last. ``module``
    is called with the bytes of the device.
    """

    module: Callable[[int], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    samples: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    loss: Callable[[Tensor, Tensor], Tensor]
    gibibytes: tuple[float, ...]


class Block(nn.Module):
    """A transformer block with attention over all earlier tokens, or over all tokens."""

    def __init__(self, width: int, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        scores = qkv[0] @ qkv[1].transpose(-1, -2) / 8
        if self.is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        attended = (scores.softmax(-1) @ qkv[2]).transpose(1, 2).flatten(2)
        x = x + self.project(attended)
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Checkpointed(nn.Module):
    """A layer that keeps only its input, and computes the rest again in the backward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return out


class Gpt(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module], width: int = 384) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16_384, width)
        self.blocks = nn.Sequential(*(wrap(Block(width, is_causal=True)) for _ in range(6)))
        self.head = nn.Linear(width, 16_384, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embedding(x)))
        return logits.flatten(0, 1)


class Vit(nn.Module):
    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.Sequential(*(Block(width, is_causal=False) for _ in range(8)))
        self.head = nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        out: Tensor = self.head(self.blocks(tokens).mean(1))
        return out


class Lstm(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_000, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.embedding(x))[0][:, -1])
        return scores


class Tables(nn.Module):
    """A recommender whose tables, with gradients and Adam's states, take 60 % of the device."""

    def __init__(self, device_bytes: int, width: int = 32) -> None:
        super().__init__()
        rows = int(0.15 * device_bytes / (4 * width * 8))
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(8))
        self.head = nn.Sequential(nn.Linear(8 * width, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x: Tensor) -> Tensor:
        features = [table(x[:, column]) for column, table in enumerate(self.tables)]
        scores: Tensor = self.head(torch.cat(features, 1))
        return scores


def mlp(_: int) -> nn.Module:
    layers = (layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU()))
    return nn.Sequential(*layers)


def resnet(_: int) -> nn.Module:
    widths = (32, 32, 64, 64, 128, 128)
    blocks = (Residual(inputs, outputs) for inputs, outputs in pairwise(widths))
    stem = (*convolution(3, 32), nn.ReLU(inplace=True))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100))


def unet(_: int) -> nn.Module:
    return nn.Sequential(UNet(3, 16, 32, 64, 128), nn.Conv2d(16, 1, 1))


class Gan(nn.Module):
    """A generator of images from 64 random numbers, and a critic that judges them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 3072), nn.Tanh()
        )
        self.critic = nn.Sequential(
            nn.Linear(3072, 1024),
            nn.LeakyReLU(0.2),
            nn.Linear(1024, 512),
            nn.LeakyReLU(0.2),
            nn.Linear(512, 1),
        )


# These three were written after the rules of version 0.4 were final.


class WaveNet(nn.Module):
    """Gated dilated convolutions over a signal, whose skip connections are summed at the end."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 3, padding=2**power, dilation=2**power)
            for power in range(10)
        )
        self.head = nn.Linear(width, 20)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        skipped = torch.zeros_like(hidden)
        for gate in self.gates:
            value, open_share = gate(hidden).chunk(2, 1)
            out = torch.tanh(value) * torch.sigmoid(open_share)
            skipped = skipped + out
            hidden = hidden + out
        scores: Tensor = self.head(skipped.relu().mean(2))
        return scores


class Mixer(nn.Module):
    """An MLP-Mixer: layers over the patches of an image, and layers over its channels."""

    def __init__(self, width: int = 160, patches: int = 196) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.over_patches = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(patches), nn.Linear(patches, 384), nn.GELU())
            for _ in range(6)
        )
        self.back = nn.ModuleList(nn.Linear(384, patches) for _ in range(6))
        self.over_channels = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 640), nn.GELU(), nn.Linear(640, width)
            )
            for _ in range(6)
        )
        self.head = nn.Linear(width, 50)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.patches(x).flatten(2)
        for mixes, back, channels in zip(
            self.over_patches, self.back, self.over_channels, strict=True
        ):
            hidden = hidden + back(mixes(hidden))
            hidden = hidden + channels(hidden.transpose(1, 2)).transpose(1, 2)
        scores: Tensor = self.head(hidden.mean(2))
        return scores


class Autoencoder(nn.Module):
    """Convolutions down to a code with random noise, and transposed convolutions back."""

    def __init__(self) -> None:
        super().__init__()
        down = ((1, 24), (24, 48), (48, 96))
        self.encoder = nn.Sequential(
            *(
                layer
                for inputs, outputs in down
                for layer in (
                    nn.Conv2d(inputs, outputs, 4, 2, 1),
                    nn.GroupNorm(8, outputs),
                    nn.SiLU(),
                )
            )
        )
        up = ((48, 48), (48, 24), (24, 1))
        self.decoder = nn.Sequential(
            *(
                layer
                for inputs, outputs in up
                for layer in (nn.SiLU(), nn.ConvTranspose2d(inputs, outputs, 4, 2, 1))
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        mean, log_deviation = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * log_deviation.exp()
        image: Tensor = self.decoder(code)
        return image


def tokens_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target.flatten())


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
_LABEL = ((), torch.int64)
_TOKENS = (((256,), torch.int64), ((256,), torch.int64))
_SIZES = (0.75, 1.5, 4.0)
NETWORKS = {
    "mlp": Network(
        mlp,
        torch.optim.Adam,
        (((1024,), torch.float32), ((1024,), torch.float32)),
        F.mse_loss,
        _SIZES,
    ),
    "gpt": Network(
        lambda _: Gpt(wrap=lambda layer: layer),
        torch.optim.AdamW,
        _TOKENS,
        tokens_loss,
        (1.0, 1.5, 4.0),
    ),
    "checkpointed gpt": Network(
        lambda _: Gpt(wrap=Checkpointed), torch.optim.AdamW, _TOKENS, tokens_loss, (1.0, 1.5, 4.0)
    ),
    "vit": Network(
        lambda _: Vit(),
        torch.optim.AdamW,
        (((3, 96, 96), torch.float32), _LABEL),
        F.cross_entropy,
        _SIZES,
    ),
    "lstm": Network(
        lambda _: Lstm(), torch.optim.Adam, (((64,), torch.int64), _LABEL), F.cross_entropy, _SIZES
    ),
    "unet": Network(
        unet,
        torch.optim.AdamW,
        (((3, 64, 64), torch.float32), ((1, 64, 64), torch.float32)),
        F.binary_cross_entropy_with_logits,
        _SIZES,
    ),
    "resnet": Network(resnet, SGD, (((3, 32, 32), torch.float32), _LABEL), F.cross_entropy, _SIZES),
    "tables": Network(
        Tables, torch.optim.Adam, (((8,), torch.int64), _LABEL), F.cross_entropy, (2.0, 2.5, 4.0)
    ),
    "wavenet": Network(
        lambda _: WaveNet(),
        torch.optim.NAdam,
        (((1, 2048), torch.float32), _LABEL),
        F.cross_entropy,
        _SIZES,
    ),
    "mixer": Network(
        lambda _: Mixer(),
        torch.optim.RMSprop,
        (((3, 112, 112), torch.float32), _LABEL),
        F.cross_entropy,
        _SIZES,
    ),
    "autoencoder": Network(
        lambda _: Autoencoder(),
        torch.optim.AdamW,
        (((1, 96, 96), torch.float32), ((1, 96, 96), torch.float32)),
        F.mse_loss,
        _SIZES,
    ),
    "gan": Network(
        lambda _: Gan(), torch.optim.Adam, (((3072,), torch.float32),), F.mse_loss, _SIZES
    ),
}


class Project(LightningModule):
    """A project that trains one of the networks, as a user would write it."""

    def __init__(self, network: Network, device_bytes: int, batch_size: int = 2) -> None:
        super().__init__()
        self.network = network
        self.module: Any = network.module(device_bytes)
        self.batch_size = batch_size
        # The training begins so many batches before the end of the data set; None: at the start.
        self.epoch_batches: int | None = None

    def transfer_batch_to_device(
        self, batch: Tensor, device: torch.device, dataloader_idx: int
    ) -> list[Tensor]:
        return [
            torch.empty(len(batch), *shape, dtype=dtype, device=device)
            for shape, dtype in self.network.samples
        ]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        BATCHES_RUN.append(len(batch[0]))
        return self._loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._loss(batch)

    def _loss(self, batch: list[Tensor]) -> Tensor:
        inputs, target = batch
        return self.network.loss(self.module(inputs), target)

    def configure_optimizers(self) -> Any:
        return self.network.optimizer(self.module.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        first = 0
        if self.epoch_batches is not None:
            batches = -(-SAMPLES // self.batch_size)
            first = (batches - self.epoch_batches) * self.batch_size
        # A DataLoader takes any sequence, but is annotated with Dataset.
        return DataLoader(range(max(0, first), SAMPLES), batch_size=self.batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(range(SAMPLES), batch_size=self.batch_size)  # type: ignore[arg-type]


class Adversarial(Project):
    """A GAN: two optimizers, which are stepped by hand."""

    def __init__(self, network: Network, device_bytes: int, batch_size: int = 2) -> None:
        super().__init__(network, device_bytes, batch_size)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        BATCHES_RUN.append(len(batch[0]))
        optimizers: Any = self.optimizers()
        generator, critic = optimizers
        judged = (
            self.module.critic(batch[0]).mean() - self.module.critic(self._images(batch)).mean()
        )
        critic.zero_grad()
        self.manual_backward(judged)
        critic.step()
        fooled = self.module.critic(self._images(batch)).mean()
        generator.zero_grad()
        self.manual_backward(fooled)
        generator.step()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.module.critic(self._images(batch))

    def _images(self, batch: list[Tensor]) -> Tensor:
        noise = torch.randn(len(batch[0]), 64, device=self.device)
        images: Tensor = self.module.generator(noise)
        return images

    def configure_optimizers(self) -> Any:
        halves = (self.module.generator, self.module.critic)
        return [self.network.optimizer(half.parameters()) for half in halves]


def project(name: str, device_bytes: int, batch_size: int = 2) -> Project:
    kind = Adversarial if name == "gan" else Project
    return kind(NETWORKS[name], device_bytes, batch_size)
