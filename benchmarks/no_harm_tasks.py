"""Small trainings, to see how far a batch size may be raised without a worse loss.

Each task is a module with data, an own batch size, a number of epochs, an optimizer and its rate.
Every second task of a set has the rate that was best for its own size (two seeds, rates with a
factor of three between them); the others have a usual rate of their optimizer, as many projects do.
All data is made from a fixed seed, or comes with scikit-learn or with Python; the seed of a module
decides its weights and its order of samples. :mod:`benchmarks.no_harm_rules` trains the tasks.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

Tensors = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Tensors], Tensor]

IMAGE_SIDE = 12
TEXT_LENGTH = 24
CHARACTERS = 96
SEQUENCE_LENGTH = 10
NODES = 8


@dataclass(frozen=True)
class Data:
    """Tensors with a row per sample."""

    train: Tensors
    held_out: Tensors

    @property
    def samples(self) -> int:
        return len(self.train[0])


@dataclass(frozen=True)
class Task:
    """A training as a project would write it.

    The held-out loss is the training loss on other data, with the network in evaluation mode.
    """

    name: str
    network: Callable[[], nn.Module]
    data: Callable[[], Data]
    loss: Loss
    batch_size: int
    epochs: int
    rate: float
    optimizer: str
    has_best_rate: bool = False
    """Whether the rate is the best for the own size, of rates with a factor of three between."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training at the own size."""
        return self.epochs * -(-self.data().samples // self.batch_size)


class TaskModule(LightningModule):
    """A task as a LightningModule, whose ``batch_size`` and ``lr`` can be changed before a fit."""

    def __init__(self, task: Task, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.task = task
        self.seed = seed
        self.batch_size = task.batch_size
        self.lr = task.rate
        self.network = task.network()

    def training_step(self, batch: Tensors, batch_index: int = 0) -> Tensor:
        return self.task.loss(self.network, tuple(batch))

    def configure_optimizers(self) -> Optimizer:
        if self.task.optimizer == "sgd":
            return SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if self.task.optimizer == "adamw":
            return AdamW(self.parameters(), lr=self.lr)
        return Adam(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader[Tensors]:
        return DataLoader(
            TensorDataset(*self.task.data().train),
            batch_size=self.batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(self.seed),
        )

    @torch.no_grad()
    def held_out_loss(self) -> float:
        was_training = self.network.training
        self.network.eval()
        loss = self.task.loss(self.network, self.task.data().held_out).item()
        self.network.train(was_training)
        return loss


def split(*tensors: Tensor, held_out: int) -> Data:
    """Hold the last samples out."""
    return Data(
        tuple(tensor[:-held_out] for tensor in tensors),
        tuple(tensor[-held_out:] for tensor in tensors),
    )


def classification_loss(network: nn.Module, batch: Tensors) -> Tensor:
    inputs, classes = batch
    return functional.cross_entropy(network(inputs), classes)


def regression_loss(network: nn.Module, batch: Tensors) -> Tensor:
    inputs, targets = batch
    return functional.mse_loss(network(inputs).squeeze(-1), targets)


# House prices: regression on a table, with a place that matters and noise that grows with the price


@cache
def houses() -> Data:
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(7_400, 8, generator=generator)
    noise = torch.randn(7_400, generator=generator)
    distance = (values[:, 0] - 0.3).square() + (values[:, 1] - 0.6).square()
    price = torch.exp(-12 * distance) + 0.6 * values[:, 2] * values[:, 3]
    price += 0.4 * torch.sin(8 * values[:, 4]) * values[:, 5] + 0.3 * (values[:, 6] > 0.7)
    price *= 1 + 0.15 * noise
    return split(2 * values - 1, (price - price.mean()) / price.std(), held_out=1_000)


def house_network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )


# Five classes in a table of twenty columns, with one wrong label in ten


@cache
def noisy_classes() -> Data:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(6_000, 20, generator=generator)
    teacher = torch.randn(20, 12, generator=generator) / 4
    scores = torch.tanh(2 * values @ teacher) @ torch.randn(12, 5, generator=generator)
    classes = scores.argmax(1)
    is_wrong = torch.rand(6_000, generator=generator) < 0.1
    others = torch.randint(5, (6_000,), generator=generator)
    return split(values, torch.where(is_wrong, others, classes), held_out=1_500)


def noisy_network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 48),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(48, 48),
        nn.GELU(),
        nn.Linear(48, 5),
    )


