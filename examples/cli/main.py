"""LightningCLI with both callbacks.

The batch size is an argument of the data module, and the search sets it.

Run it with ``python examples/cli/main.py fit --config examples/cli/config.yaml``, or inside
``examples/cli`` with ``python main.py fit --config config.yaml``; it takes a few seconds on two
cores and writes to ``logs/cli``. For one run an argument of the last callback in the YAML, here
BatchFinder, can be changed with ``--trainer.callbacks.max_batch_size=64``.

The images are scikit-learn's digits (1,797 scans of 8 x 8 pixels, shipped inside that package:
nothing is downloaded).
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

Batch = tuple[Tensor, ...]


class Digits(LightningDataModule):
    """Handwritten digits, 1 x 8 x 8 pixels.

    Args:
        batch_size: samples in a batch, until BatchFinder sets it.
        training_share: share of the images that is trained on, the others are for validation.
    """

    def __init__(self, batch_size: int = 32, training_share: float = 0.8) -> None:
        super().__init__()
        # BatchFinder sets hparams.batch_size, which is logged and kept in checkpoints.
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Read the images and split them."""
        images, labels = load_digits(return_X_y=True)
        pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        dataset = TensorDataset(pixels, torch.tensor(labels))
        share = self.hparams["training_share"]
        generator = torch.Generator().manual_seed(0)
        self.training_images, self.validation_images = random_split(
            dataset, [share, 1 - share], generator=generator
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        """The training images, shuffled."""
        return DataLoader(self.training_images, batch_size=self.hparams["batch_size"], shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """The other images."""
        return DataLoader(self.validation_images, batch_size=self.hparams["batch_size"])


class Classifier(LightningModule):
    """A small convolutional network for ten classes.

    Args:
        channels: of each convolution.
        learning_rate: of AdamW.
    """

    def __init__(self, channels: int = 32, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * channels, 10),
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross entropy of one batch."""
        images, labels = batch
        loss = functional.cross_entropy(self.network(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Share of correct answers."""
        images, labels = batch
        self.log(
            "val/accuracy",
            (self.network(images).argmax(dim=1) == labels).float().mean(),
            prog_bar=True,
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


if __name__ == "__main__":
    LightningCLI(Classifier, Digits)
