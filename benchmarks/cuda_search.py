"""Searches on PyTorch's own CUDA allocator, and the largest sizes that train: one table.

A CUDA build of torch runs on a stub of the CUDA runtime (``tests/cuda_stub``), on which this
command starts itself. Each search is one of a real Trainer, followed by a training of three epochs
of 20 steps with validation, which end with the last batch of the loader.

Columns: ``true`` is the largest size that trains so in a process of its own. ``quiet`` is the
largest that does so within 0.95 of the free memory, without a retry of the allocator after the
first step. For each finder: the size, its share of ``quiet``, the end of its training, the training
steps of its search, their samples in units of the chosen size (cost), and out-of-memory errors of
the search. Tried: ``p`` probe, ``r`` rehearsal, ``!`` out of memory, ``~`` allocator retries. A
search that ends with an error is right where ``quiet`` is 0.

    # the whole table; some thirty minutes on two cores
    python -m benchmarks.cuda_search
    # some of its rows
    python -m benchmarks.cuda_search --only mlp "checkpointed gpt"
    # the variants: another precision; Hopper's workspaces; expandable segments
    python -m benchmarks.cuda_search --precision bf16-mixed
    CUDA_STUB_CAPABILITY=9.0 python -m benchmarks.cuda_search
    # with cuDNN, which plans for this GPU; the devices keep their small memory
    python -m benchmarks.cuda_search --gpu RTX-4090
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python -m benchmarks.cuda_search
    # also to benchmarks/results; each variant has a file of its own
    python -m benchmarks.cuda_search --write
    # rows also to a file, from which the same command continues
    python -m benchmarks.cuda_search --file /tmp/rows.json
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import batch_size_scaling

from benchmarks.common import (
    ROOT,
    command_line,
    markdown,
    one_line,
    read_rows,
    report,
    silence,
    trainer_for,
    write_rows,
)
from benchmarks.networks import group, project
from benchmarks.networks.trainings import BATCHES_RUN, EPOCH_BATCHES, Project
from benchmarks.search import largest_that
from lightning_batchmem import BatchFinder
from lightning_batchmem._lightning.data_source import discard_train_loader
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.simulated_gpu.gpus import gpu_named
from lightning_batchmem.simulated_gpu.launch import kernels_of

EPOCHS = 3
QUIET_SHARE = 0.95
"""Share of the free memory for ``quiet``: that of ``limit_share`` in the policy of a search."""

NEAR_SHARE = 0.93
"""A search is good if it finds this share of ``quiet``, or a size of at most one sample less."""

DEFAULT_PRECISION = "32-true"

MOST_SAMPLES = 10**9
"""The largest size that Lightning's finder may try; its default is 8,192."""

WAYS: dict[str, Callable[[], Callback]] = {
    "BatchFinder": functools.partial(BatchFinder, min_steps_per_epoch=None, objective="memory"),
    "Lightning power": functools.partial(BatchSizeFinder, mode="power", max_val=MOST_SAMPLES),
    "Lightning binsearch": functools.partial(
        BatchSizeFinder, mode="binsearch", max_val=MOST_SAMPLES
    ),
}

NETWORKS = group("device", "device, cuDNN")

WITH_CUDNN = (
    *("vit", "unet", "resnet", "wavenet", "mixer", "autoencoder"),
    *group("device, cuDNN"),
)
"""The networks whose layers run on cuDNN."""

FORK = multiprocessing.get_context("fork")


class Watch(Callback):
    """Reads the allocator's events when training starts, and after its first step.

    After a search it also makes the epochs of the training short.
    """

    def __init__(self) -> None:
        self.is_started = False
        self.search_batches: list[int] = []
        self.search_ooms = 0
        self.steps = 0
        self.retries_of_first_step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Project)
        self.is_started = True
        pl_module.epoch_batches = EPOCH_BATCHES
        # Lightning's finder leaves the loader of its search.
        discard_train_loader(trainer)
        self.search_batches = BATCHES_RUN.copy()
        self.search_ooms = counter("num_ooms")

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1
        if self.steps == 1:
            self.retries_of_first_step = counter("num_alloc_retries")


def counter(name: str) -> int:
    return int(torch.cuda.memory_stats_as_nested_dict().get(name, 0))


def fit(module: Project, precision: str, finder: Callback | None = None) -> tuple[Watch, str]:
    """Train; returns what was watched, and "ok" or the error that ended the training."""
    watch = Watch()
    finders = [] if finder is None else [finder]
    trainer = trainer_for(
        [*finders, watch],
        -1,
        accelerator="gpu",
        max_epochs=EPOCHS,
        limit_val_batches=2,
        precision=precision,
    )
    try:
        trainer.fit(module)
    # Out-of-memory errors have several types, so that ``is_out_of_memory`` looks at any error.
    except Exception as error:
        # A search that finds no size ends with an error before the training.
        if not (watch.is_started and is_out_of_memory(error)):
            raise
        return watch, f"dies in step {watch.steps + 1}"
    return watch, "ok"