# The next character of Python's own sources, by a transformer of one layer


@cache
def source_text() -> Data:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(
        (folder / f"{name}.py").read_text() for name in ("argparse", "typing", "tarfile")
    )
    codes = torch.tensor([min(max(ord(character) - 31, 0), CHARACTERS - 1) for character in text])
    windows = codes.unfold(0, TEXT_LENGTH + 1, TEXT_LENGTH)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(3))
    return split(windows[order][:7_400], held_out=1_000)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, 32)
        self.places = nn.Parameter(0.02 * torch.randn(TEXT_LENGTH, 32))
        self.layer = nn.TransformerEncoderLayer(
            32, 2, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(32, CHARACTERS)

    def forward(self, codes: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1])
        hidden = self.layer(self.characters(codes) + self.places, src_mask=mask, is_causal=True)
        outputs: Tensor = self.head(hidden)
        return outputs


def next_character_loss(network: nn.Module, batch: Tensors) -> Tensor:
    (codes,) = batch
    return functional.cross_entropy(network(codes[:, :-1]).flatten(0, 1), codes[:, 1:].flatten())


# Images of three soft spots, by a convolutional autoencoder


@cache
def spots() -> Data:
    generator = torch.Generator().manual_seed(4)
    places = torch.rand(2_400, 3, 2, generator=generator) * IMAGE_SIDE
    widths = 1 + 1.5 * torch.rand(2_400, 3, 1, 1, generator=generator)
    grid = torch.arange(IMAGE_SIDE) + 0.5
    down = (grid - places[:, :, :1]).square()[:, :, :, None]
    across = (grid - places[:, :, 1:]).square()[:, :, None, :]
    images = torch.exp(-(down + across) / widths.square()).sum(1, keepdim=True)
    return split(images, held_out=400)


def spot_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 12),
        nn.Linear(12, 144),
        nn.ReLU(),
        nn.Unflatten(1, (16, 3, 3)),
        nn.ConvTranspose2d(16, 8, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 4, 2, 1),
    )


def reconstruction_loss(network: nn.Module, batch: Tensors) -> Tensor:
    (images,) = batch
    return functional.mse_loss(network(images), images)


# The sum of the two marked numbers of a sequence, by a recurrent network


@cache
def additions() -> Data:
    generator = torch.Generator().manual_seed(5)
    numbers = torch.rand(7_400, SEQUENCE_LENGTH, generator=generator)
    marked = torch.rand(7_400, SEQUENCE_LENGTH, generator=generator).topk(2).indices
    marks = torch.zeros_like(numbers).scatter_(1, marked, 1.0)
    return split(torch.stack([numbers, marks], 2), (numbers * marks).sum(1), held_out=1_000)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(2, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, sequences: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.layer(sequences)[0][:, -1])
        return outputs


# Handwritten digits, by a variational autoencoder


@cache
def digit_images() -> Data:
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(6))
    return split(images[order], held_out=397)


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, images: Tensor) -> Tensors:
        means, logarithms = self.encoder(images).chunk(2, 1)
        codes = means
        if self.training:
            codes = means + torch.exp(logarithms / 2) * torch.randn_like(means)
        return self.decoder(codes), means, logarithms


def variational_loss(network: nn.Module, batch: Tensors) -> Tensor:
    """The evidence lower bound, per sample; in evaluation without random codes."""
    (images,) = batch
    logits, means, logarithms = network(images)
    found = functional.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(1)
    divergence = (means.square() + logarithms.exp() - logarithms - 1).sum(1) / 2
    loss: Tensor = (found + divergence).mean()
    return loss


# The number of triangles in a graph of eight nodes, by passing messages


