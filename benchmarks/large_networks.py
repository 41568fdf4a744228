"""Networks of usual sizes, for a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Network(NamedTuple):
    """A module, its optimizer, and the shapes and types of a sample and its target."""

    name: str
    module: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    samples: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    criterion: Callable[[Tensor, Tensor], Tensor]

    def batch(self, size: int, device: torch.device) -> list[Tensor]:
        return [
            torch.zeros(size, *shape, dtype=dtype, device=device) for shape, dtype in self.samples
        ]


def convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        body = (
            *convolution(inputs, outputs, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(outputs, outputs),
        )
        self.body = nn.Sequential(*body)
        self.shortcut = nn.Sequential(
            *convolution(inputs, outputs, 1, stride) if stride > 1 else ()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.body(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    blocks = (Residual(a, b) for a, b in pairwise((64, 64, 64, 128, 128, 256, 256, 512, 512)))
    stem = (*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)
    )


def double(a: int, b: int) -> nn.Module:
    return nn.Sequential(
        *(layer for i in (a, b) for layer in (*convolution(i, b), nn.ReLU(inplace=True)))
    )


class UNet(nn.Module):
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


def unet() -> nn.Module:
    return nn.Sequential(UNet(3, 64, 128, 256, 512, 1024), nn.Conv2d(64, 1, 1))


class Linear(nn.Linear):
    """A linear layer in bfloat16, cast as under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())


class TransformerBlock(nn.Module):
    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.qkv = Linear(width, 3 * width)
        self.project = Linear(width, width)
        hidden = Linear(width, 4 * width), nn.GELU(), Linear(4 * width, width)
        self.mlp = nn.Sequential(*hidden, nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        scores = qkv[0] @ qkv[1].transpose(-1, -2) / 8
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        weights = self.dropout(scores.masked_fill(future, float("-inf")).float().softmax(-1))
        x = x + self.dropout(
            self.project((weights.to(qkv.dtype) @ qkv[2]).transpose(1, 2).flatten(2))
        )
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


def gpt() -> nn.Module:
    embedding = nn.Embedding(50257, 768)
    blocks = (TransformerBlock() for _ in range(12))
    return nn.Sequential(
        embedding,
        nn.Dropout(0.1),
        *blocks,
        nn.LayerNorm(768),
        Linear(768, 50257),
        nn.Flatten(0, 1),
    )


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        *(layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU()))
    )


def text_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target.flatten())


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
_IMAGES = ((3, 224, 224), torch.float32), ((), torch.int64)
_MASKS = ((3, 256, 256), torch.float32), ((1, 256, 256), torch.float32)
_TEXTS = (((512,), torch.int64),) * 2
NETWORKS = (
    Network("ResNet-18 SGD", resnet18, SGD, _IMAGES, F.cross_entropy),
    Network("U-Net 256 AdamW", unet, torch.optim.AdamW, _MASKS, F.binary_cross_entropy_with_logits),
    Network("GPT 12x768 AdamW bf16", gpt, torch.optim.AdamW, _TEXTS, text_loss),
    *(
        Network(
            f"MLP 8x{width} Adam",
            partial(mlp, width),
            torch.optim.Adam,
            (((width,), torch.float32),) * 2,
            F.mse_loss,
        )
        for width in (1024, 4096)
    ),
)
