"""Networks that no rule of the search was changed with, for the simulated CUDA device.

Their kinds are those of ``held_out_networks``, and their architectures and sizes are published
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.held_out_networks import Adversarial, tower
from benchmarks.large_networks import ADAM, ADAMW, SGD, Network, convolution, double

_CRITEO_ROWS = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194),
    *(27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
"""Values of each categorical feature of the Criteo data set of advertisements."""


class DLRM(nn.Module):
    """Clicks on advertisements: an embedding table for each categorical feature.

    The tables have the proportions of the Criteo data set. Parameters and Adam's state take 50 % of
    the device, and 83 % with gradients and the temporary memory of an optimizer step.

    Source: Naumov et al., 2019, https://arxiv.org/abs/1906.00091, with the sizes in
    https://github.com/facebookresearch/dlrm/blob/main/bench/dlrm_s_criteo_kaggle.sh.
    """

    def __init__(self, gigabytes: int, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(max(2, rows * gigabytes // 13), width) for rows in _CRITEO_ROWS
        )
        num_vectors = 1 + len(self.tables)
        num_products = num_vectors * (num_vectors - 1) // 2
        self.bottom = tower(13, 512, 256, 64, width)
        self.top = nn.Sequential(tower(width + num_products, 512, 256), nn.Linear(256, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        columns = categories.unbind(1)
        rows = [table(column) for table, column in zip(self.tables, columns, strict=True)]
        vectors = torch.stack([dense, *rows], 1)
        products = vectors @ vectors.transpose(1, 2)
        count = vectors.shape[1]
        i, j = torch.tril_indices(count, count, -1, device=dense.device)
        out: Tensor = self.top(torch.cat([dense, products[:, i, j]], 1))
        return out.squeeze(1)


def normalized(inputs: int, outputs: int, kernel: int) -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
    )


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.squeeze = normalized(inputs, 4 * growth, 1)
        self.convolve = normalized(4 * growth, growth, 3)

    def forward(self, *features: Tensor) -> Tensor:
        squeezed = checkpoint(self.squeeze_all, *features, use_reentrant=False)
        out: Tensor = self.convolve(squeezed)
        return out

    def squeeze_all(self, *features: Tensor) -> Tensor:
        out: Tensor = self.squeeze(torch.cat(features, 1))
        return out


class DenseBlock(nn.Module):
    def __init__(self, inputs: int, layers: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DenseLayer(inputs + number * growth, growth) for number in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(*features))
        return torch.cat(features, 1)


def densenet(growth: int = 32) -> nn.Module:
    """DenseNet-121 that computes joined features again in the backward pass.

    Sources: Huang et al., 2017, table 1, https://arxiv.org/abs/1608.06993, and Pleiss et al., 2017,
    https://arxiv.org/abs/1707.06990.
    """
    width = 64
    layers = [*convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    for depth in (6, 12, 24, 16):
        # A transition halves the channels and the image, except after the last block.
        if width > 64:
            layers += [normalized(width, width // 2, 1), nn.AvgPool2d(2)]
            width //= 2
        layers.append(DenseBlock(width, depth, growth))
        width += depth * growth
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)
    return nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU(inplace=True), *head)


class Cyclic(Adversarial):
    """Two generators that invert each other, with one optimizer, and two discriminators."""

    def loss(self, module: nn.Module, batch: list[Tensor], number: int = 0) -> Tensor:
        generators, discriminators = module.children()
        to_zebra, to_horse = generators.children()
        horses, zebras = batch
        discriminators.requires_grad_(number == 1)
        fakes = [to_zebra(horses), to_horse(zebras)]
        if number == 0:
            cycles = F.l1_loss(to_horse(fakes[0]), horses) + F.l1_loss(to_zebra(fakes[1]), zebras)
            return 10 * cycles + self.judge(discriminators, fakes, torch.ones_like)
        # After this line, the activations of the generators are released.
        fakes = [fake.detach() for fake in fakes]
        real_loss = self.judge(discriminators, [zebras, horses], torch.ones_like)
        return real_loss + self.judge(discriminators, fakes, torch.zeros_like)

    def judge(
        self, discriminators: nn.Module, images: list[Tensor], target: Callable[[Tensor], Tensor]
    ) -> Tensor:
        pairs = zip(discriminators.children(), images, strict=True)
        judged = [discriminator(image) for discriminator, image in pairs]
        return torch.stack([self.criterion(each, target(each)) for each in judged]).sum()


def same_size(inputs: int, outputs: int, kernel: int) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, padding_mode="reflect"),
        nn.InstanceNorm2d(outputs),
    ]


class Added(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


def cyclegan(width: int = 64) -> nn.Module:
    """CycleGAN of images of 256 x 256 pixels.

    Source: Zhu et al., 2017, section 7.2, https://arxiv.org/abs/1703.10593.
    """

    def generator() -> nn.Module:
        layers = [*same_size(3, width, 7), nn.ReLU(inplace=True)]
        for a, b in pairwise((width, 2 * width, 4 * width)):
            layers += [nn.Conv2d(a, b, 3, 2, 1), nn.InstanceNorm2d(b), nn.ReLU(inplace=True)]
        for _ in range(9):
            first, second = (same_size(4 * width, 4 * width, 3) for _ in range(2))
            layers.append(Added(*first, nn.ReLU(inplace=True), *second))
        for a, b in pairwise((4 * width, 2 * width, width)):
            grown = nn.ConvTranspose2d(a, b, 3, 2, 1, 1)
            layers += [grown, nn.InstanceNorm2d(b), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, *same_size(width, 3, 7)[:1], nn.Tanh())

    def discriminator() -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
        for a, stride in ((width, 2), (2 * width, 2), (4 * width, 1)):
            shrunk = nn.Conv2d(a, 2 * a, 4, stride, 1)
            layers += [shrunk, nn.InstanceNorm2d(2 * a), nn.LeakyReLU(0.2, inplace=True)]
        return nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, 1, 1))

    pairs = (nn.ModuleList(make() for _ in range(2)) for make in (generator, discriminator))
    return nn.Sequential(*pairs)


class ChannelwiseGRU(nn.Module):
    """Risk of a patient: a recurrent cell for each vital sign, and one for their joined states.

    Source: Harutyunyan et al., 2019, https://arxiv.org/abs/1703.07771, with GRU cells.
    """

    def __init__(self, channels: int = 17, width: int = 16, joint_width: int = 64) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(2, width) for _ in range(channels))
        self.joint_cell = nn.GRUCell(channels * width, joint_width)
        self.output = nn.Linear(joint_width, 1)

    def forward(self, x: Tensor) -> Tensor:
        # A cell creates its first state itself.
        states: list[Any] = [None] * len(self.cells)
        joint = None
        for values in x.unbind(1):
            inputs = zip(self.cells, values.unbind(1), states, strict=True)
            states = [cell(value, state) for cell, value, state in inputs]
            joint = self.joint_cell(torch.cat(states, 1), joint)
        out: Tensor = self.output(joint)
        return out.squeeze(1)


class Siamese(nn.Module):
    """Changes between two images of a place: one encoder for both, and one decoder.

    Source: Daudt et al., FC-Siam-diff, 2018, https://arxiv.org/abs/1810.08462.
    """

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128)) -> None:
        super().__init__()
        self.down = nn.ModuleList(double(a, b) for a, b in pairwise((3, *widths)))
        wide_first = widths[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(width, width, 2, 2) for width in wide_first)
        self.join = nn.ModuleList(
            double(2 * a, b) for a, b in pairwise((*wide_first, wide_first[-1]))
        )
        self.output = nn.Conv2d(widths[0], 1, 1)

    def forward(self, before: Tensor, after: Tensor) -> Tensor:
        differences = list[Tensor]()
        for level in self.down:
            before, after = level(before), level(after)
            differences.append((before - after).abs())
            before, after = F.max_pool2d(before, 2), F.max_pool2d(after, 2)
        x = after
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), differences.pop()], 1))
        out: Tensor = self.output(x)
        return out


class ChannelNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        hidden = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), *hidden)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale * self.mlp(self.depthwise(x).permute(0, 2, 3, 1))
        if self.training:
            # Stochastic depth skips the block for a tenth of the samples.
            out = out * out.new_empty(len(x), 1, 1, 1).bernoulli_(0.9).div_(0.9)
        return x + out.permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    """ConvNeXt-T.

    Source: Liu et al., 2022, table 9, https://arxiv.org/abs/2201.03545.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ChannelNorm(96)]
    for width, depth in ((96, 3), (192, 3), (384, 9), (768, 3)):
        if width > 96:
            layers += [ChannelNorm(width // 2), nn.Conv2d(width // 2, width, 2, 2)]
        layers += [ConvNeXtBlock(width) for _ in range(depth)]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(768), nn.Linear(768, 1000)
    return nn.Sequential(*layers, *head)


_PHOTO = (3, 256, 256), torch.float32
_NUMBER = (), torch.float32
_CLICKS = ((13,), torch.float32), ((26,), torch.int64), _NUMBER
_IMAGES = ((3, 224, 224), torch.float32), ((), torch.int64)
# Each vital sign has a value and a mark whether it was measured, for twelve times four hours.
_PATIENTS = ((12, 17, 2), torch.float32), _NUMBER
_CHANGES = _PHOTO, _PHOTO, ((1, 256, 256), torch.float32)
_LOGITS = F.binary_cross_entropy_with_logits
UNSEEN_NETWORKS = (
    Network("DLRM 26 tables Adam", DLRM, ADAM, _CLICKS, _LOGITS, fills_device=True),
    Network("Checkpointed DenseNet-121 SGD", densenet, SGD, _IMAGES, F.cross_entropy),
    Cyclic("CycleGAN 256 two Adams", cyclegan, ADAM, (_PHOTO, _PHOTO), F.mse_loss),
    Network("Channel-wise GRU 17x12 Adam", ChannelwiseGRU, ADAM, _PATIENTS, _LOGITS),
    Network("Siamese U-Net 256 Adam", Siamese, ADAM, _CHANGES, _LOGITS),
    Network("ConvNeXt-T AdamW", convnext, ADAMW, _IMAGES, F.cross_entropy),
)
