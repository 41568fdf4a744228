"""Networks of texts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.networks.layers import Block
from benchmarks.networks.record import CLASSES, TOKENS
from benchmarks.networks.sequences import LSTM


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


class TokenGRU(nn.Module):
    """A GRU that predicts a token at each position."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.gru(self.embedding(x))[0])
        return scores.transpose(1, 2)


class BidirectionalGRU(nn.Module):
    """A GRU in both directions; attention weights its outputs."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.attention = nn.Linear(2 * width, 1)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.gru(self.embedding(x))[0]
        weights = self.attention(torch.tanh(hidden)).softmax(1)
        scores: Tensor = self.head((weights * hidden).sum(1))
        return scores


class Gpt(nn.Module):
    """A GPT with 16,384 tokens; ``wrap`` is called with each of its six blocks."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], width: int = 384) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16_384, width)
        self.blocks = nn.Sequential(*(wrap(Block(width, is_causal=True)) for _ in range(6)))
        self.head = nn.Linear(width, 16_384, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embedding(x)))
        return logits.flatten(0, 1)


def lstm() -> nn.Module:
    """An LSTM that classifies a text."""
    return nn.Sequential(nn.Embedding(10_000, 512), LSTM(512, 512, classes=10))


class Bfloat16Linear(nn.Linear):
    """A linear layer in bfloat16, cast as under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())


class MixedBlock(nn.Module):
    """A causal transformer block of GPT-2 under bfloat16, whose softmax is in float32."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.qkv = Bfloat16Linear(width, 3 * width)
        self.project = Bfloat16Linear(width, width)
        hidden = Bfloat16Linear(width, 4 * width), nn.GELU(), Bfloat16Linear(4 * width, width)
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


def gpt2(layers: int, dropout: float | None = None) -> nn.Module:
    """A GPT of width 768; ``dropout`` is that of the embedding."""
    dropouts = [] if dropout is None else [nn.Dropout(dropout)]
    return nn.Sequential(
        nn.Embedding(50257, 768),
        *dropouts,
        *(MixedBlock() for _ in range(layers)),
        nn.LayerNorm(768),
        Bfloat16Linear(768, 50257),
        nn.Flatten(0, 1),
    )


def text_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The loss of flattened logits, in float32."""
    return F.cross_entropy(logits.float(), target.flatten())
