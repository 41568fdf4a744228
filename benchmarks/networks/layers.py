"""Layers that several networks have."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the resolution at a stride of 1, and its normalization."""
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class Residual(nn.Module):
    """A block of a ResNet, which halves the resolution where the channels differ."""

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


class Block(nn.Module):
    """A transformer block.

    Args:
        width: of a token; a head has 64.
        is_causal: whether a token sees only earlier ones.
        is_fused: whether attention is PyTorch's own function.
    """

    def __init__(self, width: int, *, is_causal: bool = False, is_fused: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.is_fused = is_fused
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        if self.is_fused:
            query, key, value = qkv
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        else:
            scores = qkv[0] @ qkv[1].transpose(-1, -2) / 8
            if self.is_causal:
                future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(future, float("-inf"))
            attended = scores.softmax(-1) @ qkv[2]
        attended = attended.transpose(1, 2).flatten(2)
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


def dense(width: int, layers: int) -> nn.Sequential:
    """Linear layers with a ReLU after each."""
    return nn.Sequential(
        *(module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU()))
    )