def start_device(device_bytes: int, share: float = 1.0) -> None:
    """Set the memory of the stub's device, before CUDA starts in this process.

    ``share`` of the free memory may be used.
    """
    silence()
    ctypes.CDLL(None).cuda_stub_resize(ctypes.c_size_t(device_bytes))
    if share < 1:
        free_bytes = torch.cuda.mem_get_info()[0]
        torch.cuda.set_per_process_memory_fraction(share * free_bytes / device_bytes)


OUTCOMES = {"ok": "", "out_of_memory": "!", "allocator_retry": "~"}
"""Outcome of a trial -> its mark in the table."""


def search(name: str, device_bytes: int, precision: str, way: str) -> dict[str, Any]:
    """The size that a finder chooses, the cost of its search, and the end of its training."""
    start_device(device_bytes)
    finder = WAYS[way]()
    module = project(NETWORKS[name], device_bytes)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            watch, outcome = fit(module, precision, finder)
    # A finder may end with any error, and the error is its result.
    except Exception as error:  # noqa: BLE001
        return {"size": 0, "training": one_line(error)}
    found: dict[str, Any] = {
        "size": module.batch_size,
        "training": outcome,
        "steps": len(watch.search_batches),
        "cost": sum(watch.search_batches) / module.batch_size,
        "errors": watch.search_ooms,
    }
    if isinstance(finder, BatchFinder) and finder.plan is not None:
        found["tried"] = " ".join(
            f"{trial.batch_size}{trial.kind[0]}{OUTCOMES.get(trial.outcome, '?')}"
            for trial in finder.plan.trials
        )
    return found


def trains(name: str, device_bytes: int, precision: str, size: int, share: float) -> bool:
    """Whether a training at ``size`` completes; below a ``share`` of 1, also without retries."""
    start_device(device_bytes, share)
    watch, outcome = fit(project(NETWORKS[name], device_bytes, size), precision)
    is_quiet = counter("num_alloc_retries") == watch.retries_of_first_step
    return outcome == "ok" and (share == 1 or is_quiet)


