"""Train a small VGG on real images of handwritten digits.

The project's own batch size is 4. A short training shows how fast that is; then the largest size
that fits into 1,100 MiB is computed, and the training with it shows what it gains. (On a CPU the
limit is higher where torch itself takes much of that, as its builds for CUDA do.)

The images are scikit-learn's digits (1,797 scans of 8 x 8 pixels, shipped inside that package:
nothing is downloaded), enlarged to 32 x 32.

Run it with ``python examples/quickstart.py``; it takes about 50 s on two cores and writes
to ``logs/quickstart``.
"""

from __future__ import annotations

import psutil
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_batchmem import BatchFinder, MemoryProfiler

Batch = tuple[Tensor, ...]

MIB = 2**20


class Digits(LightningDataModule):
    """Handwritten digits, 1 x 32 x 32 pixels, four fifths for training."""

    def __init__(self, batch_size: int = 4) -> None:
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
    """A VGG with four convolutions and three linear layers, for ten classes.

    With 30 channels it has 29.6 million parameters, nearly all of them in two linear layers.
    """

    def __init__(self, channels: int = 30, learning_rate: float = 2e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        # The 2 * channels maps have 8 x 8 pixels after two poolings.
        features = 128 * channels
        self.network = nn.Sequential(
            convolutions(1, channels),
            convolutions(channels, 2 * channels),
            nn.Flatten(),
            nn.Linear(features, features),
            nn.ReLU(),
            nn.Linear(features, features),
            nn.ReLU(),
            nn.Linear(features, 10),
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

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW, with a learning rate that rises and falls once during the training."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.learning_rate, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def make() -> tuple[LightningModule, LightningDataModule]:
    """Return the model and its data, for the memory test in examples/memory."""
    return Classifier(), Digits()


def limit_bytes() -> int:
    """1,100 MiB; on a CPU at least 650 MiB beyond what this process takes before it trains."""
    limit = 1100 * MIB
    if torch.cuda.is_available():
        return limit
    return max(limit, psutil.Process().memory_info().rss + 650 * MIB)


def main() -> None:
    """Train a little with the size of the project, then with the size that BatchFinder computes."""
    seed_everything(0)
    # On a machine with other work two threads wait for each other, which hides the speed of a size.
    torch.set_num_threads(1)
    limit = limit_bytes()
    digits = Digits()
    profiler = MemoryProfiler(csv=False)
    trainer = Trainer(
        devices=1,
        max_steps=20,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        callbacks=[profiler],
    )
    trainer.fit(Classifier(), datamodule=digits)
    before = profiler.summary
    assert before is not None

    profiler = MemoryProfiler()
    # The learning rate was chosen for batches of 4 samples, so it grows with the size.
    finder = BatchFinder(objective="memory", memory_limit=limit, lr_scaling="sqrt")
    trainer = Trainer(
        devices=1,
        max_epochs=4,
        log_every_n_steps=5,
        # A checkpoint of this network takes 355 MB.
        enable_checkpointing=False,
        logger=TensorBoardLogger("logs", name="quickstart"),
        callbacks=[profiler, finder],
    )
    trainer.fit(Classifier(), datamodule=digits)
    after = profiler.summary
    plan = finder.plan
    assert after is not None
    assert plan is not None

    # Every batch here shows its size, so the profiler knows the number of samples.
    assert before.speed.samples_per_s is not None
    assert after.speed.samples_per_s is not None
    faster = after.speed.samples_per_s / before.speed.samples_per_s
    # Only a GPU has reserved bytes. On a CPU the peak is the resident set of the process.
    peak_bytes = after.memory.peak_reserved_bytes or after.memory.peak_bytes or 0
    print(
        f"\nsize      {plan.reason} Limited by {plan.limited_by}; it was"
        f" {before.memory.batch_size} before."
    )
    print(
        f"speed     {faster:.1f} times as fast: {after.speed.samples_per_s:,.0f} samples/s in"
        f" {after.steps} training steps, instead of {before.speed.samples_per_s:,.0f} in"
        f" {before.steps}"
    )
    print(f"memory    peak {peak_bytes / MIB:,.0f} MiB, limit {plan.limit_bytes / MIB:,.0f} MiB")
    print(f"accuracy  {trainer.callback_metrics['val/accuracy']:.3f} of the validation images")
    print(
        f"files     {trainer.log_dir}: memory_per_batch.csv, memory_summary.json, batch_plan.json"
    )


if __name__ == "__main__":
    main()
