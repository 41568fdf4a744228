"""Networks in the shapes of those whose memory others published, for ``published_steps``."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from benchmarks.networks.record import Network, Part, tokens

aten = torch.ops.aten


@dataclass(frozen=True)
class GptSettings:
    """GPT-2 small as ``LLMs-from-scratch`` has it, and the parts that its steps replace."""

    mask_buffer: bool = True
    torch_classes: bool = False
    sdpa: bool = False
    vocabulary: int = 50257
    tokens: int = 1024
    width: int = 768
    heads: int = 12
    layers: int = 12
    dropout: float = 0.1


class WrittenNorm(nn.Module):
    """A layer norm of elementary operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normal = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normal + self.shift


class WrittenGelu(nn.Module):
    """GELU by tanh, of elementary operations."""

    def forward(self, x: Tensor) -> Tensor:
        root = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(root * (x + 0.044715 * torch.pow(x, 3))))


class WrittenAttention(nn.Module):
    """Causal attention of products and a softmax."""

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        width = settings.width
        self.heads = settings.heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.projection = nn.Linear(width, width)
        self.dropout = nn.Dropout(settings.dropout)
        self.mask: Tensor | None
        mask = None
        if settings.mask_buffer:
            mask = torch.triu(torch.ones(settings.tokens, settings.tokens), diagonal=1)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        shape = (samples, tokens, self.heads, width // self.heads)
        keys = self.key(x).view(shape).transpose(1, 2)
        queries = self.query(x).view(shape).transpose(1, 2)
        values = self.value(x).view(shape).transpose(1, 2)
        scores = queries @ keys.transpose(2, 3)
        mask = self.mask
        if mask is None:
            mask = torch.triu(torch.ones(tokens, tokens, device=x.device), diagonal=1)
        scores.masked_fill_(mask.bool()[:tokens, :tokens], -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        found = (weights @ values).transpose(1, 2).reshape(samples, tokens, width)
        projected: Tensor = self.projection(found)
        return projected


class SdpaAttention(nn.Module):
    """Causal attention of one function of torch."""

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        self.heads = settings.heads
        self.dropout = settings.dropout
        self.all = nn.Linear(settings.width, 3 * settings.width, bias=False)
        self.projection = nn.Linear(settings.width, settings.width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        parts = self.all(x).view(samples, tokens, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        found = functional.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, is_causal=True
        )
        found = found.transpose(1, 2).contiguous().view(samples, tokens, width)
        projected: Tensor = self.projection(found)
        return projected


class GptLayer(nn.Module):
    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        width = settings.width
        norm = nn.LayerNorm if settings.torch_classes else WrittenNorm
        gelu = nn.GELU(approximate="tanh") if settings.torch_classes else WrittenGelu()
        self.attention = (SdpaAttention if settings.sdpa else WrittenAttention)(settings)
        self.forward_layers = nn.Sequential(
            nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width)
        )
        self.norm1 = norm(width)
        self.norm2 = norm(width)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.attention(self.norm1(x))) + x
        result: Tensor = self.dropout(self.forward_layers(self.norm2(x))) + x
        return result


class Gpt(nn.Module):
    """GPT-2 small, whose head does not share the weights of the embedding."""

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        self.token = nn.Embedding(settings.vocabulary, settings.width)
        self.place = nn.Embedding(settings.tokens, settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        self.layers = nn.Sequential(*[GptLayer(settings) for _ in range(settings.layers)])
        norm = nn.LayerNorm if settings.torch_classes else WrittenNorm
        self.norm = norm(settings.width)
        self.head = nn.Linear(settings.width, settings.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.token(ids) + self.place(places))
        logits: Tensor = self.head(self.norm(self.layers(x)))
        return logits


def _bert() -> nn.Module:
    import transformers

    network: nn.Module = transformers.AutoModelForMaskedLM.from_config(transformers.BertConfig())
    return network


def _t5() -> nn.Module:
    """t5-small: the defaults of its configuration."""
    import transformers

    config = transformers.T5Config(decoder_start_token_id=0)
    network: nn.Module = transformers.AutoModelForSeq2SeqLM.from_config(config)
    return network


def _reformer() -> nn.Module:
    import transformers

    config = transformers.ReformerConfig(num_buckets=128)
    network: nn.Module = transformers.AutoModelForMaskedLM.from_config(config)
    return network


def _whisper() -> nn.Module:
    """whisper-tiny."""
    import transformers

    config = transformers.WhisperConfig(
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
    )
    network: nn.Module = transformers.AutoModelForAudioClassification.from_config(config)
    return network


MILABENCH_TEXT = {
    "Bert": Network(_bert, tokens(30522, 512)),
    "T5": Network(_t5, tokens(32128, 1024)),
    "Reformer": Network(_reformer, tokens(320, 4096)),
    "Whisper": Network(_whisper, (Part((80, 3000)), Part((), 2))),
}
"""Networks of milabench that come from transformers."""


@dataclass(frozen=True)
class LlamaShape:
    """The shape of a Llama of torchtitan."""

    width: int
    layers: int
    heads: int
    key_heads: int
    forward_width: int
    vocabulary: int
    tokens: int

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.width // self.heads


LLAMA_SHAPES = {
    "8B": LlamaShape(4096, 32, 32, 8, 14336, 128256, 8192),
    "13B": LlamaShape(5120, 40, 40, 40, 13824, 32000, 4096),
    "70B": LlamaShape(8192, 80, 64, 8, 28672, 32000, 4096),
}

# What torchtitan keeps when it checkpoints by operator; of the products it keeps every second one.
_KEPT = {
    aten.mm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def selective_contexts() -> Any:
    products: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_product = operator == aten.mm.default
        products[context.is_recompute] += is_product
        is_left_out = is_product and products[context.is_recompute] % 2 == 0
        if operator in _KEPT and not is_left_out:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def _linear(width: int, other_width: int) -> nn.Linear:
    return nn.Linear(width, other_width, bias=False)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None]).flatten(3)


class LlamaLayer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        key_width = shape.key_heads * shape.head_width
        self.norm1 = nn.RMSNorm(width, 1e-5)
        self.norm2 = nn.RMSNorm(width, 1e-5)
        self.query = _linear(width, width)
        self.key = _linear(width, key_width)
        self.value = _linear(width, key_width)
        self.projection = _linear(width, width)
        self.gate = _linear(width, shape.forward_width)
        self.down = _linear(shape.forward_width, width)
        self.up = _linear(width, shape.forward_width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.projection(self._attended(self.norm1(x), angles))
        hidden = self.norm2(x)
        fed: Tensor = self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return x + fed

    def _attended(self, x: Tensor, angles: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        layers = (self.query, self.key, self.value)
        query, key, value = (
            layer(x).view(samples, tokens, -1, self.shape.head_width) for layer in layers
        )
        query = _rotated(query, angles).type_as(value)
        key = _rotated(key, angles).type_as(value)
        attended = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            self._repeated(key).transpose(1, 2),
            self._repeated(value).transpose(1, 2),
            is_causal=True,
        )
        return attended.transpose(1, 2).reshape(samples, tokens, self.shape.width)

    def _repeated(self, x: Tensor) -> Tensor:
        samples, tokens, key_heads, head_width = x.shape
        times = self.shape.heads // key_heads
        expanded = x[:, :, :, None].expand(samples, tokens, key_heads, times, head_width)
        return expanded.reshape(samples, tokens, self.shape.heads, head_width)


class Llama(nn.Module):
    """A Llama of torchtitan.

    Args:
        shape: its shape.
        checkpointing: ``"none"``, ``"selective"`` (by operator) or ``"full"``.
    """

    def __init__(self, shape: LlamaShape, checkpointing: str) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, 1e-5)
        self.head = _linear(shape.width, shape.vocabulary)

    def forward(self, ids: Tensor, angles: Tensor) -> Tensor:
        x = self.token(ids)
        for layer in self.layers:
            if self.checkpointing == "none":
                x = layer(x, angles)
            elif self.checkpointing == "full":
                x = checkpoint(layer, x, angles, use_reentrant=False)
            else:
                x = checkpoint(layer, x, angles, use_reentrant=False, context_fn=selective_contexts)
        logits: Tensor = self.head(self.norm(x))
        return logits


def sharded(network: Llama, ranks: int) -> None:
    """Shard each layer and the rest, as torchtitan does, with bfloat16 for the products."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cuda", (ranks,))
    last = len(network.layers) - 1
    for number, layer in enumerate(network.layers):
        fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=number < last)
    fully_shard(network, mesh=mesh, mp_policy=mixed, reshard_after_forward=True)
