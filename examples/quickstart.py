"""Train a small residual network on real images of handwritten digits.

The project's own batch size is 4. A short training shows how fast that is; then the largest size
that fits into 750 MiB is computed, and the training with it shows what it gains. (On the host the
limit is higher where torch itself takes much of that, as its builds for CUDA do.)

The images are scikit-learn's digits (1,797 scans of 8 x 8 pixels, shipped inside that package:
nothing is downloaded), enlarged to 20 x 20 with a margin of two pixels.

Run it with ``python examples/quickstart.py``; it takes about 30 s on two cores and writes
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
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_batchmem import BatchFinder, MemoryProfiler

Batch = tuple[Tensor, ...]

MIB = 2**20

# Each training image is used in five places: in the middle, and two pixels from there.
SHIFTS = [(0, 0), (2, 0), (-2, 0), (0, 2), (0, -2)]


class Digits(LightningDataModule):
    """Handwritten digits, 1 x 24 x 24 pixels, four fifths for training."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        # BatchFinder sets this attribute.
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Read the images, split them, and shift those for training."""
        pixels, digits = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        images = functional.pad(functional.interpolate(images, size=20, mode="bilinear"), (2,) * 4)
        labels = torch.tensor(digits)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        count = len(images) * 4 // 5
        training = order[:count]
        validation = order[count:]
        shifted = [torch.roll(images[training], shift, dims=(2, 3)) for shift in SHIFTS]
        self.training_images = TensorDataset(
            torch.cat(shifted), labels[training].repeat(len(SHIFTS))
        )
        self.validation_images = TensorDataset(images[validation], labels[validation])

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

    def __init__(self, channels: int = 16, learning_rate: float = 1e-3) -> None:
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

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW, with a learning rate that rises and falls once during the training."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
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
    """750 MiB; on the host at least 270 MiB beyond what this process holds."""
    limit = 750 * MIB
    if torch.cuda.is_available():
        return limit
    return max(limit, psutil.Process().memory_info().rss + 270 * MIB)


def main() -> None:
    """Train a little with the size of the project, then with the size that BatchFinder computes."""
    seed_everything(0)
    # Steps of 4 samples are so short that two threads mostly wait for each other on a busy machine,
    # which would make the larger size look better than it is.
    torch.set_num_threads(1)
    digits = Digits()
    profiler = MemoryProfiler(csv=False)
    trainer = Trainer(
        devices=1,
        max_steps=100,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        callbacks=[profiler],
    )
    trainer.fit(Classifier(), datamodule=digits)
    before = profiler.summary
    assert before is not None

    profiler = MemoryProfiler()
    # The learning rate was chosen for batches of 4 samples, so it grows with the size. An epoch
    # keeps 15 steps, because four epochs of fewer steps would not train the network.
    finder = BatchFinder(memory_limit=limit_bytes(), lr_scaling="sqrt", min_steps_per_epoch=15)
    trainer = Trainer(
        devices=1,
        max_epochs=4,
        log_every_n_steps=5,
        logger=TensorBoardLogger("logs", name="quickstart"),
        callbacks=[profiler, finder],
    )
    trainer.fit(Classifier(), datamodule=digits)
    after = profiler.summary
    plan = finder.plan
    assert after is not None
    assert plan is not None

    # Every batch here shows its size, so the profiler knows the number of samples.
    assert before.speed.samples_per_second is not None
    assert after.speed.samples_per_second is not None
    faster = after.speed.samples_per_second / before.speed.samples_per_second
    # Only a GPU has reserved bytes. On the host the peak is the resident set of the process.
    peak_bytes = after.memory.peak_reserved_bytes or after.memory.peak_bytes or 0
    print(
        f"\nsize      {plan.reason} Limited by {plan.limited_by.replace('_', ' ')}; it was"
        f" {before.memory.batch_size} before."
    )
    print(
        f"speed     {faster:.1f} times as fast: {after.speed.samples_per_second:,.0f} samples/s in"
        f" {after.steps} training steps, instead of {before.speed.samples_per_second:,.0f} in"
        f" {before.steps}"
    )
    print(f"memory    peak {peak_bytes / MIB:,.0f} MiB, limit {plan.limit_bytes / MIB:,.0f} MiB")
    print(f"accuracy  {trainer.callback_metrics['val/accuracy']:.3f} of the validation images")
    print(
        f"files     {trainer.log_dir}: memory_per_batch.csv, memory_summary.json, batch_plan.json"
    )


if __name__ == "__main__":
    main()
