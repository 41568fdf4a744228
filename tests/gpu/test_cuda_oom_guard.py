"""Batches that do not fit on a CUDA device."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_batchmem import OomGuard
from lightning_batchmem.devices.accelerator import AcceleratorMemory
from tests.helpers.lawful import MIB, quiet_trainer

WIDTH = 1024
# A sample takes about 128 KiB in each of the 8 layers.
SIZES = [64, 64, 2048, 64, 64, 1024, 64]


class Deep(LightningModule):
    def __init__(self):
        super().__init__()
        layers = [part for _ in range(8) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.layers = nn.Sequential(*layers)
        self.seen = []
        self.bytes_after_steps = []

    def training_step(self, batch, batch_idx):
        self.seen.append(len(batch))
        # Each sample is 32 rows.
        return self.layers(batch.repeat_interleave(32, 0)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def on_train_batch_end(self, *_):
        self.bytes_after_steps.append(torch.cuda.memory_allocated())


@pytest.mark.filterwarnings("ignore:OomGuard")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_training_with_a_batch_that_does_not_fit(precision, device, native, limit_to):
    batches = [torch.randn(size, WIDTH) for size in SIZES]
    guard = OomGuard()
    module = Deep()
    limit_to(torch.cuda.memory_reserved(device) + 1500 * MIB)
    options = {"accelerator": "gpu", "devices": 1, "precision": precision, "max_epochs": 1}
    trainer = quiet_trainer(guard, **options)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    assert trainer.global_step == len(SIZES)
    assert guard.oom_splits >= 1
    assert module.seen.count(64) == SIZES.count(64)
    assert sum(AcceleratorMemory(device).counters().values()) >= 1
    # As after the first step, parameters, gradients, states and workspaces remain, and the batch.
    first_bytes, *_, last_bytes = module.bytes_after_steps
    assert last_bytes <= first_bytes + MIB
