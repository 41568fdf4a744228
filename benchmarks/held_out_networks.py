"""Networks of other kinds than those in ``large_networks``, for the simulated CUDA device.

Later rules of the search were tried on them. ``unseen_networks`` has six that were made afterwards.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.large_networks import (
    ADAM,
    ADAMW,
    SGD,
    Dropout,
    Network,
    Residual,
    TransformerBlock,
    convolution,
    text_loss,
)


class TwoTowers(nn.Module):
    """A recommender of items by ids and by frozen vectors of their texts.

    Parameters and Adam's state take 77 % of the device, and 87 % with gradients and the temporary
    memory of an optimizer step.
    """

    def __init__(self, gigabytes: int, width: int = 16, text_width: int = 768) -> None:
        super().__init__()
        rows = 400_000 * gigabytes
        self.texts = nn.Embedding(rows, text_width, dtype=torch.float16).requires_grad_(False)
        self.items = nn.Embedding(rows, width)
        self.users = nn.Embedding(rows, width)
        self.history = tower(text_width + width, 512, 256, 64)
        self.item = tower(text_width + width, 512, 256, 64)

    def forward(self, user: Tensor, history: Tensor, item: Tensor) -> Tensor:
        interests = torch.cat([self.texts(history).mean(1).float(), self.users(user)], 1)
        offer = torch.cat([self.texts(item).float(), self.items(item)], 1)
        score: Tensor = (self.history(interests) * self.item(offer)).sum(1)
        return score


def tower(*widths: int) -> nn.Module:
    return nn.Sequential(
        *(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU()))
    )


class Checkpointed(TransformerBlock):
    """A block that keeps only its input, and computes the rest again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def checkpointed_gpt(layers: int = 6, vocabulary: int = 32_000, width: int = 1024) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(vocabulary, width),
        *(Checkpointed(torch.float32, width) for _ in range(layers)),
        nn.LayerNorm(width),
        nn.Linear(width, vocabulary, bias=False),
        nn.Flatten(0, 1),
    )


class Adversarial(Network):
    """Two networks and two optimizers.

    A step of the generator comes first, and a step of the discriminator second.
    """

    def optimizers(self, module: nn.Module) -> list[torch.optim.Optimizer]:
        return [self.optimizer(network.parameters()) for network in module.children()]

    def loss(self, module: nn.Module, batch: list[Tensor], number: int = 0) -> Tensor:
        generator, discriminator = module.children()
        (images,) = batch
        # LightningModule.toggle_optimizer does this in training steps of this kind.
        discriminator.requires_grad_(number == 1)
        fakes = generator(torch.randn(len(images), 100, 1, 1, device=images.device))
        if number == 0:
            judged = discriminator(fakes)
            return self.criterion(judged, torch.ones_like(judged))
        # After this line, the activations of the generator are released.
        fakes = fakes.detach()
        judged = discriminator(images)
        real_loss = self.criterion(judged, torch.ones_like(judged))
        judged = discriminator(fakes)
        return real_loss + self.criterion(judged, torch.zeros_like(judged))


