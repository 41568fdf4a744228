"""Networks of images and videos."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.networks.layers import Block, Residual, convolution
from benchmarks.networks.record import CLASSES

LATENT = 32
"""The generator of the convolutional GAN makes an image from this many random numbers."""


class Skip(nn.Sequential):
    """The input plus its layers' output."""

    def forward(self, x: Tensor) -> Tensor:
        # torch does not annotate this method of nn.Sequential.
        return x + super().forward(x)  # type: ignore[no-any-return, no-untyped-call]


def conv_net(width: int = 16) -> nn.Module:
    """A residual convolutional network for 3 x 32 x 32 images."""
    stem = nn.Conv2d(3, width, 3, padding=1)
    blocks = [Skip(*convolution(width, width), nn.ReLU()) for _ in range(4)]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)
    return nn.Sequential(stem, *blocks[:2], nn.MaxPool2d(2), *blocks[2:], *head)


class InterpolatingUNet(nn.Module):
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
        second = self.down2(F.max_pool2d(first, 2))
        bottom = self.bottom(F.max_pool2d(second, 2))
        up = self.up2(torch.cat([F.interpolate(bottom, scale_factor=2.0), second], 1))
        up = self.up1(torch.cat([F.interpolate(up, scale_factor=2.0), first], 1))
        scores: Tensor = self.head(up)
        return scores


def double(a: int, b: int) -> nn.Module:
    return nn.Sequential(
        *(layer for i in (a, b) for layer in (*convolution(i, b), nn.ReLU(inplace=True)))
    )


class UNet(nn.Module):
    """A U-Net, of which each level holds the one below it."""

    def __init__(self, inputs: int, width: int, *deeper: int) -> None:
        super().__init__()
        self.down = double(inputs, width)
        self.inner = UNet(width, *deeper) if deeper else None
        if deeper:
            self.up = nn.ConvTranspose2d(deeper[0], width, 2, 2)
            self.join = double(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        if self.inner is None:
            return x
        joined: Tensor = self.join(torch.cat([x, self.up(self.inner(F.max_pool2d(x, 2)))], 1))
        return joined


def unet(*widths: int) -> nn.Module:
    """A U-Net with as many levels as widths, and one number for each pixel."""
    return nn.Sequential(UNet(3, *widths), nn.Conv2d(widths[0], 1, 1))


def resnet18() -> nn.Module:
    blocks = (Residual(a, b) for a, b in pairwise((64, 64, 64, 128, 128, 256, 256, 512, 512)))
    stem = (*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)
    )


def resnet() -> nn.Module:
    widths = (32, 32, 64, 64, 128, 128)
    blocks = (Residual(inputs, outputs) for inputs, outputs in pairwise(widths))
    stem = (*convolution(3, 32), nn.ReLU(inplace=True))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100))


def separable_network(width: int = 32) -> nn.Module:
    """Depthwise and pointwise convolutions of 3 x 48 x 48 images."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs),
            nn.Conv2d(inputs, outputs, 1),
            nn.BatchNorm2d(outputs),
            nn.GELU(),
        ]

    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        *block(width, width, 1),
        *block(width, 2 * width, 2),
        *block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, CLASSES),
    )


class MixerBlock(nn.Module):
    """Mixes first over the patches of an image, then over the channels of each patch."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.first = nn.LayerNorm(width)
        self.over_patches = nn.Sequential(
            nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches)
        )
        self.second = nn.LayerNorm(width)
        self.over_channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.first(x).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = x + self.over_channels(self.second(x))
        return mixed


class SmallMixer(nn.Module):
    """An MLP mixer of 3 x 32 x 32 images."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(*(MixerBlock(64, width) for _ in range(4)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.patches(x).flatten(2).transpose(1, 2)
        scores: Tensor = self.head(self.blocks(hidden).mean(1))
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


class Vit(nn.Module):
    """A transformer over the patches of an image."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(8)))
        self.head = nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        out: Tensor = self.head(self.blocks(tokens).mean(1))
        return out


