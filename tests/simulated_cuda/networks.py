"""The networks whose memory is simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Network(NamedTuple):
    """A module, its optimizer and its batches, all on the meta device."""

    name: str
    module: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    criterion: Callable[[Tensor, Tensor], Tensor]
    workspaces: bool = False


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        shortcut = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.shortcut = nn.Sequential(*shortcut if stride > 1 else ())

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.body(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = (BasicBlock(a, b, 1 if a == b else 2) for a, b in pairwise(widths))
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512, 1024)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(self._double(a, b) for a, b in [(3, widths[0]), *pairs])
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(self._double(b, a) for a, b in reversed(pairs))
        self.head = nn.Conv2d(widths[0], 1, 1)

    @staticmethod
    def _double(a: int, b: int) -> nn.Module:
        layers = [(nn.Conv2d(i, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)) for i in (a, b)]
        return nn.Sequential(*layers[0], *layers[1])

    def forward(self, x: Tensor) -> Tensor:
        skipped = [self.down[0](x)]
        for down in self.down[1:]:
            skipped.append(down(F.max_pool2d(skipped[-1], 2)))
        x = skipped.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skipped.pop(), up(x)], 1))
        return self.head(x)


class Linear(nn.Linear):
    """A linear layer in the given precision, cast as under autocast."""

    def __init__(self, inputs: int, outputs: int, precision: torch.dtype) -> None:
        super().__init__(inputs, outputs)
        self.precision = precision

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.precision), self.weight.to(self.precision), self.bias.to(self.precision))


class Dropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, 0.1, True)[0] if self.training else x  # the kernel of CUDA


class TransformerBlock(nn.Module):
    def __init__(self, width: int, precision: torch.dtype) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.project = Linear(width, 3 * width, precision), Linear(width, width, precision)
        hidden = Linear(width, 4 * width, precision), nn.GELU(), Linear(4 * width, width, precision)
        self.mlp = nn.Sequential(*hidden, Dropout())
        self.dropout = Dropout()

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(samples, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        scores = qkv[0] @ qkv[1].transpose(-1, -2) / 8
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = self.dropout(scores.masked_fill(future, float("-inf")).float().softmax(-1))
        mixed = (weights.to(qkv.dtype) @ qkv[2]).transpose(1, 2).reshape(samples, length, width)
        x = x + self.dropout(self.project(mixed))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, precision: torch.dtype, layers: int = 12, width: int = 768, vocabulary: int = 50257) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.empty(512, width))
        self.blocks = nn.Sequential(Dropout(), *(TransformerBlock(width, precision) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), Linear(width, vocabulary, precision))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(x) + self.places)).flatten(0, 1)


def mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(4096, 4096), nn.ReLU())))


def _batch(shape: tuple[int, ...], target: tuple[int, ...], kinds: Any, size: int) -> tuple[Tensor, Tensor]:
    kwargs: Any = {"device": "meta"}
    return torch.empty(size, *shape, dtype=kinds[0], **kwargs), torch.empty(size, *target, dtype=kinds[1], **kwargs)


_FLOATS, _CLASSES, _TOKENS = (torch.float32,) * 2, (torch.float32, torch.int64), (torch.int64,) * 2
_IMAGES = partial(_batch, (3, 224, 224), (), _CLASSES)
_TEXTS = partial(_batch, (512,), (512,), _TOKENS)
_SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)  # foreach: the default of CUDA
_ADAM, _ADAMW = partial(torch.optim.Adam, foreach=True), partial(torch.optim.AdamW, foreach=True)


def _text_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target.flatten())


NETWORKS = (
    Network("ResNet-18 SGD", resnet18, _SGD, _IMAGES, F.cross_entropy),
    Network("ResNet-18 SGD workspaces", resnet18, _SGD, _IMAGES, F.cross_entropy, workspaces=True),
    Network("U-Net 256 AdamW", UNet, _ADAMW, partial(_batch, (3, 256, 256), (1, 256, 256), _FLOATS),
            F.binary_cross_entropy_with_logits),
    Network("GPT 12x768 AdamW", partial(GPT, torch.float32), _ADAMW, _TEXTS, _text_loss),
    Network("GPT 12x768 AdamW bf16", partial(GPT, torch.bfloat16), _ADAMW, _TEXTS, _text_loss),
    Network("MLP 8x4096 Adam", mlp, _ADAM, partial(_batch, (4096,), (4096,), _FLOATS), F.mse_loss),
)  # fmt: skip
