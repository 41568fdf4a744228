"""A Llama with LoRA adapters, in the operations of transformers 4.37 and peft 0.9.

``published_devices_steps`` trains it. The functions have the order and the dtypes of those of the
two packages, since they decide what a layer keeps for the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.networks.published import LlamaShape

RANK = 64
DROPOUT = 0.1
SCALE = 16 / RANK


class AdaptedLinear(nn.Module):
    """A layer whose weight does not train, beside two small ones that do."""

    def __init__(self, width: int, other_width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, other_width, bias=False)
        self.base.weight.requires_grad = False
        self.dropout = nn.Dropout(DROPOUT)
        self.down = nn.Linear(width, RANK, bias=False)
        self.up = nn.Linear(RANK, other_width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x)
        added: Tensor = self.up(self.down(self.dropout(x))) * SCALE
        return result + added


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(variance + 1e-5)
        return self.weight * wide.to(x.dtype)


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary position embedding."""
    half = x.shape[-1] // 2
    other = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cosines + other * sines


class AdaptedLayer(nn.Module):
    """A layer of the Llama, of which six products have adapters."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        self.norm1 = Norm(width)
        self.norm2 = Norm(width)
        self.query = AdaptedLinear(width, width)
        self.key = AdaptedLinear(width, width)
        self.value = AdaptedLinear(width, width)
        self.projection = nn.Linear(width, width, bias=False)
        self.projection.weight.requires_grad = False
        self.gate = AdaptedLinear(width, shape.forward_width)
        self.up = AdaptedLinear(width, shape.forward_width)
        self.down = AdaptedLinear(shape.forward_width, width)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x = x + self._attended(self.norm1(x), cosines, sines)
        hidden = self.norm2(x)
        fed: Tensor = self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return x + fed

    def _attended(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        query, key, value = (
            layer(x).view(samples, tokens, self.shape.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(
            turned(query, cosines, sines), turned(key, cosines, sines), value, is_causal=True
        )
        attended = attended.transpose(1, 2).contiguous().reshape(samples, tokens, width)
        projected: Tensor = self.projection(attended)
        return projected


class AdaptedLlama(nn.Module):
    """A Llama whose adapters train; it returns the loss and the logits."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.token.weight.requires_grad = False
        self.layers = nn.ModuleList(AdaptedLayer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight.requires_grad = False

    def forward(self, ids: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        # The layers are computed again in the backward pass, which needs an input with a gradient.
        x = self.token(ids).requires_grad_()
        for layer in self.layers:
            x = layer(x, cosines, sines)
        logits = self.head(self.norm(x)).float()
        predicted = logits[..., :-1, :].contiguous()
        targets = ids[..., 1:].contiguous()
        loss = functional.cross_entropy(predicted.flatten(0, 1), targets.flatten())
        return loss, logits