class Depthwise(nn.Module):
    """A depthwise convolution with a large kernel, and two layers over the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.norm(self.spatial(x).permute(0, 2, 3, 1))
        out: Tensor = x + self.channels(mixed).permute(0, 3, 1, 2)
        return out


def convnext() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 48, 4, 4)]
    for inputs, outputs, depth in ((48, 48, 2), (48, 96, 2), (96, 192, 4)):
        if inputs != outputs:
            layers.append(nn.Conv2d(inputs, outputs, 2, 2))
        layers += [Depthwise(outputs) for _ in range(depth)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 100))


class Dense(nn.Module):
    """Layers of which each sees the outputs of all before it."""

    def __init__(self, inputs: int, growth: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(inputs + index * growth),
                nn.ReLU(),
                nn.Conv2d(inputs + index * growth, growth, 3, padding=1, bias=False),
            )
            for index in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def densenet() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, padding=1, bias=False)]
    channels = 24
    for depth in (6, 6):
        layers.append(Dense(channels, 12, depth))
        channels += 12 * depth
        layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
        channels //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100))


class Upsampling(nn.Module):
    """Makes an image of each feature vector, and classifies its pixels."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.into = nn.Linear(64, width * 8 * 8)
        self.width = width
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(width, width, 4, 2, 1),
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.ConvTranspose2d(width, width, 4, 2, 1),
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.Conv2d(width, CLASSES, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        images: Tensor = self.decoder(self.into(x).unflatten(1, (self.width, 8, 8)))
        return images.mean((2, 3))


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


class Denoiser(nn.Module):
    """A small U-Net of a diffusion model, with attention at its lowest resolution."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            self._convolutions(inputs, outputs)
            for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width))
        )
        self.middle = Block(4 * width, is_fused=True)
        self.up = nn.ModuleList(
            self._convolutions(inputs, outputs)
            for inputs, outputs in ((6 * width, 2 * width), (3 * width, width))
        )
        self.noise = nn.Conv2d(width, 3, 3, padding=1)

    @staticmethod
    def _convolutions(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else F.avg_pool2d(x, 2))
            kept.append(x)
        tokens = self.middle(x.flatten(2).transpose(1, 2))
        x = tokens.transpose(1, 2).unflatten(2, x.shape[2:])
        for block, skipped in zip(self.up, kept[-2::-1], strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skipped], 1))
        out: Tensor = self.noise(x)
        return out


def super_resolution() -> nn.Module:
    """Convolutions without normalization, and twice the resolution at the end."""
    layers: list[nn.Module] = [nn.Conv2d(3, 48, 3, padding=1)]
    for _ in range(6):
        layers += [nn.ReLU(inplace=True), nn.Conv2d(48, 48, 3, padding=1)]
    return nn.Sequential(*layers, nn.Conv2d(48, 12, 3, padding=1), nn.PixelShuffle(2))


class ConvolutionalGan(nn.Module):
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


class LinearGan(nn.Module):
    """A generator of images from 64 random numbers, and a discriminator that judges them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 3072), nn.Tanh()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(3072, 1024),
            nn.LeakyReLU(0.2),
            nn.Linear(1024, 512),
            nn.LeakyReLU(0.2),
            nn.Linear(512, 1),
        )


def small_video(width: int = 12) -> nn.Module:
    """Convolutions over the frames of a short video."""
    return nn.Sequential(
        nn.Conv3d(1, width, 3, padding=1),
        nn.BatchNorm3d(width),
        nn.ReLU(),
        nn.Conv3d(width, 2 * width, 3, stride=(1, 2, 2), padding=1),
        nn.BatchNorm3d(2 * width),
        nn.ReLU(),
        nn.Conv3d(2 * width, 2 * width, 3, padding=1),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(2 * width, CLASSES),
    )


def video() -> nn.Module:
    """Convolutions over eight frames."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 24), (24, 48), (48, 96)):
        layers += [
            nn.Conv3d(inputs, outputs, 3, (1, 2, 2), 1, bias=False),
            nn.BatchNorm3d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(96, 30))
