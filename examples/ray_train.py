"""The digits of the quickstart on two workers of Ray Train.

Both workers find the same batch size, and the one with the least room decides.

Run it with ``python examples/ray_train.py`` after ``pip install "ray[train]"``. It takes about a
minute on two cores, and writes to ``logs/ray``.
"""

from __future__ import annotations

from pathlib import Path

import ray.train
import torch
from lightning.pytorch import Trainer, seed_everything
from quickstart import Classifier, Digits
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer

from lightning_batchmem import BatchFinder

WORKERS = 2


def train() -> str:
    """Find the batch size on all workers, train, and return what each of them used."""
    seed_everything(0, verbose=False)
    # The limit holds for each worker.
    finder = BatchFinder(memory_limit="1GiB", max_batch_size=64)
    trainer = Trainer(
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        max_epochs=1,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
        callbacks=[finder],
    )
    digits = Digits()
    prepare_trainer(trainer).fit(Classifier(8), datamodule=digits)
    sizes = [0] * WORKERS
    torch.distributed.all_gather_object(sizes, digits.batch_size)
    accuracy = float(trainer.callback_metrics["val/accuracy"])
    return f"accuracy {accuracy:.3f}, with the batch sizes {sizes} of the workers"


def main() -> None:
    """Start the workers, and print what they return."""
    storage = ray.train.RunConfig(storage_path=str(Path("logs/ray").resolve()))
    scaling = ray.train.ScalingConfig(num_workers=WORKERS, use_gpu=torch.cuda.device_count() >= 2)
    result = TorchTrainer(train, scaling_config=scaling, run_config=storage).fit()
    print(result.return_value)


if __name__ == "__main__":
    main()