def dcgan(width: int = 64) -> nn.Module:
    """Generator and discriminator of images of 128 x 128 pixels.

    Source: https://docs.pytorch.org/tutorials/beginner/dcgan_faces_tutorial.html, with one more
    layer.
    """
    widths = [width * factor for factor in (16, 8, 4, 2, 1)]
    generator: list[nn.Module] = [nn.ConvTranspose2d(100, widths[0], 4, bias=False)]
    discriminator: list[nn.Module] = [
        nn.Conv2d(3, width, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
    ]
    for wide, narrow in pairwise(widths):
        generator += [
            nn.BatchNorm2d(wide),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(wide, narrow, 4, 2, 1, bias=False),
        ]
    for wide, narrow in reversed(list(pairwise(widths))):
        discriminator += [
            nn.Conv2d(narrow, wide, 4, 2, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.LeakyReLU(0.2, inplace=True),
        ]
    generator += [
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    ]
    discriminator += [nn.Conv2d(widths[0], 1, 4, bias=False), nn.Flatten(0)]
    return nn.Sequential(nn.Sequential(*generator), nn.Sequential(*discriminator))


class Additive(nn.Module):
    """A forecast for each hour of a week: small networks, one for each feature, and their sum.

    Source: Agarwal et al., Neural Additive Models, 2021, https://arxiv.org/abs/2004.13912.
    """

    def __init__(self, features: int = 40) -> None:
        super().__init__()
        self.networks = nn.ModuleList(
            nn.Sequential(tower(1, 64, 64, 32), nn.Linear(32, 1)) for _ in range(features)
        )

    def forward(self, x: Tensor) -> Tensor:
        columns = torch.split(x, 1, -1)
        outputs = [network(column) for network, column in zip(self.networks, columns, strict=True)]
        return torch.cat(outputs, -1).sum(-1)


class ImageAndText(nn.Module):
    """Answers to questions about images: convolutions for the image, attention for the question."""

    def __init__(self, width: int = 512, answers: int = 3129) -> None:
        super().__init__()
        blocks = (Residual(a, b) for a, b in pairwise((64, 64, 64, 128, 128, 256, 256, 512, 512)))
        self.image = nn.Sequential(
            *convolution(3, 64, 7, 2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        texts = (TransformerBlock(torch.float32, width) for _ in range(2))
        self.text = nn.Sequential(nn.Embedding(30_522, width), Dropout(), *texts)
        self.answer = nn.Sequential(
            nn.Linear(512 + width, 1024), nn.ReLU(), nn.Linear(1024, answers)
        )

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        out: Tensor = self.answer(torch.cat([self.image(image), self.text(text).mean(1)], 1))
        return out


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        depthwise = nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False)
        self.body = nn.Sequential(
            *((*convolution(inputs, hidden, 1), nn.ReLU6(inplace=True)) if expansion > 1 else ()),
            depthwise,
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            *convolution(hidden, outputs, 1),
        )
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return x + out if self.has_shortcut else out


def mobilenet() -> nn.Module:
    """MobileNetV2.

    Source: Sandler et al., 2018, table 2, https://arxiv.org/abs/1801.04381.
    """
    table = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    inputs = 32
    blocks = list[nn.Module]()
    for expansion, outputs, repeats, first_stride in table:
        for stride in (first_stride, *(1,) * (repeats - 1)):
            blocks.append(InvertedResidual(inputs, outputs, stride, expansion))
            inputs = outputs
    return nn.Sequential(
        *convolution(3, 32, 3, 2),
        nn.ReLU6(inplace=True),
        *blocks,
        *convolution(320, 1280, 1),
        nn.ReLU6(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        Dropout(),
        nn.Linear(1280, 1000),
    )


_IMAGE = (3, 224, 224), torch.float32
_CLASS = (), torch.int64
_NUMBER = (), torch.float32
_VISITS = ((), torch.int64), ((50,), torch.int64), ((), torch.int64), _NUMBER
_TEXTS = (((1024,), torch.int64),) * 2
_FACES = (((3, 128, 128), torch.float32),)
_WEEKS = ((168, 40), torch.float32), ((168,), torch.float32)
_QUESTIONS = _IMAGE, ((64,), torch.int64), _CLASS
_LOGITS = F.binary_cross_entropy_with_logits
HELD_OUT_NETWORKS = (
    Network("Recommender Adam", TwoTowers, ADAM, _VISITS, _LOGITS, fills_device=True),
    Network("Checkpointed GPT 6x1024 AdamW", checkpointed_gpt, ADAMW, _TEXTS, text_loss),
    Adversarial("DCGAN 128 two Adams", dcgan, ADAM, _FACES, _LOGITS),
    Network("Additive 40x4 Adam", Additive, ADAM, _WEEKS, F.mse_loss),
    Network("Image and text AdamW", ImageAndText, ADAMW, _QUESTIONS, F.cross_entropy),
    Network("MobileNetV2 SGD", mobilenet, SGD, (_IMAGE, _CLASS), F.cross_entropy),
)
