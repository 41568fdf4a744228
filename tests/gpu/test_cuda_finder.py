"""BatchFinder on a CUDA device: within the limit, without allocator retries, and without a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import BatchFinder, MemoryProfiler

MIB = 1 << 20
SAMPLES = 4000

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # Python 3.12 and later
    pytest.mark.filterwarnings("ignore:GPU utilization cannot be read"),  # MIG, a sandbox without NVML
]


class Deep(LightningModule):
    """About 4 MiB of activations a sample, a validation step, and dropout for the device's generator."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.layer = nn.Linear(16, 64)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.layer(x)).repeat(1, 4096)
        for _ in range(4):
            x = x.tanh()
        return x.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(SAMPLES, 16)), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(64, 16)), batch_size=self.batch_size)


def trained(folder: Path, batch_size: int, *callbacks: Any) -> Deep:
    seed_everything(1, verbose=False)
    module = Deep(batch_size)
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_steps=20,
        callbacks=list(callbacks),
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return module


def test_the_search_and_the_training_stay_within_the_limit(device: torch.device, tmp_path: Path) -> None:
    before = torch.cuda.memory_stats(device)
    finder, profiler = BatchFinder(memory_limit="1GiB"), MemoryProfiler(csv=False)
    trained(tmp_path, 2, profiler, finder)
    after = torch.cuda.memory_stats(device)
    plan = finder.plan
    assert plan is not None
    assert plan.limited_by == "memory"
    assert plan.device == torch.cuda.get_device_name(device)
    for count in ("num_ooms", "num_alloc_retries"):
        assert after.get(count, 0) == before.get(count, 0), count
    assert len(plan.trials) <= 6
    assert all(trial.held_bytes <= 1024 * MIB for trial in plan.trials)
    assert profiler.summary is not None
    assert profiler.summary.peak_reserved_bytes is not None
    assert profiler.summary.peak_reserved_bytes <= 1024 * MIB
    assert profiler.summary.peak_reserved_bytes >= 0.85 * 1024 * MIB  # and the limit is used
    pushed = sum(trial.samples_run for trial in plan.trials[1:])
    assert pushed <= 4 * plan.batch_size


def test_a_training_after_a_search_is_that_of_the_hard_coded_size(device: torch.device, tmp_path: Path) -> None:
    finder = BatchFinder(max_batch_size=64)
    searched = trained(tmp_path, 2, finder)
    searched_random = torch.cuda.get_rng_state(device)
    hard_coded = trained(tmp_path, 64)
    assert finder.plan is not None
    assert finder.plan.batch_size == 64
    assert torch.equal(searched_random, torch.cuda.get_rng_state(device))
    for name, tensor in hard_coded.state_dict().items():
        assert torch.equal(tensor, searched.state_dict()[name]), name
