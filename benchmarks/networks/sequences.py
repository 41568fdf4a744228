"""Networks of signals and of other sequences of features."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.networks.layers import Block
from benchmarks.networks.record import CLASSES


class LSTM(nn.Module):
    """A two-layer LSTM, of which the last output counts."""

    def __init__(self, width: int, features: int, classes: int = CLASSES) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, 2, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(x)[0][:, -1])
        return scores


class BidirectionalLSTM(nn.Module):
    """An LSTM in both directions, whose outputs are averaged over time."""

    def __init__(self, features: int = 40, width: int = 128) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(x)[0].mean(1))
        return scores


class GatedTime(nn.Module):
    """Gated convolutions over time, with growing dilation."""

    def __init__(self, features: int = 24, width: int = 48) -> None:
        super().__init__()
        self.enter = nn.Conv1d(features, width, 1)
        self.layers = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 3, padding=2**index, dilation=2**index)
            for index in range(5)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        for layer in self.layers:
            hidden = hidden + F.glu(layer(hidden), 1)
        scores: Tensor = self.head(hidden.mean(2))
        return scores


class FourierMixing(nn.Module):
    """Mixes over the time and the channels of a sequence by a Fourier transform."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.into = nn.Linear(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(5)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x)
        for block in self.blocks:
            mixed = torch.fft.fft2(hidden, norm="ortho").real
            hidden = hidden + block(F.layer_norm(mixed, mixed.shape[-1:]))
        scores: Tensor = self.head(hidden.mean(1))
        return scores


class WaveNet(nn.Module):
    """Gated dilated convolutions over a signal, whose skip connections are summed at the end."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 3, padding=2**power, dilation=2**power)
            for power in range(10)
        )
        self.head = nn.Linear(width, 20)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        skipped = torch.zeros_like(hidden)
        for gate in self.gates:
            value, open_share = gate(hidden).chunk(2, 1)
            out = torch.tanh(value) * torch.sigmoid(open_share)
            skipped = skipped + out
            hidden = hidden + out
        scores: Tensor = self.head(skipped.relu().mean(2))
        return scores


class Speech(nn.Module):
    """Strided convolutions over a signal, and attention over what they return."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 64, 10, 5), nn.GELU(), nn.Conv1d(64, 128, 8, 4), nn.GELU(),
            nn.Conv1d(128, width, 4, 2), nn.GELU(),
        )  # fmt: skip
        self.position = nn.Conv1d(width, width, 31, padding=15, groups=16)
        self.blocks = nn.Sequential(*(Block(width, is_fused=True) for _ in range(6)))
        self.head = nn.Linear(width, 30)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        tokens = (features + self.position(features)).transpose(1, 2)
        scores: Tensor = self.head(self.blocks(tokens).mean(1))
        return scores
