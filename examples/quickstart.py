"""Train a small residual network on real images of handwritten digits.

The batch size is computed, not guessed.

The images are scikit-learn's digits (1,797 scans of 8 x 8 pixels, shipped inside that package:
nothing is downloaded), enlarged to 32 x 32. Memory is limited to 1 GiB, so that memory is what
bounds the batch.

Run it with ``python examples/quickstart.py``; it takes about a minute on two cores and writes to
``logs/quickstart``.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_batchmem import BatchFinder, MemoryProfiler

Batch = tuple[Tensor, ...]


class Digits(LightningDataModule):
    """Handwritten digits, 1 x 32 x 32 pixels, four fifths for training."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        # BatchFinder sets this attribute.
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Read the images and split them."""
        images, labels = load_digits(return_X_y=True)
        pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        pixels = functional.interpolate(pixels, size=32, mode="bilinear")
        dataset = TensorDataset(pixels, torch.tensor(labels))
        generator = torch.Generator().manual_seed(0)
        self.training_images, self.validation_images = random_split(
            dataset, [0.8, 0.2], generator=generator
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        """The training images, shuffled."""
        return DataLoader(self.training_images, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """The other images."""
        return DataLoader(self.validation_images, batch_size=self.batch_size)


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape, N x channels x height x width."""
        return functional.relu(x + self.body(x))


class Classifier(LightningModule):
    """A small residual network for ten classes."""

    def __init__(self, channels: int = 32, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            Residual(channels),
            nn.MaxPool2d(2),
            Residual(channels),
            nn.MaxPool2d(2),
            Residual(channels),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, 10),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")
        self.learning_rate = learning_rate

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross entropy of one batch."""
        images, labels = batch
        loss = functional.cross_entropy(self.network(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count correct answers."""
        images, labels = batch
        self.accuracy(self.network(images), labels)
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main() -> None:
    """Find the batch size, train, and report the validation accuracy."""
    seed_everything(0)
    finder = BatchFinder(memory_limit="900MiB", min_steps_per_epoch=None)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=10,
        log_every_n_steps=5,
        logger=[
            TensorBoardLogger("logs", name="quickstart"),
            CSVLogger("logs", name="quickstart_csv"),
        ],
        callbacks=[MemoryProfiler(), finder],
    )
    trainer.fit(Classifier(), datamodule=Digits())
    assert finder.plan is not None
    print(f"\ntrained with the batch size {finder.plan.batch_size}")
    print(f"validation accuracy: {trainer.callback_metrics['val/accuracy']:.3f}")
    print(f"memory of every step, as numbers: {trainer.log_dir}/memory_per_batch.csv")
    print(f"memory of a step by its parts: {trainer.log_dir}/memory_summary.json")
    print(f"the batch size and all trials: {trainer.log_dir}/batch_plan.json")


if __name__ == "__main__":
    main()
