"""The parts of ``benchmarks.gpu_check``.

Each part yields cases: the first columns of a row, and a function that returns the others. It gets
the time (``time.time``) until which it should end. Cheap cases come first.
"""

from __future__ import annotations

import functools
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

from benchmarks import overhead as hooks
from benchmarks.common import one_line, trainer_for
from benchmarks.gpu_tests import run_tests
from benchmarks.networks import Network, group
from benchmarks.search import largest_that
from lightning_batchmem import BatchFinder
from lightning_batchmem.devices.accelerator import AcceleratorMemory
from lightning_batchmem.devices.out_of_memory import is_out_of_memory

Row = dict[str, Any]
Measure = Callable[[float], Row]
Cases = Iterator[tuple[Row, Measure]]

GB = 10**9
GIB = 2**30
DEVICE = torch.device("cuda", 0)
ALLOCATORS = (
    "default",
    "expandable_segments:True",
    "backend:cudaMallocAsync",
    "max_split_size_mb:128",
)
CONTRACT = "tests/gpu/test_cuda_contract.py"

SMALL_DEVICE_BYTES = 16 * GIB
LIMITS_GB = (8, 24)
"""At 80 GB a step of some networks takes seconds."""

SMALL_LIMITS_GB = (4, 8)
"""Limits on a device with less than :data:`SMALL_DEVICE_BYTES`, which is slow, too."""

NETWORKS = group("usual sizes")
SEARCHED = ("ResNet-18 SGD", "GPT 12x768 AdamW bf16", "U-Net 256 AdamW", "MLP 8x4096 Adam")
"""Networks by the operations of a step that fills the limit, fewest first."""

COMPILED = "MLP 8x1024 Adam"
COMPILED_LIMIT_GB = 1

SEARCH_STEPS = 20
"""Mean cost of a search in steps of the size found, which ``benchmarks.cuda_search`` prints."""

TRAINED_STEPS = 40
COMPILED_STEPS = 30
BISECTION_STEPS = 6


class EquallyLong:
    """Runs cases that take about the same time, as long as there is time for one more."""

    def __init__(self) -> None:
        self._longest_seconds = 0.0

    def run(self, measure: Measure, end: float) -> Row:
        begin = time.time()
        left_seconds = end - begin
        # Times of equal cases differ, most on a machine that is shared with others.
        if left_seconds < 1.2 * self._longest_seconds:
            return {
                "note": f"not run: the case before took {self._longest_seconds:.0f} s,"
                f" and {left_seconds:.0f} s are left"
            }
        row = measure(end)
        self._longest_seconds = max(self._longest_seconds, time.time() - begin)
        return row


def tests() -> Cases:
    """The tests in ``tests/gpu``; those of the contract with the default allocator only."""
    most = EquallyLong()
    for allocator in ALLOCATORS:
        case = {"allocator": allocator, "tests": "all but the contract"}
        measure = tested(allocator, "tests/gpu", f"--ignore={CONTRACT}")
        yield case, functools.partial(most.run, measure)
        if allocator == "default":
            yield {"allocator": allocator, "tests": "the contract"}, tested(allocator, CONTRACT)


def tested(allocator: str, *arguments: str) -> Measure:
    return lambda end: run_tests(allocator, end - time.time(), *arguments)


