"""Five small projects, written as a newcomer would, for ``benchmarks.no_harm``.

Each of them has its batch size in another place: in a datamodule, in loaders that are passed to
``fit``, in the yaml file of LightningCLI, in a nested configuration, and in a datamodule beside the
callbacks of a finetuning. The metric is that of the last evaluation on held-out data.
"""

from __future__ import annotations

import re
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits, make_classification, make_friedman1
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import trainer_for
from lightning_batchmem import BatchFinder

Sample = dict[str, Tensor]

_FOLDERS = ("asyncio", "email", "unittest", "xml")
_WORDS = 2000
_MOST_TOKENS = 48


@dataclass(frozen=True)
class Run:
    """How a project is trained.

    Args:
        objective: that of its BatchFinder; ``None`` for none.
        seed: of weights and order; the data are always the same.
        callbacks: further callbacks.
        most_epochs: fewer epochs than the project has, for a test.
    """

    objective: str | None
    seed: int
    callbacks: Sequence[Callback] = ()
    most_epochs: int = 1000

    def all_callbacks(self) -> list[Callback]:
        if self.objective is None:
            return list(self.callbacks)
        if self.objective == "auto":
            return [BatchFinder(), *self.callbacks]
        # The names come from the ways of the benchmark.
        finder = BatchFinder(objective=self.objective)  # type: ignore[arg-type]
        return [finder, *self.callbacks]

    def trainer(self, epochs: int, callbacks: Sequence[Callback] = (), **arguments: Any) -> Trainer:
        return trainer_for(
            [*self.all_callbacks(), *callbacks],
            -1,
            max_epochs=min(epochs, self.most_epochs),
            accelerator="cpu",
            **arguments,
        )


@dataclass(frozen=True)
class Project:
    """A project, and what is read from its Trainer.

    Args:
        own_size: the batch size that it has in its code.
        metric: the name of its metric.
        train: trains it, and returns the Trainer.
    """

    own_size: int
    metric: str
    train: Callable[[Run], Trainer]

    @property
    def is_loss(self) -> bool:
        """Whether a lower metric is better."""
        return self.metric.endswith("loss")


