"""Networks of vectors, tables, sets and graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.networks.layers import dense
from benchmarks.networks.record import CLASSES


def wide_mlp(width: int = 1024, layers: int = 12) -> nn.Module:
    """Large weights and small activations."""
    return dense(width, layers).append(nn.Linear(width, CLASSES))


class LargeEmbedding(nn.Module):
    """Parameters, gradients and Adam's state take 225 MiB, and a checkpoint's copy 170 more."""

    def __init__(self, rows: int = 115_000, width: int = 128) -> None:
        super().__init__()
        self.rows = nn.Embedding(rows, width)
        self.layers = nn.Sequential(
            nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
        )
        self.head = nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.rows(x)).mean(1))
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


class SetAttention(nn.Module):
    """Attention over the points of a set, whose weights are all kept for the backward pass."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.into = nn.Linear(3, width)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(width, heads, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x)
        for attention in self.attention:
            attended, _ = attention(hidden, hidden, hidden, need_weights=True)
            hidden = hidden + F.relu(attended)
        scores: Tensor = self.head(hidden.amax(1))
        return scores


class GraphNetwork(nn.Module):
    """Adds the messages along the edges of a fixed graph."""

    edges: Tensor

    def __init__(self, nodes: int = 200, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        edges = torch.randint(nodes, (2, 4 * nodes), generator=generator)
        self.register_buffer("edges", edges)
        self.into = nn.Linear(8, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x)
        sources, targets = self.edges
        for layer in self.messages:
            pairs = torch.cat((hidden[:, sources], hidden[:, targets]), dim=-1)
            hidden = hidden.index_add(1, targets, F.elu(layer(pairs)))
        scores: Tensor = self.head(hidden.mean(1))
        return scores