@cache
def graphs() -> Data:
    generator = torch.Generator().manual_seed(7)
    shares = 0.2 + 0.5 * torch.rand(6_000, 1, 1, generator=generator)
    upper = (torch.rand(6_000, NODES, NODES, generator=generator) < shares).float().triu(1)
    edges = upper + upper.transpose(1, 2)
    nodes = torch.randn(6_000, NODES, 4, generator=generator)
    triangles = torch.einsum("bij,bjk,bki->bi", edges, edges, edges)
    targets = (triangles * (0.5 + torch.sigmoid(2 * nodes[:, :, 0]))).sum(1).sqrt()
    return split(edges, nodes, (targets - targets.mean()) / targets.std(), held_out=1_000)


class MessagePassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 32)
        self.second = nn.Linear(64, 32)
        self.third = nn.Linear(64, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, edges: Tensor, nodes: Tensor) -> Tensor:
        hidden = torch.relu(self.first(torch.cat([nodes, edges.sum(2, keepdim=True) / 4], 2)))
        hidden = torch.relu(self.second(torch.cat([hidden, edges @ hidden / 4], 2)))
        hidden = torch.relu(self.third(torch.cat([hidden, edges @ hidden / 4], 2)))
        outputs: Tensor = self.head(hidden.mean(1)).squeeze(1)
        return outputs


def graph_loss(network: nn.Module, batch: Tensors) -> Tensor:
    edges, nodes, targets = batch
    return functional.mse_loss(network(edges, nodes), targets)


# Six directions of noisy stripes, by a residual network with batch normalization


@cache
def stripes() -> Data:
    generator = torch.Generator().manual_seed(8)
    classes = torch.randint(6, (1_700,), generator=generator)
    angles = classes * torch.pi / 6 + 0.12 * torch.randn(1_700, generator=generator)
    phases = 6.3 * torch.rand(1_700, 1, 1, generator=generator)
    waves = 0.8 + 0.5 * torch.rand(1_700, 1, 1, generator=generator)
    grid = torch.arange(float(IMAGE_SIDE))
    down = grid[:, None] * torch.sin(angles)[:, None, None]
    across = grid[None, :] * torch.cos(angles)[:, None, None]
    images = torch.sin(waves * (down + across) + phases)
    images += 0.7 * torch.randn(images.shape, generator=generator)
    return split(images[:, None], classes, held_out=500)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(images + self.layers(images))


def residual_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        ResidualBlock(8),
        ResidualBlock(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 6),
    )


FIRST_SET = (
    Task("house_adam", house_network, houses, regression_loss, 32, 16, 3e-3, "adam", True),
    Task("noisy_adamw", noisy_network, noisy_classes, classification_loss, 50, 10, 1e-3, "adamw"),
    Task(
        "transformer_adamw",
        Transformer,
        source_text,
        next_character_loss,
        32,
        5,
        1e-2,
        "adamw",
        True,
    ),
    Task("spots_adam", spot_network, spots, reconstruction_loss, 20, 8, 1e-3, "adam"),
    Task("addition_adam", Recurrent, additions, regression_loss, 32, 5, 9e-3, "adam", True),
    Task("variational_adam", Variational, digit_images, variational_loss, 16, 40, 1e-3, "adam"),
    Task("graph_sgd", MessagePassing, graphs, graph_loss, 25, 15, 0.03, "sgd", True),
    Task("residual_sgd", residual_network, stripes, classification_loss, 16, 8, 0.01, "sgd"),
)

# The second set, written after a rule was chosen by the first one. Its data, epochs and rates were
# tried at the own size and at ten steps an epoch only, so that each task counts.

# Which two curves come from the same of ten sources, by the distance of two codes


@cache
def curve_pairs() -> Data:
    generator = torch.Generator().manual_seed(11)
    heights = torch.randn(10, 3, 1, generator=generator)
    waves = 1 + 5 * torch.rand(10, 3, 1, generator=generator)
    is_same = torch.rand(4_000, generator=generator) < 0.5
    first = torch.randint(10, (4_000,), generator=generator)
    second = torch.where(is_same, first, torch.randint(10, (4_000,), generator=generator))
    places = torch.linspace(0, 6.3, 40)

    def curves(sources: Tensor) -> Tensor:
        shifts = 0.5 * torch.rand(4_000, 1, 1, generator=generator)
        clean = (heights[sources] * torch.sin(waves[sources] * (places + shifts))).sum(1)
        return clean + 0.3 * torch.randn(clean.shape, generator=generator)

    return split(curves(first), curves(second), (first == second).float(), held_out=1_000)


