"""Search and train on a CUDA device at several limits, and compare with the largest size found by bisection."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks.common import one_line, trainer_for
from lightning_batchmem import BatchFinder
from lightning_batchmem.devices.cuda import CudaMemory
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from tests.simulated_cuda.networks import NETWORKS, Network

GIB = 2**30
DEVICE = torch.device("cuda", 0)
Rows = Iterator[dict[str, Any]]

SEARCHED = ("ResNet-18 SGD", "U-Net 256 AdamW", "GPT 12x768 AdamW bf16", "MLP 8x4096 Adam")
FRACTIONS = (0.1, 0.2, 0.4)
LARGEST_BYTES = 48 * GIB
"""The fractions are of a larger device's first 48 GiB, so that 200 steps take seconds."""

BY_NAME = {network.name: network for network in NETWORKS}


class Trained(LightningModule):
    """One of the simulated networks; its batches are made on the device, so that loading takes no time.

    Args:
        network: what is trained.
        batch_size: samples in a batch.
        compiled: arguments of ``torch.compile``; ``None``: not compiled.
    """

    def __init__(self, network: Network, batch_size: int = 2, *, compiled: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.network, self.batch_size = network, batch_size
        self.module = network.module()
        self.run = self.module if compiled is None else torch.compile(self.module, **compiled)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, target = batch_on(self.device, self.network, len(batch))
        return self.network.criterion(self.run(inputs), target)

    def configure_optimizers(self) -> Optimizer:
        return self.network.optimizer(self.module.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(range(2_000_000), batch_size=self.batch_size)  # type: ignore[arg-type]  # a sequence


def batch_on(device: torch.device, network: Network, size: int) -> list[Tensor]:
    """Inputs and targets of zeros."""
    return [torch.zeros(one.shape, dtype=one.dtype, device=device) for one in network.batch(size)]


class Counters(Callback):
    """The allocator's counters when training begins, which is after the search."""

    def __init__(self) -> None:
        self.begin, self.begin_seconds = CudaMemory(DEVICE).counters(), time.monotonic()
        self.searched = dict(self.begin)
        self.search_seconds = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.searched = CudaMemory(DEVICE).counters()
        self.search_seconds = time.monotonic() - self.begin_seconds

    def row(self) -> dict[str, Any]:
        """Events in the search and in the training after it."""
        now, zero = CudaMemory(DEVICE).counters(), dict.fromkeys(("num_ooms", "num_alloc_retries"), 0)
        begin, searched, now = ({**zero, **one} for one in (self.begin, self.searched, now))
        return {
            "search s": round(self.search_seconds, 1),
            "out of memory in search": searched["num_ooms"] - begin["num_ooms"],
            "in training": now["num_ooms"] - searched["num_ooms"],
            "retries in training": now["num_alloc_retries"] - searched["num_alloc_retries"],
        }


@contextmanager
def limited(limit_bytes: float) -> Iterator[None]:
    """Limit the memory of this process, and start and end without cached memory."""
    CudaMemory(DEVICE).release_cached()
    torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.mem_get_info(DEVICE)[1], DEVICE)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
        gc.collect()
        CudaMemory(DEVICE).release_cached()


def search() -> Rows:
    """A search and 200 steps, and the largest size that trains 20 steps."""
    room_bytes = min(torch.cuda.mem_get_info(DEVICE)[1], LARGEST_BYTES)
    for fraction in FRACTIONS:
        for name in SEARCHED:
            limit_bytes = fraction * room_bytes
            row: dict[str, Any] = {"network": name, "limit GiB": round(limit_bytes / GIB, 1)}
            with limited(limit_bytes):
                row |= searched(Trained(BY_NAME[name]), 200)
            if row.get("found"):
                with limited(limit_bytes):
                    largest = largest_trained(functools.partial(trains, BY_NAME[name]), row["found"])
                row |= {"bisection": largest, "share": round(row["found"] / largest, 3) if largest else None}
            yield row


def compile_modes() -> Rows:
    """A search and 50 steps with compiled modules."""
    for mode in ("default", "reduce-overhead"):
        with limited(0.2 * min(torch.cuda.mem_get_info(DEVICE)[1], LARGEST_BYTES)):
            module = Trained(BY_NAME["MLP 8x4096 Adam"], compiled={"mode": mode})
            yield {"mode": mode, **searched(module, 50)}


def searched(module: Trained, steps: int) -> dict[str, Any]:
    """The result of one search, and of a training of ``steps`` steps after it."""
    finder, counters = BatchFinder(), Counters()
    row: dict[str, Any] = {}
    try:
        trainer_for([finder, counters], steps).fit(module)
    except Exception as error:  # noqa: BLE001 - a failure is a result
        row["error"] = one_line(error)
    plan = finder.plan
    if plan is not None:
        row |= {"found": plan.batch_size, "limited by": plan.limited_by, "verified": plan.verified}
        row |= {"sizes": len({trial.batch_size for trial in plan.trials})}
    return {**row, **counters.row()}


def trains(network: Network, size: int) -> bool:
    """Whether 20 steps at ``size`` complete without an out-of-memory error."""
    try:
        with torch.device(DEVICE):
            module = network.module()
        optimizer = network.optimizer(module.parameters())
        for _ in range(20):
            inputs, target = batch_on(DEVICE, network, size)
            loss = network.criterion(module(inputs), target)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        module = optimizer = inputs = target = loss = None  # type: ignore[assignment]
        CudaMemory(DEVICE).release_cached()
    return True


def largest_trained(trains_at: Callable[[int], bool], start: int) -> int:
    """The largest size that trains, to 2 % or one sample; searched from ``start``."""
    low, high = (start, 0) if trains_at(start) else (0, start)
    while not high:
        larger = max(low + 1, low * 5 // 4)
        low, high = (larger, 0) if trains_at(larger) else (low, larger)
    while high - low > max(1, low // 50):
        middle = (low + high) // 2 if low else max(1, high * 3 // 4)
        low, high = (middle, high) if trains_at(middle) else (low, middle)
    return low