def train(network: Network, size: int, steps: int) -> float:
    """Train without Lightning, on the device; returns the seconds of the last step."""
    with DEVICE:
        module = network.module()
    optimizer = network.optimizer(module.parameters())
    begin = 0.0
    for _ in range(steps):
        torch.cuda.synchronize(DEVICE)
        begin = time.monotonic()
        inputs, target = network.batch(size, DEVICE)
        loss: Any = network.loss(module(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # Otherwise the next step would begin with the memory of this one.
        del inputs, target, loss
    torch.cuda.synchronize(DEVICE)
    return time.monotonic() - begin


def step_seconds(network: Network, size: int, steps: int) -> float | None:
    """Seconds of the last of these steps, or ``None`` if they end with an out-of-memory error."""
    try:
        return train(network, size, steps)
    # Out-of-memory errors have several types, so that ``is_out_of_memory`` looks at any error.
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        AcceleratorMemory(DEVICE).release_cached()


def too_slow(network: Network, limit_bytes: int, steps: int, end: float) -> str:
    """Why as many steps at the largest size would not end in time, or "" if they may.

    The size doubles until a step does not fit into the limit, or is too slow already.
    """
    size = 2
    with limited(limit_bytes):
        while (seconds := step_seconds(network, size, steps=2)) is not None:
            left_seconds = end - time.time()
            # The largest size may be up to twice this one.
            if 1.5 * steps * seconds > left_seconds:
                return (
                    f"not run: a step of {size} samples takes {seconds:.2g} s, and {steps} steps"
                    f" of the largest size would not end in the {left_seconds:.0f} s that are left"
                )
            size *= 2
    return ""


class Trained(LightningModule):
    """One of the large networks.

    Its batches are made on the device, so that loading takes no time.
    """

    def __init__(self, name: str, compiled: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.network = NETWORKS[name]
        self.batch_size = 2
        self.module = self.network.module()
        self.run = self.module if compiled is None else torch.compile(self.module, **compiled)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, target = self.network.batch(len(batch), self.device)
        loss: Tensor = self.network.loss(self.run(inputs), target)
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
    """A search and a training, and the largest size that trains a few steps.

    The smaller limit comes first.
    """
    # Faster matrix products keep this part within its time budget.
    torch.set_float32_matmul_precision("high")
    is_small = torch.cuda.get_device_properties(DEVICE).total_memory < SMALL_DEVICE_BYTES
    for limit_gb in SMALL_LIMITS_GB if is_small else LIMITS_GB:
        for name in SEARCHED:
            yield (
                {"network": name, "limit GB": limit_gb},
                functools.partial(compared, name, limit_gb * GB),
            )


def compared(name: str, limit_bytes: int, end: float) -> Row:
    free_bytes = torch.cuda.mem_get_info(DEVICE)[0]
    if free_bytes < limit_bytes:
        return {"note": f"not run: {free_bytes / GB:.1f} GB are free"}
    if "bf16" in name and not torch.cuda.is_bf16_supported(including_emulation=False):
        return {"note": "not run: the device has no native bfloat16"}
    network = NETWORKS[name]
    if note := too_slow(network, limit_bytes, SEARCH_STEPS + TRAINED_STEPS, end):
        return {"note": note}
    row = searched(functools.partial(Trained, name), TRAINED_STEPS, limit_bytes)
    if not row.get("found"):
        return row
    left_seconds = end - time.time()
    # It trains some 40 steps, too: some six sizes, with six steps each.
    if row["training s"] > left_seconds:
        return {**row, "note": f"no bisection: {left_seconds:.0f} s are left"}
    with limited(limit_bytes):
        largest = largest_that(
            lambda size: step_seconds(network, size, BISECTION_STEPS) is not None,
            row["found"],
            growth=1.25,
        )
    share = round(row["found"] / largest, 3) if largest else None
    return {**row, "bisection": largest, "share": share}


# The function needs the name of its part, which is also that of a builtin.
def compile() -> Cases:  # noqa: A001
    torch.set_float32_matmul_precision("high")
    modes = EquallyLong()
    for mode in ("default", "reduce-overhead"):
        yield {"mode": mode}, functools.partial(modes.run, functools.partial(compiled, mode))


def compiled(mode: str, end: float) -> Row:
    limit_bytes = COMPILED_LIMIT_GB * GB
    steps = SEARCH_STEPS + COMPILED_STEPS
    # Without a compilation, a step is not much slower, and its time is known soon.
    if note := too_slow(NETWORKS[COMPILED], limit_bytes, steps, end):
        return {"note": note}
    module = functools.partial(Trained, COMPILED, {"mode": mode})
    return searched(module, COMPILED_STEPS, limit_bytes)


def searched(module: Callable[[], Trained], count: int, limit_bytes: int) -> Row:
    """The result of one search and of a training of ``count`` steps after it.

    It has the allocator's events in both.
    """

    def read(*_: Any) -> None:
        counters = AcceleratorMemory(DEVICE).counters()
        readings.append(
            (time.monotonic(), counters.get("num_ooms", 0), counters.get("num_alloc_retries", 0))
        )

    finder = BatchFinder(min_steps_per_epoch=None, objective="memory")
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
        "training s": round(end[0] - start[0], 1),
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


def overhead() -> Cases:
    for interval in hooks.STEPS_BY_INTERVAL:
        yield {"log_every_n_steps": interval}, hook_times(interval)


def hook_times(interval: int) -> Measure:
    return lambda _: hooks.run("gpu", interval, turn=0)
