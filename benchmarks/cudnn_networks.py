"""Networks of convolutions and attention, for searches with cuDNN (``cuda_search --gpu``).

They were written after the rules of version 0.5 were final, and no rule was changed after the first
search with them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.cuda_networks import SGD, Network

_LABEL = ((), torch.int64)
_SIZES = (1.5, 4.0)


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


class Attention(nn.Module):
    """A layer of attention by PyTorch's own function, and a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.project(attended)
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Speech(nn.Module):
    """Strided convolutions over a signal, and attention over what they return."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 64, 10, 5), nn.GELU(), nn.Conv1d(64, 128, 8, 4), nn.GELU(),
            nn.Conv1d(128, width, 4, 2), nn.GELU(),
        )  # fmt: skip
        self.position = nn.Conv1d(width, width, 31, padding=15, groups=16)
        self.blocks = nn.Sequential(*(Attention(width) for _ in range(6)))
        self.head = nn.Linear(width, 30)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        tokens = (features + self.position(features)).transpose(1, 2)
        scores: Tensor = self.head(self.blocks(tokens).mean(1))
        return scores


class Denoiser(nn.Module):
    """A small U-Net of a diffusion model, with attention at its lowest resolution."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            self._convolutions(inputs, outputs)
            for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width))
        )
        self.middle = Attention(4 * width)
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


HELD_OUT = {
    "convnext": Network(
        lambda _: convnext(),
        torch.optim.AdamW,
        (((3, 128, 128), torch.float32), _LABEL),
        F.cross_entropy,
        _SIZES,
    ),
    "densenet": Network(
        lambda _: densenet(), SGD, (((3, 32, 32), torch.float32), _LABEL), F.cross_entropy, _SIZES
    ),
    "video": Network(
        lambda _: video(), SGD, (((3, 8, 56, 56), torch.float32), _LABEL), F.cross_entropy, _SIZES
    ),
    "speech": Network(
        lambda _: Speech(),
        torch.optim.AdamW,
        (((1, 8000), torch.float32), _LABEL),
        F.cross_entropy,
        _SIZES,
    ),
    "denoiser": Network(
        lambda _: Denoiser(),
        torch.optim.AdamW,
        (((3, 48, 48), torch.float32), ((3, 48, 48), torch.float32)),
        F.mse_loss,
        _SIZES,
    ),
    "super resolution": Network(
        lambda _: super_resolution(),
        torch.optim.Adam,
        (((3, 64, 64), torch.float32), ((3, 128, 128), torch.float32)),
        F.l1_loss,
        _SIZES,
    ),
}
