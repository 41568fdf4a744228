"""A network with its data, and what samples are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from benchmarks.caps import DEVICE_SHARE

MIB = 2**20
CLASSES = 10
TOKENS = 512
"""The vocabulary of the small language models."""

Sample = tuple[Tensor, ...]


class Part(NamedTuple):
    """One tensor of a sample: numbers, or integers below ``high``."""

    shape: tuple[int, ...]
    high: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.high is None else torch.int64

    def random(self, generator: torch.Generator) -> Tensor:
        if self.high is None:
            return torch.randn(self.shape, generator=generator)
        return torch.randint(self.high, self.shape, generator=generator)


Parts = tuple[Part, ...]
"""A sample, the target last."""


def classified(*shape: int, classes: int = CLASSES, high: int | None = None) -> Parts:
    """Numbers of this shape (or integers below ``high``), and a class."""
    return Part(shape, high), Part((), classes)


def tokens(vocabulary: int, length: int) -> Parts:
    """A text of this length, and a target for each token."""
    return (Part((length,), vocabulary),) * 2


def padded(samples: Sequence[Sample]) -> Sample:
    """A batch of texts of different lengths."""
    inputs, targets = zip(*samples, strict=True)
    # Cross entropy leaves out targets of -100, which is the default of its ``ignore_index``.
    return pad_sequence(list(inputs), True), pad_sequence(list(targets), True, -100)


@dataclass(frozen=True)
class Network:
    """A network with its data, and the memory in which it is searched.

    Args:
        module: makes the network; called with the bytes of the device if it ``fills_device``.
        parts: a sample; of samples that differ, a function that draws the parts of one.
        optimizer: called with parameters.
        loss: called with the output and the target.
        room_mib: what a training may use on the host, beyond the use at the start of ``fit``.
        gibibytes: sizes of the devices on which it is searched.
        fills_device: whether its size depends on the device.
        is_adversarial: whether it has a ``generator`` and a ``discriminator`` with an optimizer
            each.
        collate: makes a batch of samples.
    """

    module: Callable[..., nn.Module]
    parts: Parts | Callable[[torch.Generator], Parts]
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    room_mib: int = 0
    gibibytes: tuple[float, ...] = ()
    fills_device: bool = False
    is_adversarial: bool = False
    collate: Callable[[list[Sample]], Any] = default_collate

    @property
    def room_bytes(self) -> int:
        """Bytes beyond the use at the start of ``fit``; on CUDA bytes in total."""
        if torch.cuda.is_available():
            return int(DEVICE_SHARE * torch.cuda.get_device_properties(0).total_memory)
        return self.room_mib * MIB

    @property
    def optimizers(self) -> int:
        """The optimizers that step in a training step."""
        return 2 if self.is_adversarial else 1

    def sample(self, generator: torch.Generator) -> Sample:
        """A random sample."""
        parts = self.parts(generator) if callable(self.parts) else self.parts
        return tuple(part.random(generator) for part in parts)

    def batch(
        self, size: int, device: torch.device, make: Callable[..., Tensor] = torch.zeros
    ) -> list[Tensor]:
        """A batch that is made on the device; its samples must not differ."""
        assert not callable(self.parts)
        return [make(size, *part.shape, dtype=part.dtype, device=device) for part in self.parts]