class Classifier(LightningModule):
    """What the classifiers have in common."""

    def loss_and_accuracy(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss = functional.cross_entropy(outputs, targets)
        return loss, (outputs.argmax(1) == targets).float().mean()


@cache
def shifted_digits(held_out: bool, samples: int) -> TensorDataset:
    """Digits of 16 x 16 pixels near the middle of noisy images of 24 x 24 pixels."""
    generator = torch.Generator().manual_seed(int(held_out))
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    chosen = slice(1200, None) if held_out else slice(1200)
    images = functional.interpolate(images[chosen], scale_factor=2, mode="bilinear")
    labels = torch.tensor(digits.target)[chosen]
    picked = torch.randint(len(labels), (samples,), generator=generator)
    shifts = torch.randint(3, 6, (samples, 2), generator=generator).tolist()
    canvas = 0.2 * torch.randn(samples, 1, 24, 24, generator=generator)
    for image, index, (row, column) in zip(canvas, picked.tolist(), shifts, strict=True):
        image[:, row : row + 16, column : column + 16] += images[index]
    return TensorDataset(canvas, labels[picked])


class ImageData(LightningDataModule):
    """A datamodule with ``self.batch_size``."""

    def __init__(self, batch_size: int, samples: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.samples = samples

    def train_dataloader(self) -> DataLoader[Any]:
        data = shifted_digits(False, self.samples)
        return DataLoader(data, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(shifted_digits(True, 600), batch_size=100)


def convolutions(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )


class ImageClassifier(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = convolutions(16)
        self.head = nn.Linear(32 * 6 * 6, 10)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return self.loss_and_accuracy(self.head(self.backbone(images)), labels)[0]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        loss, accuracy = self.loss_and_accuracy(self.head(self.backbone(images)), labels)
        self.log_dict({"val_loss": loss, "val_acc": accuracy})

    def configure_optimizers(self) -> Optimizer:
        # A finetuning callback adds the parameters that are frozen now.
        return Adam([one for one in self.parameters() if one.requires_grad], lr=1e-3)


def train_images(run: Run) -> Trainer:
    trainer = run.trainer(epochs=3)
    trainer.fit(ImageClassifier(), datamodule=ImageData(batch_size=32, samples=1600))
    return trainer


@cache
def source_lines() -> list[tuple[Tensor, int]]:
    """Lines of four packages of the standard library as numbers of words, and the package."""
    library = Path(sysconfig.get_paths()["stdlib"])
    samples = list[tuple[Tensor, int]]()
    for label, folder in enumerate(_FOLDERS):
        found = list[Tensor]()
        for path in sorted((library / folder).rglob("*.py")):
            lines = path.read_text(errors="replace").splitlines()
            for first in range(0, len(lines), 4):
                words = re.findall(r"\w+", " ".join(lines[first : first + 4]))[:_MOST_TOKENS]
                if len(words) >= 4:
                    codes = [1 + zlib.crc32(word.encode()) % (_WORDS - 1) for word in words]
                    found.append(torch.tensor(codes))
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
        samples += [(found[index], label) for index in order[:650].tolist()]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(1))
    return [samples[index] for index in order.tolist()]


def padded(samples: list[tuple[Tensor, int]]) -> Sample:
    codes = [codes for codes, _ in samples]
    return {
        "codes": pad_sequence(codes, batch_first=True),
        "labels": torch.tensor([label for _, label in samples]),
    }


class TextClassifier(Classifier):
    """A transformer whose batches are dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, 64, padding_idx=0)
        self.places = nn.Embedding(_MOST_TOKENS, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, len(_FOLDERS))

    def forward(self, codes: Tensor) -> Tensor:
        is_padding = codes == 0
        places = self.places(torch.arange(codes.shape[1], device=codes.device))
        hidden = self.encoder(self.words(codes) + places, src_key_padding_mask=is_padding)
        hidden = hidden.masked_fill(is_padding[..., None], 0)
        outputs: Tensor = self.head(hidden.sum(1) / (~is_padding).sum(1, keepdim=True))
        return outputs

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        return self.loss_and_accuracy(self(batch["codes"]), batch["labels"])[0]

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        loss, accuracy = self.loss_and_accuracy(self(batch["codes"]), batch["labels"])
        self.log_dict({"val_loss": loss, "val_acc": accuracy}, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=1e-3)


def train_text(run: Run) -> Trainer:
    samples = source_lines()
    # The data set is a list, which torch accepts and does not annotate.
    train_set: Any = samples[:2000]
    held_out_set: Any = samples[2000:]
    train_loader = DataLoader(train_set, batch_size=16, shuffle=True, collate_fn=padded)
    held_out_loader = DataLoader(held_out_set, batch_size=100, collate_fn=padded)
    trainer = run.trainer(epochs=2)
    trainer.fit(TextClassifier(), train_loader, held_out_loader)
    return trainer


class TableData(LightningDataModule):
    """The table of a regression."""

    def __init__(self, batch_size: int = 16, samples: int = 2000) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        table, targets = make_friedman1(3000, n_features=10, noise=1.0, random_state=0)
        tensors = (torch.tensor(table).float(), torch.tensor(targets).float())
        samples = self.hparams["samples"]
        self.train_set = TensorDataset(*(one[:samples] for one in tensors))
        self.held_out_set = TensorDataset(*(one[2000:] for one in tensors))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_set, batch_size=self.hparams["batch_size"], shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out_set, batch_size=200)


class TableRegression(LightningModule):
    def __init__(self, width: int = 128, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Linear(10, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def loss(self, batch: list[Tensor]) -> Tensor:
        table, targets = batch
        return functional.mse_loss(self.network(table).squeeze(1), targets)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Optimizer:
        return Adam(self.parameters(), lr=self.hparams["lr"])


_YAML = """\
seed_everything: {seed}
trainer:
  max_epochs: {epochs}
  accelerator: cpu
  devices: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks: {callbacks}
model:
  width: 128
  lr: 0.001
data:
  batch_size: 16
"""


def train_with_yaml(run: Run) -> Trainer:
    finders = "[]"
    if run.objective is not None:
        arguments = "" if run.objective == "auto" else f"\n      objective: {run.objective}"
        finders = "\n  - class_path: lightning_batchmem.BatchFinder"
        finders += f"\n    init_args:{arguments}" if arguments else ""
    text = _YAML.format(seed=run.seed, epochs=min(10, run.most_epochs), callbacks=finders)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text)
        cli = LightningCLI(
            TableRegression,
            TableData,
            args=["fit", "--config", str(path)],
            save_config_callback=None,
            trainer_defaults={"callbacks": list(run.callbacks)},
        )
    return cli.trainer


class NestedConfiguration(Classifier):
    """Everything comes from one configuration object."""

    def __init__(self, cfg: SimpleNamespace) -> None:
        super().__init__()
        self.cfg = cfg
        width = cfg.model.width
        self.network = nn.Sequential(
            nn.Linear(20, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 5),
        )
        table, labels = make_classification(
            4000,
            n_features=20,
            n_informative=10,
            n_classes=5,
            n_clusters_per_class=3,
            flip_y=0.02,
            class_sep=1.5,
            random_state=0,
        )
        self.tensors = (torch.tensor(table).float(), torch.tensor(labels))

    def train_dataloader(self) -> DataLoader[Any]:
        data = TensorDataset(*(one[:3000] for one in self.tensors))
        return DataLoader(data, batch_size=self.cfg.loader.train.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        data = TensorDataset(*(one[3000:] for one in self.tensors))
        return DataLoader(data, batch_size=self.cfg.loader.val.batch_size)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        table, labels = batch
        return self.loss_and_accuracy(self.network(table), labels)[0]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        table, labels = batch
        loss, accuracy = self.loss_and_accuracy(self.network(table), labels)
        self.log_dict({"val_loss": loss, "val_acc": accuracy})

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=self.cfg.model.lr, momentum=0.9)


def train_nested(run: Run) -> Trainer:
    loader = SimpleNamespace(
        train=SimpleNamespace(batch_size=24), val=SimpleNamespace(batch_size=200)
    )
    cfg = SimpleNamespace(loader=loader, model=SimpleNamespace(width=128, lr=0.01))
    trainer = run.trainer(epochs=8)
    trainer.fit(NestedConfiguration(cfg))
    return trainer


def train_finetuning(run: Run) -> Trainer:
    with tempfile.TemporaryDirectory() as folder:
        trainer = run.trainer(
            epochs=4,
            callbacks=[
                BackboneFinetuning(unfreeze_backbone_at_epoch=1),
                ModelCheckpoint(monitor="val_acc", mode="max"),
                EarlyStopping("val_acc", mode="max", patience=3),
            ],
            logger=CSVLogger(folder),
            enable_checkpointing=True,
            log_every_n_steps=10,
        )
        trainer.fit(ImageClassifier(), datamodule=ImageData(batch_size=16, samples=1000))
    return trainer


PROJECTS = {
    "image classifier": Project(32, "val_acc", train_images),
    "text transformer": Project(16, "val_acc", train_text),
    "LightningCLI": Project(16, "val_loss", train_with_yaml),
    "nested configuration": Project(24, "val_acc", train_nested),
    "finetuning": Project(16, "val_acc", train_finetuning),
}
