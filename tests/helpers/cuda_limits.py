"""Cases of ``tests/gpu/test_cuda_limits.py``: what a search and its training take."""

from __future__ import annotations

from typing import Any
from unittest import mock

import psutil
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.cuda_search import EPOCHS, Watch
from benchmarks.networks import group, project
from lightning_batchmem import BatchFinder
from tests.helpers.cuda_stub import PeakOfTraining, gpu_trainer, mib, print_case
from tests.helpers.lawful import MIB


def memory_limit() -> dict[str, Any]:
    """A search under ``memory_limit``, and three epochs of 20 steps at the size that it found."""
    limit_mib = 700
    finder = BatchFinder(memory_limit=limit_mib * MIB, min_steps_per_epoch=None, objective="memory")
    peak = PeakOfTraining()
    module = project(group("device")["resnet"], torch.cuda.mem_get_info()[1])
    gpu_trainer(finder, Watch(), peak, max_epochs=EPOCHS, limit_val_batches=2).fit(module)
    (rehearsed_bytes,) = (
        trial.memory.held_peak_bytes
        for trial in finder.plan.trials
        if trial.kind == "rehearsal" and trial.batch_size == module.batch_size
    )
    return {
        "size": module.batch_size,
        "limit_mib": limit_mib,
        "rehearsed_mib": mib(rehearsed_bytes),
        "trained_mib": mib(peak.peak_bytes),
    }


class RowsOnDevice(Dataset[tuple[Tensor, Tensor]]):
    """A data set of 295 MiB on the device.

    A worker cannot read it: on a device none can use CUDA, and on the stub none can make a tensor
    there.
    """

    def __init__(self) -> None:
        self.rows = torch.empty(75_520, 1024, device="cuda")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], torch.tensor(index % 8, device=self.rows.device)


class LinearOn(LightningModule):
    """A linear layer on a data set."""

    def __init__(self, dataset: Dataset[Any], width: int) -> None:
        super().__init__()
        self.batch_size = 2
        self.dataset = dataset
        self.layer = nn.Linear(1024, width, bias=False, device="cuda")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=self.batch_size)


def data_on_device() -> dict[str, Any]:
    """The largest block that a search takes, where the data set lies on the device."""
    dataset = RowsOnDevice()
    module = LinearOn(dataset, 8)
    torch.cuda.memory._record_memory_history(context=None)
    gpu_trainer(BatchFinder(max_batch_size=128, objective="memory"), max_steps=1).fit(module)
    (events,) = torch.cuda.memory._snapshot()["device_traces"]
    largest_bytes = max(event["size"] for event in events if event["action"] == "alloc")
    torch.cuda.memory._record_memory_history(enabled=None)
    return {
        "size": module.batch_size,
        "data_mib": mib(dataset.rows.nbytes),
        "largest_block_mib": mib(largest_bytes),
    }


class Samples(Dataset[tuple[Tensor, ...]]):
    """A thousand small samples on the host."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return (torch.zeros(1024),)


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def weights_on_host() -> dict[str, Any]:
    """How the resident set grows in a search, where the weights are larger than free memory.

    Kernels change no weights on the stub, so a hook does. The last step is that of the training.
    """
    module = LinearOn(Samples(), 2**16)
    weight = module.layer.weight.detach()
    # This writes the weights, so that writing them back later takes no more memory.
    weight.copy_(torch.zeros(weight.shape))
    # The stub's device lies in the resident set too, as far as it was written.
    resident = [resident_bytes()]
    first_rows = []

    def change_weights(*_: Any) -> None:
        resident.append(resident_bytes())
        first_rows.append(weight[0].cpu())
        weight[0].copy_(torch.ones(weight.shape[1]))

    module.layer.register_forward_hook(change_weights)
    free_bytes = 64 * MIB
    host = psutil.virtual_memory()._replace(available=free_bytes, free=free_bytes)
    with mock.patch("psutil.virtual_memory", return_value=host):
        gpu_trainer(BatchFinder(max_batch_size=16, objective="memory"), max_steps=1).fit(module)
    return {
        "size": module.batch_size,
        "weights_mib": mib(weight.nbytes),
        "free_mib": mib(free_bytes),
        "grown_mib": mib(max(resident) - resident[0]),
        "training_starts_at_zero": not first_rows[-1].any(),
    }


CASES = {
    "memory_limit": memory_limit,
    "data_on_device": data_on_device,
    "weights_on_host": weights_on_host,
}

if __name__ == "__main__":
    print_case(CASES)
