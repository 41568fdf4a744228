"""Modules whose memory on a fake device follows a law of the batch size.

:func:`found_size` is the size that a search finds for this law.
"""

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem.plan.policy import ReadingPolicy, SearchPolicy, StepPolicy

SAMPLES = 5000
MIB = 2**20

# A search with every kind of step, but few of them, for tests that are not about their number.
FAST = SearchPolicy(
    steps=StepPolicy(timed_steps=1, timed_seconds=0.0, steady_steps=2),
    reading=ReadingPolicy(equal_sizes_quick=64),
)


def law(size):
    return 99 * MIB + size * MIB


def found_size(available_bytes, *, memory_limit=None, multiple_of=None):
    """The size that a search finds for :func:`law`.

    The first rehearsal passes, and so does one between it and the highest share of the size that
    fills the limit. Both are rounded down to a multiple.
    """
    policy = SearchPolicy()

    def rounded(size):
        step = multiple_of or (2 ** max(0, (int(size) // 64).bit_length() - 1))
        return int(size) // step * step

    limit_bytes = min(memory_limit or available_bytes, int(0.95 * available_bytes))
    filling = (limit_bytes - law(0)) / MIB
    first = rounded(policy.rehearsal.first_share * filling)
    return rounded(
        first + policy.rehearsal.between_share * (policy.rehearsal.most_share * filling - first)
    )


def loader(size, samples=SAMPLES, **arguments):
    return DataLoader(TensorDataset(torch.zeros(samples, 1)), batch_size=size, **arguments)


def quiet_trainer(*callbacks: Callback, **arguments: Any) -> Trainer:
    """A trainer on the CPU that writes and prints nothing, unless ``arguments`` change that."""
    defaults = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return Trainer(callbacks=list(callbacks), **{"accelerator": "cpu", **defaults, **arguments})


class Lawful(LightningModule):
    """A module whose memory on a fake device follows a law of the batch size.

    The real tensors are tiny.
    """

    def __init__(self, device_memory, law, batch_size=3):
        super().__init__()
        self.batch_size = batch_size

        # A function keeps the real device: the search works on copies of all other attributes.
        def use(size):
            device_memory.free()
            device_memory.use(law(size))
            device_memory.free()

        self.use = use
        self.layer = nn.Linear(1, 1)
        self.sizes = []

    def training_step(self, batch, batch_idx):
        (x,) = batch
        self.sizes.append(len(x))
        self.use(x.numel())
        return self.layer(x[:, :1]).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self):
        return loader(self.batch_size)


class Evaluated(Lawful):
    """Each sample of an evaluation takes twice as much as in training."""

    def __init__(self, device_memory, size_name="batch_size", samples=SAMPLES, *, drop_last=False):
        super().__init__(device_memory, law)
        self.drop_last = drop_last
        self.fixed_size = 50
        self.size_name = size_name
        self.samples = samples
        self.factor = 2
        self.fails_at = 0
        self.evaluated = []

    def training_step(self, batch, batch_idx):
        assert self.training
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        assert not self.training
        assert not torch.is_grad_enabled()
        self.evaluated.append(len(batch[0]))
        self.use(self.factor * len(batch[0]))
        if len(batch[0]) == self.fails_at:
            raise IndexError("of the user")
        return batch[0]

    test_step = predict_step = validation_step

    def val_dataloader(self):
        return loader(getattr(self, self.size_name), self.samples, drop_last=self.drop_last)

    test_dataloader = predict_dataloader = val_dataloader


class Sizes(Callback):
    """The batch sizes that training itself ran.

    ``per_step`` has the samples between one optimizer step and the next.
    """

    def __init__(self):
        self.seen = set()
        self.per_step = [0]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, *_):
        self.seen.add(len(batch[0]))
        self.per_step[-1] += len(batch[0])
        if trainer.global_step == len(self.per_step):
            self.per_step.append(0)


SAVED_PLAN = json.loads((Path(__file__).parent / "saved_plan.json").read_text())


def saved_plan_of(batch_size):
    """The data of a saved plan with another value as its size."""
    return {**SAVED_PLAN, "chosen": {**SAVED_PLAN["chosen"], "batch_size": batch_size}}
