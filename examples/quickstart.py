"""Train a small VGG on real images of handwritten digits, with both callbacks.

The images are scikit-learn's digits (1,797 scans of 8 x 8 pixels, shipped inside that package:
nothing is downloaded), enlarged to 32 x 32.

Run it with ``python examples/quickstart.py``; it takes less than a minute on two cores, and uses a
GPU where there is one. It writes to ``lightning_logs``.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_batchmem import BatchFinder, MemoryProfiler

Batch = tuple[Tensor, ...]


class Digits(LightningDataModule):
    """Handwritten digits, 1 x 32 x 32 pixels, four fifths for training."""

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        # BatchFinder sets this attribute.
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Read the images, enlarge and split them."""
        pixels, digits = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        dataset = TensorDataset(functional.interpolate(images, size=32), torch.tensor(digits))
        generator = torch.Generator().manual_seed(0)
        self.training_images, self.validation_images = random_split(dataset, [0.8, 0.2], generator)

    def train_dataloader(self) -> DataLoader[Batch]:
        """The training images, shuffled."""
        return DataLoader(self.training_images, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """The other images."""
        return DataLoader(self.validation_images, batch_size=self.batch_size)


def convolutions(channels_in: int, channels: int) -> nn.Sequential:
    """Two convolutions, and half the height and width."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class Classifier(LightningModule):
    """A VGG with four convolutions and two linear layers, for ten classes.

    With 32 channels it has 1.1 million parameters.
    """

    def __init__(self, channels: int = 32, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        # The 2 * channels maps have 8 x 8 pixels after two poolings.
        self.network = nn.Sequential(
            convolutions(1, channels),
            convolutions(channels, 2 * channels),
            nn.Flatten(),
            nn.Linear(128 * channels, 8 * channels),
            nn.ReLU(),
            nn.Linear(8 * channels, 10),
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
        """AdamW with a constant learning rate."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def make() -> tuple[LightningModule, LightningDataModule]:
    """Return the model and its data, for the memory test in examples/memory."""
    return Classifier(), Digits()


def main() -> None:
    """Find the batch size, and train with it."""
    seed_everything(0)
    # On a machine with other work two threads wait for each other.
    torch.set_num_threads(1)
    model, data = Classifier(), Digits()
    trainer = Trainer(max_epochs=4, callbacks=[BatchFinder(), MemoryProfiler()])
    trainer.fit(model, datamodule=data)


if __name__ == "__main__":
    main()