def pair_network() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 8))


def pair_loss(network: nn.Module, batch: Tensors) -> Tensor:
    first, second, is_same = batch
    distance = (network(first) - network(second)).square().sum(1).add(1e-6).sqrt()
    apart = torch.relu(2 - distance).square()
    loss: Tensor = (is_same * distance.square() + (1 - is_same) * apart).mean()
    return loss


# Ratings of 150 items by 200 users, by a product of their codes


@cache
def ratings() -> Data:
    generator = torch.Generator().manual_seed(12)
    users = torch.randint(200, (10_000,), generator=generator)
    items = torch.randint(150, (10_000,), generator=generator)
    user_codes = torch.randn(200, 3, generator=generator)
    item_codes = torch.randn(150, 3, generator=generator)
    targets = (user_codes[users] * item_codes[items]).sum(1) / 2 + user_codes[users, 0]
    targets += 0.4 * torch.randn(10_000, generator=generator)
    return split(users, items, targets, held_out=2_000)


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(200, 8)
        self.items = nn.Embedding(150, 8)
        self.user_means = nn.Embedding(200, 1)
        self.item_means = nn.Embedding(150, 1)
        for table in (self.users, self.items, self.user_means, self.item_means):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        product = (self.users(users) * self.items(items)).sum(1, keepdim=True)
        outputs: Tensor = product + self.user_means(users) + self.item_means(items)
        return outputs.squeeze(1)


def rating_loss(network: nn.Module, batch: Tensors) -> Tensor:
    users, items, targets = batch
    return functional.mse_loss(network(users, items), targets)


# Clean images of two rectangles from noisy ones, by a small network with a skip connection


@cache
def noisy_rectangles() -> Data:
    generator = torch.Generator().manual_seed(13)
    corners = 8 * torch.rand(3_400, 2, 2, 1, generator=generator)
    sides = 2 + 4 * torch.rand(3_400, 2, 2, 1, generator=generator)
    grid = torch.arange(IMAGE_SIDE)
    is_inside = ((grid >= corners) & (grid < corners + sides)).float()
    greys = torch.rand(3_400, 2, 1, 1, generator=generator)
    rectangles = greys * is_inside[:, :, 0, :, None] * is_inside[:, :, 1, None, :]
    images = rectangles.sum(1, keepdim=True)
    noise = torch.randn(images.shape, generator=generator)
    return split(images + 0.3 * noise, images, held_out=400)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, 2, 1)
        self.middle = nn.Conv2d(8, 16, 3, 2, 1)
        self.up = nn.ConvTranspose2d(16, 8, 4, 2, 1)
        self.last = nn.ConvTranspose2d(16, 1, 4, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        down = torch.relu(self.down(images))
        up = torch.relu(self.up(torch.relu(self.middle(down))))
        outputs: Tensor = self.last(torch.cat([down, up], 1))
        return outputs


def image_loss(network: nn.Module, batch: Tensors) -> Tensor:
    images, targets = batch
    return functional.mse_loss(network(images), targets)


# The next value of a series of two waves with noise, by a recurrent network


@cache
def series() -> Data:
    generator = torch.Generator().manual_seed(14)
    times = torch.arange(17.0)
    waves = 0.3 + 0.9 * torch.rand(5_000, 2, 1, generator=generator)
    phases = 6.3 * torch.rand(5_000, 2, 1, generator=generator)
    values = torch.sin(waves * times + phases).sum(1)
    values += 0.1 * torch.randn(values.shape, generator=generator)
    return split(values[:, :-1, None], values[:, -1], held_out=1_000)


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(1, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, values: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.layer(values)[0][:, -1])
        return outputs


# Four shapes of sixteen points in any order, by a mean over the points


@cache
def point_clouds() -> Data:
    generator = torch.Generator().manual_seed(15)
    classes = torch.randint(4, (4_200,), generator=generator)
    places = torch.rand(4_200, 16, generator=generator)
    turns = 6.3 * torch.rand(4_200, 1, 1, generator=generator)
    angles = 2 * torch.pi * places
    circle = torch.stack([angles.cos(), angles.sin()], 2)
    ellipse = circle * torch.tensor([1.3, 0.6])
    line = torch.stack([3 * places - 1.5, 0 * places], 2)
    cloud = torch.randn(4_200, 16, 2, generator=generator) * 0.8
    shapes = torch.stack([circle, ellipse, line, cloud])[classes, torch.arange(4_200)]
    x, y = shapes[:, :, :1], shapes[:, :, 1:]
    turned = torch.cat([x * turns.cos() - y * turns.sin(), x * turns.sin() + y * turns.cos()], 2)
    turned += 0.25 * torch.randn(turned.shape, generator=generator)
    return split(turned, classes, held_out=1_000)


class PointSet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, clouds: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.points(clouds).mean(1))
        return outputs


