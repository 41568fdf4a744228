"""The parts of ``benchmarks.gpu_check``.

Each part yields cases: the first columns of a row, and a function that returns the others.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks import large_networks
from benchmarks import overhead as hooks
from benchmarks.common import ROOT, one_line, trainer_for
from benchmarks.search import largest_that
from lightning_batchmem import BatchFinder
from lightning_batchmem.devices.accelerator import AcceleratorMemory
from lightning_batchmem.devices.out_of_memory import is_out_of_memory

Row = dict[str, Any]
Cases = Iterator[tuple[Row, Callable[[], Row]]]

GB = 10**9
DEVICE = torch.device("cuda", 0)
ALLOCATORS = (
    "default",
    "expandable_segments:True",
    "backend:cudaMallocAsync",
    "max_split_size_mb:128",
)
LIMITS_GB = (8, 24)
"""At 80 GB a step of some networks takes seconds."""

SEARCHED = ("GPT 12x768 AdamW bf16", "U-Net 256 AdamW", "ResNet-18 SGD", "MLP 8x4096 Adam")


def tests() -> Cases:
    for allocator in ALLOCATORS:
        yield {"allocator": allocator}, functools.partial(tested, allocator)


def tested(allocator: str) -> Row:
    """Run pytest; the JSON file has its output if something failed."""
    variables = {
        name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")
    }
    # A wide terminal keeps pytest from cutting off the reasons in its summary.
    variables["COLUMNS"] = "300"
    if allocator != "default":
        # The newer name PYTORCH_ALLOC_CONF is unknown to torch 2.5, and torch 2.9 ignores it.
        variables["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    # Warnings are no errors here, because torch 2.8 to 2.11 warn of the older name of the variable,
    # and other machines have other warnings.
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        "-o",
        "addopts=",
        "--import-mode=importlib",
    ]
    command = [
        "timeout",
        "60",
        sys.executable,
        "-m",
        "pytest",
        *options,
        "-o",
        "timeout=30",
        "tests/gpu",
    ]
    begin = time.monotonic()
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    last_line = "".join(run.stdout.splitlines()[-1:])
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", last_line)
    row: Row = {kind: int(count) for count, kind in counts}
    row["seconds"] = round(time.monotonic() - begin, 1)
    if run.returncode:
        failed = re.findall(r"^(?:FAILED|ERROR) \S*?::(.+)", run.stdout, re.MULTILINE)
        row["error"] = (
            "; ".join(dict.fromkeys(failed))
            or f"pytest ended with {run.returncode} (124: after 60 s)"
        )
        row["log"] = run.stdout[-20_000:]
    return row


def network_of(name: str) -> large_networks.Network:
    return next(network for network in large_networks.NETWORKS if network.name == name)


def train(network: Any, size: int, steps: int) -> None:
    """Train without Lightning, on the device."""
    with DEVICE:
        module = network.module()
    optimizer = network.optimizer(module.parameters())
    for _ in range(steps):
        inputs, target = network.batch(size, DEVICE)
        loss = network.criterion(module(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # Otherwise the next step would begin with the memory of this one.
        del inputs, target, loss


class Trained(LightningModule):
    """One of the large networks.

    Its batches are made on the device, so that loading takes no time.
    """

    def __init__(self, name: str, compiled: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.network = network_of(name)
        self.batch_size = 2
        self.module = self.network.module()
        self.run = self.module if compiled is None else torch.compile(self.module, **compiled)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, target = self.network.batch(len(batch), self.device)
        loss: Tensor = self.network.criterion(self.run(inputs), target)
        return loss

    def configure_optimizers(self) -> Optimizer:
        optimizer: Optimizer = self.network.optimizer(self.module.parameters())
        return optimizer

    def train_dataloader(self) -> DataLoader[Any]:
        # mypy does not see that a sequence is enough, because DataLoader is annotated with Dataset.
        return DataLoader(range(2_000_000), batch_size=self.batch_size)  # type: ignore[arg-type]


@contextmanager
def limited(limit_bytes: int) -> Iterator[None]:
    """Limit the memory of this process, and start and end without cached memory."""
    AcceleratorMemory(DEVICE).release_cached()
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, limit_bytes / torch.cuda.mem_get_info(DEVICE)[1]), DEVICE
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
        AcceleratorMemory(DEVICE).release_cached()


def search() -> Cases:
    """A search and 40 steps, and the largest size that trains a few steps.

    The smaller limit comes first.
    """
    # Faster matrix products keep this part within its time budget.
    torch.set_float32_matmul_precision("high")
    for limit_gb in LIMITS_GB:
        for name in SEARCHED:
            yield (
                {"network": name, "limit GB": limit_gb},
                functools.partial(compared, name, limit_gb * GB),
            )


def compared(name: str, limit_bytes: int) -> Row:
    free_bytes = torch.cuda.mem_get_info(DEVICE)[0]
    if free_bytes < limit_bytes:
        return {"note": f"not run: {free_bytes / GB:.1f} GB are free"}
    row = searched(functools.partial(Trained, name), 40, limit_bytes)
    if row.get("found"):
        with limited(limit_bytes):
            largest = largest_that(
                functools.partial(trains, network_of(name)), row["found"], growth=1.25
            )
        row |= {
            "bisection": largest,
            "share": round(row["found"] / largest, 3) if largest else None,
        }
    return row


# The function needs the name of its part, which is also that of a builtin.
def compile() -> Cases:  # noqa: A001
    torch.set_float32_matmul_precision("high")
    for mode in ("default", "reduce-overhead"):
        module = functools.partial(Trained, "MLP 8x4096 Adam", {"mode": mode})
        yield {"mode": mode}, functools.partial(searched, module, 30, LIMITS_GB[0] * GB)


def searched(module: Callable[[], Trained], count: int, limit_bytes: int) -> Row:
    """The result of one search and of a training of ``count`` steps after it.

    It has the allocator's events in both.
    """

    def read(*_: Any) -> None:
        counters = AcceleratorMemory(DEVICE).counters()
        readings.append(
            (time.monotonic(), counters.get("num_ooms", 0), counters.get("num_alloc_retries", 0))
        )

    finder = BatchFinder(min_steps_per_epoch=None)
    row = Row()
    readings = list[tuple[float, int, int]]()
    with limited(limit_bytes):
        read()
        try:
            # Training starts after the search, so that this reading lies between the two.
            trainer_for([finder, LambdaCallback(on_train_start=read)], count).fit(module())
        # Any failure is a result, and the size that was found before it is another.
        except Exception as error:  # noqa: BLE001
            row["error"] = one_line(error)
        read()
    begin = readings[0]
    start = readings[1]
    end = readings[-1]
    row |= {
        "search s": round(start[0] - begin[0], 1),
        "out of memory in search": start[1] - begin[1],
    }
    row |= {"in training": end[1] - start[1], "retries in training": end[2] - start[2]}
    if (plan := finder.plan) is not None:
        row = {
            "found": plan.batch_size,
            "limited by": plan.limited_by,
            "verified": plan.verified,
            **row,
        }
        row["tried"] = " ".join(f"{trial.batch_size}{trial.kind[0]}" for trial in plan.trials)
    return row


def trains(network: Any, size: int) -> bool:
    """Whether 6 steps at ``size`` complete without an out-of-memory error."""
    try:
        train(network, size, steps=6)
    # Out-of-memory errors have several types, so that ``is_out_of_memory`` looks at any error.
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        AcceleratorMemory(DEVICE).release_cached()
    return True


def overhead() -> Cases:
    for interval in hooks.STEPS_BY_INTERVAL:
        yield {"log_every_n_steps": interval}, functools.partial(hooks.run, "gpu", interval, 0)