def _send(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    sender.send(function(*arguments))


def in_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function in a copy of this process, in which CUDA has not started.

    A copy starts in milliseconds, where a new process would import torch first.

    Raises:
        RuntimeError: if the copy ends without a result.
    """
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_send, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"{function.__name__}{arguments} ended with {process.exitcode}"
        ) from None
    finally:
        receiver.close()
        process.join()


def measure(name: str, gibibytes: float, precision: str, ways: list[str]) -> dict[str, Any]:
    """One row: the searches of these finders, and the largest sizes that train."""
    setup = (name, int(gibibytes * 2**30), precision)
    found = {way: in_fork(search, *setup, way) for way in ways}
    start = max([2, *(result["size"] for result in found.values())])

    def largest(share: float) -> int:
        return largest_that(
            lambda size: bool(in_fork(trains, *setup, size, share)),
            start,
            growth=1.1,
            resolution=0.005,
        )

    row = {
        "network": name,
        "GiB": gibibytes,
        "true": largest(1.0),
        "quiet": largest(QUIET_SHARE),
        "found": found,
    }
    print(row, file=sys.stderr, flush=True)
    return row


def is_good(row: dict[str, Any], way: str) -> bool:
    """Whether the search found nearly the largest quiet size, and its training survived.

    Where no size is quiet, a search that ends without one is right.
    """
    result = row["found"][way]
    if row["quiet"] == 0 and result["size"] == 0:
        return True
    is_near = result["size"] >= min(NEAR_SHARE * row["quiet"], row["quiet"] - 1)
    return bool(is_near and result["training"] == "ok")


def columns(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the printed table."""
    cells = {key: row[key] for key in ("network", "GiB", "true", "quiet")}
    for way, result in row["found"].items():
        share = result["size"] / max(1, row["quiet"])
        cells[way] = f"{result['size']} ({share:.2f}), {result['training']}"
        if result["size"] == 0:
            cells[way] = f"none: {result['training']:.80}"
        if "steps" in result:
            cells[f"{way}: steps, cost, errors"] = (
                f"{result['steps']}, {result['cost']:.0f}, {result['errors']}"
            )
        if "tried" in result:
            cells[f"{way}: tried"] = result["tried"]
    return cells


def summary(rows: list[dict[str, Any]], way: str) -> str:
    """The searches of one finder together, in one line."""
    results = [row["found"][way] for row in rows]
    searched = [result for result in results if "steps" in result]
    good = sum(is_good(row, way) for row in rows)
    died = sum(result["size"] > 0 and result["training"] != "ok" for result in results)
    shares = [row["found"][way]["size"] / row["quiet"] for row in rows if row["quiet"] > 0]
    lowest = min(shares, default=1)
    means = {
        key: statistics.fmean(result[key] for result in searched) if searched else float("nan")
        for key in ("steps", "cost", "errors")
    }
    return (
        f"{way}: {good} of {len(rows)} at {NEAR_SHARE} of quiet or one sample below, with a"
        f" training that survives, or without a size where none is quiet; {died} trainings end with"
        f" an error; lowest share of quiet"
        f" {lowest:.2f}; means: {means['steps']:.0f} steps, cost {means['cost']:.0f},"
        f" {means['errors']:.1f} out-of-memory errors"
    )


def variant(precision: str, gpu: str | None) -> str:
    """What differs from the default of the stub, for the name of a file; empty if nothing does."""
    if gpu is not None:
        return f"_cudnn_{gpu}" + (f"_{precision}" if precision != DEFAULT_PRECISION else "")
    capability = os.environ.get("CUDA_STUB_CAPABILITY", "8.0")
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    settings = [
        precision if precision != DEFAULT_PRECISION else "",
        f"capability_{capability}" if float(capability) != 8 else "",
        allocator.replace(":", "_").replace(",", "_"),
    ]
    return "".join(f"_{setting}" for setting in settings if setting)


def written_rows(path: Path | None, ways: list[str]) -> dict[tuple[str, float], dict[str, Any]]:
    """The rows of an earlier run that have all of these finders, by network and memory."""
    return {
        (row["network"], row["GiB"]): row
        for row in read_rows(path)
        if set(ways) <= set(row["found"])
    }


def variables_of(name: str) -> dict[str, str]:
    """Settings of the stub for a GPU, without its memory, and with cuDNN."""
    gpu = gpu_named(name)
    _, architecture = kernels_of(gpu)
    major, minor = gpu.capability
    settings = {
        "CUDNN": 1,
        "CAPABILITY": f"{major}.{minor}",
        "KERNELS": architecture,
        "SMS": gpu.multiprocessors,
        "L2_MIB": gpu.l2_cache_bytes and gpu.l2_cache_bytes / 2**20,
    }
    return {f"CUDA_STUB_{key}": str(value) for key, value in settings.items() if value is not None}


def start_on_stub(gpu: str | None, module: str = "benchmarks.cuda_search") -> None:
    """Replace this process by the same command on the stub, unless it runs there.

    Args:
        gpu: name of a GPU for which cuDNN plans; None: the default device, without cuDNN.
        module: the module of the command.
    """
    # With this variable torch looks for devices without starting CUDA, so that copies of this
    # process can start it.
    # Source: https://docs.pytorch.org/docs/stable/cuda_environment_variables.html
    variable = "PYTORCH_NVML_BASED_CUDA_CHECK"
    if os.environ.get(variable) == "1" and hasattr(ctypes.CDLL(None), "cuda_stub_resize"):
        return
    os.environ[variable] = "1"
    if gpu is not None:
        os.environ.update(variables_of(gpu))
    launcher = str(ROOT / "tests" / "cuda_stub" / "run")
    os.execv(launcher, [launcher, sys.executable, "-m", module, *sys.argv[1:]])


def main() -> None:
    parser = command_line(__doc__, NETWORKS, writes=True, continues=True)
    parser.add_argument(
        "--precision", default=DEFAULT_PRECISION, help="of the Trainer; default: %(default)s"
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="rows at a time; default: %(default)s"
    )
    parser.add_argument(
        "--ways", nargs="+", default=list(WAYS), choices=WAYS, help="of %(choices)s", metavar="WAY"
    )
    parser.add_argument(
        "--gibibytes",
        nargs="+",
        type=float,
        help="memory of the device; default: three sizes for each network",
    )
    parser.add_argument("--gpu", help="GPU for which cuDNN plans; default: no cuDNN")
    parser.set_defaults(only=None)
    chosen = parser.parse_args()
    names = chosen.only or (group("device") if chosen.gpu is None else WITH_CUDNN)
    start_on_stub(chosen.gpu)
    # Lightning 2.6.6 does not pass ``max_val`` to all calls of this function, so that its search
    # would end at the default. It is raised, because the search is judged and not this number.
    adjust = batch_size_scaling._adjust_batch_size
    adjust.__defaults__ = (*(adjust.__defaults__ or ())[:-1], MOST_SAMPLES)
    # Kernels do nothing here, so threads would only wait for each other.
    torch.set_num_threads(1)
    cells = [
        (name, gibibytes)
        for name in names
        for gibibytes in chosen.gibibytes or NETWORKS[name].gibibytes
    ]
    name = f"cuda_search{variant(chosen.precision, chosen.gpu)}"
    kept = written_rows(chosen.file, chosen.ways)
    by_cell = dict(kept)
    with ProcessPoolExecutor(chosen.processes, mp_context=FORK) as pool:
        futures = {
            pool.submit(measure, *cell, chosen.precision, chosen.ways): cell
            for cell in cells
            if cell not in kept
        }
        for future in as_completed(futures):
            by_cell[futures[future]] = future.result()
            write_rows(chosen.file, by_cell.values())
    # The rows are in the order of the networks.
    order = {network: position for position, network in enumerate(NETWORKS)}
    rows = [by_cell[cell] for cell in sorted(by_cell, key=lambda cell: (order[cell[0]], cell[1]))]
    notes = [summary(rows, way) for way in chosen.ways]
    if kept:
        notes.append(f"{len(kept)} of the rows are of an earlier run")
    report(name, markdown([columns(row) for row in rows], notes), write=chosen.write)


if __name__ == "__main__":
    main()