# Which of two rows is better, by the difference of two scores


@cache
def comparisons() -> Data:
    generator = torch.Generator().manual_seed(16)
    rows = torch.randn(2, 7_000, 12, generator=generator)
    scores = rows[..., 0] * rows[..., 1] + torch.sin(2 * rows[..., 2]) + rows[..., 3].abs()
    scores += 0.3 * torch.randn(2, 7_000, generator=generator)
    return split(rows[0], rows[1], (scores[0] > scores[1]).float(), held_out=1_000)


def score_network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1)
    )


def comparison_loss(network: nn.Module, batch: Tensors) -> Tensor:
    first, second, is_first = batch
    difference = (network(first) - network(second)).squeeze(1)
    return functional.binary_cross_entropy_with_logits(difference, is_first)


# The height of a surface at a place, by a network of waves


@cache
def surface() -> Data:
    generator = torch.Generator().manual_seed(17)
    places = 2 * torch.rand(5_000, 2, generator=generator) - 1
    ways = 8 * torch.randn(2, 10, generator=generator)
    weights = torch.randn(10, generator=generator)
    heights = torch.sin(places @ ways) @ weights
    return split(places, heights / heights.std(), held_out=1_000)


class Surface(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Linear(2, 48)
        nn.init.normal_(self.waves.weight, std=3.0)
        self.layers = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))

    def forward(self, places: Tensor) -> Tensor:
        outputs: Tensor = self.layers(torch.sin(self.waves(places)))
        return outputs


# By which of four tables of letter pairs a word of 24 letters was made, by a convolution


@cache
def words() -> Data:
    generator = torch.Generator().manual_seed(18)
    common = torch.randn(20, 20, generator=generator)
    tables = (common + 0.7 * torch.randn(4, 20, 20, generator=generator)).softmax(2)
    classes = torch.randint(4, (6_000,), generator=generator)
    letters = [torch.randint(20, (6_000,), generator=generator)]
    for _ in range(23):
        shares = tables[classes, letters[-1]]
        letters.append(torch.multinomial(shares, 1, generator=generator).squeeze(1))
    return split(torch.stack(letters, 1), classes, held_out=1_000)


class WordConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(20, 16)
        self.layer = nn.Conv1d(16, 48, 4)
        self.head = nn.Linear(48, 4)

    def forward(self, codes: Tensor) -> Tensor:
        hidden = torch.relu(self.layer(self.letters(codes).transpose(1, 2)))
        outputs: Tensor = self.head(hidden.amax(2))
        return outputs


SECOND_SET = (
    Task("pairs_sgd", pair_network, curve_pairs, pair_loss, 20, 6, 0.01, "sgd", True),
    Task("ratings_adam", Factors, ratings, rating_loss, 40, 10, 3e-3, "adam"),
    Task("denoise_adamw", Denoiser, noisy_rectangles, image_loss, 16, 5, 1e-2, "adamw", True),
    Task("series_adam", Forecaster, series, regression_loss, 32, 8, 1e-3, "adam"),
    Task("points_sgd", PointSet, point_clouds, classification_loss, 16, 15, 0.03, "sgd", True),
    Task("comparison_adamw", score_network, comparisons, comparison_loss, 50, 5, 1e-3, "adamw"),
    Task("surface_adam", Surface, surface, regression_loss, 64, 40, 3e-3, "adam", True),
    Task("words_sgd", WordConvolution, words, classification_loss, 8, 4, 0.01, "sgd"),
)
SETS = {"first": FIRST_SET, "second": SECOND_SET}
