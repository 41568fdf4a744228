"""The networks of the benchmarks: small enough for two cores, large enough to fill memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.large_networks import convolution

CLASSES = 10
TOKENS = 512
"""Vocabulary of the small language models."""

LATENT = 32
"""Numbers from which the generator makes an image."""


class Residual(nn.Sequential):
    """The input plus its layers' output."""

    def forward(self, x: Tensor) -> Tensor:
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
                nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU(),
            )  # fmt: skip

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
    """An encoder that predicts a token at each position."""

    def __init__(self, width: int = 128, layers: int = 3, heads: int = 4, tokens: int = TOKENS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embedding(x)))
        return scores.transpose(1, 2)


class LSTM(nn.Module):
    """A two-layer LSTM over 100 steps."""

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
            nn.Linear(LATENT, 2 * width * 8 * 8), nn.Unflatten(1, (2 * width, 8, 8)), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.ConvTranspose2d(width, width // 2, 4, stride=2, padding=1), nn.BatchNorm2d(width // 2), nn.ReLU(),
            nn.Conv2d(width // 2, 1, 3, padding=1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 2 * width, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(2 * width * 8 * 8, 1),
        )  # fmt: skip

    def imagine(self, count: int) -> Tensor:
        """``count`` generated images."""
        device = next(self.generator.parameters()).device
        images: Tensor = self.generator(torch.randn(count, LATENT, device=device))
        return images
