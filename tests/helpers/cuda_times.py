"""Cases of ``tests/gpu/test_cuda_times.py``, for a device whose work takes time."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import BatchFinder, MemoryProfiler
from tests.helpers.cuda_stub import gpu_trainer, print_case
from tests.helpers.profiled import Recorder, csv_rows

LARGEST_SIZE = 32
NUM_BATCHES = 40
LOG_STEPS = 8
PROFILED_SIZE = 8
COLLATE_SECONDS = 0.01
"""What a sample takes on the host, where workers would make batches ahead."""


class Tokens(LightningModule):
    """Three linear layers on the 512 tokens of each sample."""

    def __init__(self, batch_size: int = 2, *, has_progress: bool = False) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.has_progress = has_progress
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch.expand(-1, 512, 1024)).square().mean()
        self.log("loss", loss, prog_bar=self.has_progress)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            TensorDataset(torch.zeros(100_000, 1, 1)),
            batch_size=self.batch_size,
            collate_fn=slow_collate,
        )


def slow_collate(samples: list[tuple[Tensor]]) -> Tensor:
    time.sleep(COLLATE_SECONDS * len(samples))
    return torch.stack([sample for (sample,) in samples])


def ready_batches(size: int) -> DataLoader[Any]:
    """Batches that take no time on the host."""
    return DataLoader([torch.zeros(size, 1, 1)] * NUM_BATCHES, batch_size=None)


class SteadySteps(Callback):
    """Measures the seconds of a step, after the first ones."""

    FIRST = 10

    def __init__(self) -> None:
        self.start = 0.0
        self.step_seconds = 0.0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.FIRST:
            torch.cuda.synchronize()
            self.start = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.cuda.synchronize()
        self.step_seconds = (time.perf_counter() - self.start) / (NUM_BATCHES - self.FIRST)


def trained_seconds(size: int) -> float:
    """Seconds of a training step, where the batches are made ahead."""
    steps = SteadySteps()
    gpu_trainer(steps, max_epochs=1).fit(Tokens(size), ready_batches(size))
    return steps.step_seconds


def throughput() -> dict[str, Any]:
    """A search for the fastest size, and the times of training steps at its sizes."""
    finder = BatchFinder(
        objective="throughput", max_batch_size=LARGEST_SIZE, min_steps_per_epoch=None
    )
    gpu_trainer(finder, max_steps=1).fit(Tokens())
    trials = [trial for trial in finder.plan.trials if trial.step_seconds is not None]
    return {
        "size": finder.plan.batch_size,
        # A later trial of a size replaces the earlier one.
        "searched_ms": {one.batch_size: 1000 * one.step_seconds for one in trials},
        "trained_ms": {
            size: 1000 * trained_seconds(size)
            for size in sorted({LARGEST_SIZE, *(one.batch_size for one in trials)})
        },
    }


def waiting_percent(*, has_progress: bool) -> float:
    """The share of a training in which it waits for batches that are ready."""
    recorder = Recorder()
    trainer = gpu_trainer(
        MemoryProfiler(csv=False), logger=recorder, max_epochs=1, log_every_n_steps=NUM_BATCHES
    )
    trainer.fit(Tokens(LARGEST_SIZE, has_progress=has_progress), ready_batches(LARGEST_SIZE))
    return round(recorder.ours[-1][1]["speed/data_wait_pct"], 1)


def waiting() -> dict[str, Any]:
    """The share of waiting, where the loss is logged without and with a progress bar's value."""
    return {
        "logged_pct": waiting_percent(has_progress=False),
        "on_progress_bar_pct": waiting_percent(has_progress=True),
    }


class Evaluated(Tokens):
    """Its evaluation ends when the device has ended it, because its result is logged."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("evaluated", self.layers(batch.expand(-1, 512, 1024)).mean())


def profiled_ms(module: Tokens, **options: Any) -> dict[str, Any]:
    """The times of training steps in the metrics and the rows of a training."""
    recorder = Recorder()
    with TemporaryDirectory() as directory:
        trainer = gpu_trainer(
            MemoryProfiler(),
            logger=recorder,
            default_root_dir=directory,
            max_epochs=1,
            log_every_n_steps=LOG_STEPS,
            num_sanity_val_steps=0,
            **options,
        )
        trainer.fit(module, ready_batches(PROFILED_SIZE), ready_batches(LARGEST_SIZE))
        rows = csv_rows(Path(directory))
    return {
        "logged": [round(metrics["speed/step_ms"], 3) for _, metrics in recorder.ours],
        "rows": [float(row["step_ms"]) for row in rows if row["stage"] == "train"],
    }


def profiled() -> dict[str, Any]:
    """The times of steps without and with evaluations between two logs, and the exact one."""
    interval = LOG_STEPS + LOG_STEPS // 2
    return {
        "exact_ms": 1000 * trained_seconds(PROFILED_SIZE),
        "trained_ms": profiled_ms(Tokens(PROFILED_SIZE)),
        "evaluated_ms": profiled_ms(Evaluated(PROFILED_SIZE), val_check_interval=interval),
    }


CASES = {"profiled": profiled, "throughput": throughput, "waiting": waiting}


if __name__ == "__main__":
    print_case(CASES)
