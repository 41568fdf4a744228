"""Cases of ``tests/gpu/test_cuda_left.py``: what a search leaves, and what an error leaves."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.cuda_search import in_fork, start_device
from benchmarks.networks import group, project
from lightning_batchmem import BatchFinder, find_batch_size, find_batch_size_of_loop
from tests.helpers.cuda_stub import gpu_trainer, mib, print_case

DEVICE_BYTES = 2**30


class Mlp(LightningModule):
    """Two linear layers, which ``error`` may end before the optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.error: Exception | None = None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.error is not None:
            raise self.error

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(256, 64)), batch_size=self.batch_size)


class LiveAtStart(Callback):
    """Keeps the live bytes when training starts."""

    def __init__(self) -> None:
        self.allocated_bytes = 0

    def on_train_start(self, *_: Any) -> None:
        self.allocated_bytes = torch.cuda.memory_allocated()


def workspaces_of_trainer() -> dict[str, Any]:
    """Live bytes before the first step of a training, beyond the parameters."""
    module = Mlp()
    live = LiveAtStart()
    gpu_trainer(BatchFinder(max_batch_size=16, objective="memory"), live, max_steps=1).fit(module)
    left_bytes = live.allocated_bytes - sum(one.nbytes for one in module.parameters())
    return {"left_mib": mib(left_bytes)}


def workspaces_of_loop() -> dict[str, Any]:
    """Live bytes after the search of a plain loop, beyond those before it."""
    layers = Mlp().layers.cuda()
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        layers(batch).square().mean().backward()
        optimizer.step()

    def make_batch(size: int) -> Tensor:
        return torch.zeros(size, 64, device="cuda")

    before_bytes = torch.cuda.memory_allocated()
    find_batch_size_of_loop(step, make_batch, model=layers, optimizer=optimizer, max_batch_size=16)
    return {"left_mib": mib(torch.cuda.memory_allocated() - before_bytes)}


def search_alone(strategy: str) -> dict[str, Any]:
    """What ``find_batch_size`` leaves on a device that held nothing before."""
    options: dict[str, Any] = {}
    if strategy == "fsdp":
        options["strategy"] = FSDPStrategy(process_group_backend="gloo")
    trainer = gpu_trainer(max_steps=1, **options)
    module = Mlp()
    plan = find_batch_size(trainer, module, max_batch_size=16, objective="memory")
    # Both are alive until here, as in a script.
    return {
        "size": plan.batch_size,
        "allocated_mib": mib(torch.cuda.memory_allocated()),
        "reserved_mib": mib(torch.cuda.memory_reserved()),
        "is_on_host": next(module.parameters()).is_cpu and trainer.model is module,
    }


class TrainingAlone(Callback):
    """Reads the device before the first step of the training, and what happens until its end."""

    def on_train_start(self, *_: Any) -> None:
        self.start = self._counters()
        self.found = {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "random": torch.cuda.get_rng_state().tolist(),
        }

    def on_train_end(self, *_: Any) -> None:
        for name, count in self._counters().items():
            self.found[name] = count - self.start[name]

    def _counters(self) -> dict[str, int]:
        names = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")
        stats = torch.cuda.memory_stats()
        return {name: stats[name] for name in names}


def training(name: str, precision: str, size: int) -> dict[str, Any]:
    """What a training takes: with a search if ``size`` is 0, and at this size without one."""
    start_device(DEVICE_BYTES)
    module = project(group("device")[name], DEVICE_BYTES, size or 2)
    alone = TrainingAlone()
    finders = [] if size else [BatchFinder(min_steps_per_epoch=None, objective="memory")]
    options = {"max_epochs": 2, "limit_train_batches": 10, "limit_val_batches": 2}
    gpu_trainer(*finders, alone, precision=precision, **options).fit(module)
    return {"size": module.batch_size, **alone.found}


def beside_hard_coded(name: str, precision: str) -> dict[str, Any]:
    """A training after a search, and one with its size hard-coded, each in a new process."""
    searched = in_fork(training, name, precision, 0)
    return {
        "searched": searched,
        "hard_coded": in_fork(training, name, precision, searched["size"]),
    }


def scaler() -> dict[str, Any]:
    """The errors of two ``fit`` of one Trainer, of which a step of the user ends the first.

    It ends between unscaling and update, so that the scaler has the state of a step.
    """
    module = Mlp()

    def fail(*_: Any) -> None:
        module.error = KeyError("the user's error")

    first_training = LambdaCallback(on_train_start=fail)
    finder = BatchFinder(max_batch_size=16, objective="memory")
    trainer = gpu_trainer(finder, first_training, max_steps=3, precision="16-mixed")
    first = error_of(trainer, module)
    trainer.callbacks.remove(first_training)
    module.error = None
    return {"first": first, "second": error_of(trainer, module), "steps": trainer.global_step}


def error_of(trainer: Trainer, module: LightningModule) -> str:
    """The error that ends ``fit``, or an empty text."""
    try:
        trainer.fit(module)
    # The error is the result.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


CASES = {
    "workspaces_of_trainer": workspaces_of_trainer,
    "workspaces_of_loop": workspaces_of_loop,
    "search_alone": search_alone,
    "beside_hard_coded": beside_hard_coded,
    "scaler": scaler,
}

if __name__ == "__main__":
    print_case(CASES)
