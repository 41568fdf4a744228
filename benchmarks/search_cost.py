"""What does it cost to find a batch size, and does the size hold?

For each workload, this package's finder and both modes of Lightning's own search in a fresh process each, with the same
memory; then 20 steps of training at the size found, in five more. Every process is capped, so that what goes over
raises: on the host the kernel grants the same further bytes to each from the start of ``fit`` (RLIMIT_DATA, which
counts private memory that is mapped, used or not), on CUDA torch allows it the same share of the device. No finder is
told; this package's reads the cap from the system, and is given it in bytes on CUDA, where torch 2.5.1 does not tell.

    python -m benchmarks.search_cost            # all workloads, a Markdown table
    python -m benchmarks.search_cost --json F   # the raw figures too
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BatchSizeFinder
from torch.utils.data import DataLoader, default_collate

from benchmarks.common import DEVICE_SHARE, answer, in_fresh_process, machine, report, trainer_for
from benchmarks.workloads import WORKLOADS, RandomSamples, Training
from lightning_batchmem import BatchFinder
from lightning_batchmem.limits import limit_bytes
from lightning_batchmem.meters import meter_for
from lightning_batchmem.meters.out_of_memory import is_out_of_memory
from lightning_batchmem.records import MIB

MODULE = "benchmarks.search_cost"
WAYS = ("BatchFinder", "power", "binsearch")
NOT_ROOM_BYTES = 625 * MIB
"""Taken off a workload's host limit: the 450 MiB that a process holds after steps of two samples (measured, torch 2.13
on a CPU), and 175 MiB more, without which the benchmark takes twice as long."""


class Watched(Training):
    """A training that counts what goes through it. On the class, since a search puts back what an instance holds."""

    samples_by_size: ClassVar[Counter[int]] = Counter()
    out_of_memory: ClassVar[list[str]] = []

    @contextmanager
    def _watch(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                self.out_of_memory.append(described(error))
            raise

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.samples_by_size[len(batch[0])] += len(batch[0])
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        with self._watch():  # forward and backward are in its closure
            super().optimizer_step(*args, **kwargs)

    def transfer_batch_to_device(self, *args: Any, **kwargs: Any) -> Any:
        with self._watch():
            return super().transfer_batch_to_device(*args, **kwargs)

    def collate(self, samples: list[Any]) -> Any:
        with self._watch():
            return default_collate(samples)

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
        data = RandomSamples(self.sample, self.length)
        return DataLoader(data, batch_size=self.batch_size, collate_fn=self.collate)


class SearchEndedError(Exception):
    """The search is over, and training is another process's work."""


class Capped(Callback):
    """Caps the process as ``fit`` starts, and, behind a finder, ends it when that is through."""

    def __init__(self, room_bytes: int, *, only_search: bool) -> None:
        self._room_bytes = room_bytes
        self._only_search = only_search
        self.start_seconds = 0.0
        self.search_seconds: float | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if torch.cuda.is_available():
            device = trainer.strategy.root_device
            torch.cuda.set_per_process_memory_fraction(DEVICE_SHARE, device)
        else:
            status = re.search(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
            assert status is not None
            cap_bytes = int(status[1]) * 1024 + self._room_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        self.start_seconds = time.perf_counter()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.search_seconds = time.perf_counter() - self.start_seconds
        if self._only_search:
            raise SearchEndedError


def room_of(name: str) -> int:
    """Bytes that a process may hold: beyond those at the start of ``fit`` on the host, in all on CUDA."""
    if torch.cuda.is_available():
        return int(DEVICE_SHARE * torch.cuda.get_device_properties(0).total_memory)
    return limit_bytes(WORKLOADS[name].host_limit, budget_bytes=1) - NOT_ROOM_BYTES


def described(error: BaseException) -> str:
    """An error as one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def search(name: str, way: str) -> dict[str, Any]:
    """Search in this process."""
    room_bytes = room_of(name)
    ours = BatchFinder(memory_limit=room_bytes if torch.cuda.is_available() else None)
    finder = ours if way == "BatchFinder" else BatchSizeFinder(mode=way, init_val=2)
    module, capped = Watched(WORKLOADS[name]), Capped(room_bytes, only_search=True)
    error_text = None
    with tempfile.TemporaryDirectory() as directory:  # for the checkpoint that Lightning's finder writes
        trainer = trainer_for([finder, capped], 1, Path(directory))
        try:
            trainer.fit(module)
        except SearchEndedError:
            pass
        except Exception as error:  # noqa: BLE001 - whatever a finder cannot do is a finding
            error_text = described(error)
    plan = ours.plan
    return {
        "room_bytes": room_bytes,
        "batch_size": None if error_text else module.batch_size,
        "error": error_text,
        "out_of_memory": module.out_of_memory,
        "samples_by_size": dict(module.samples_by_size),
        "search_seconds": capped.search_seconds,
        "device_counters": meter_for(trainer.strategy.root_device).counters(),
        "plan": json.loads(plan.to_json()) if plan else None,
    }


def train(name: str, batch_size: int, steps: int) -> dict[str, Any]:
    """Train in this process; an error in ``result["error"]`` is what it did not survive."""
    trainer = trainer_for([Capped(room_of(name), only_search=False)], steps)
    try:
        trainer.fit(Watched(WORKLOADS[name], batch_size))
    except Exception as error:  # noqa: BLE001 - under the cap memory may run out anywhere, as anything
        return {"error": described(error)}
    assert trainer.global_step == steps
    return {"error": None}


def attempt(*arguments: str, timeout_seconds: float) -> dict[str, Any]:
    """The answer of a fresh process; where it has none, an ``error`` that says how it ended."""
    try:
        return in_fresh_process(MODULE, *arguments, timeout_seconds=timeout_seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"hangs: no end after {timeout_seconds:g} s"}
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:]
        return {"error": f"the process ended with {error.returncode}: {''.join(last)}"}


def compare(names: list[str], ways: list[str], *, survivors: int, steps: int, timeout_seconds: float) -> dict[str, Any]:
    """Search in each way and train at what was found, workload by workload."""
    results: dict[str, Any] = {}
    for name in names:
        results[name] = {}
        for way in ways:
            begin = time.monotonic()
            found = attempt("--search", name, way, timeout_seconds=timeout_seconds)
            size = found.get("batch_size")
            runs = survivors if size is not None else 0
            train_it = ("--train", name, str(size), "--steps", str(steps))
            found["trainings"] = [attempt(*train_it, timeout_seconds=timeout_seconds)["error"] for _ in range(runs)]
            results[name][way] = found
            took = time.monotonic() - begin
            survived = found["trainings"].count(None)
            print(f"{name}, {way}: {size}, survived {survived}/{runs}, {took:.0f} s in all", file=sys.stderr)
    return results


def table(results: dict[str, Any]) -> str:
    """The results as Markdown, and below it what went wrong, in its own words."""
    on_cuda = torch.cuda.is_available()
    head = "| workload | room MiB | finder | size | out-of-memory errors | sizes run | samples run / size "
    head += "| without the smallest | seconds | ms per sample of the size | trainings survived |"
    head += " allocator retries | allocator OOMs |" if on_cuda else ""
    lines, said = [head, "|" + "---|" * (head.count("|") - 1)], []
    for name, by_way in results.items():
        for way, found in by_way.items():
            lines.append(f"| {name} | {room_of(name) / MIB:,.0f} | {way} | {_figures(found)} |")
            if on_cuda:
                counters = found.get("device_counters", {})
                retries, ooms = (counters.get(key, "unknown") for key in ("num_alloc_retries", "num_ooms"))
                lines[-1] += f" {retries} | {ooms} |"
            said += [f"- {name}, {way}, search: {found['error']}"] if found["error"] else []
            failures = Counter(error for error in found["trainings"] if error)
            said += [f"- {name}, {way}, training ({count}): {error}" for error, count in failures.items()]
    return "\n".join([*lines, "", *said])


def _figures(found: dict[str, Any]) -> str:
    if "samples_by_size" not in found:
        return "none: see below" + " | unknown" * 7
    size, seconds = found["batch_size"], found["search_seconds"]
    samples = {int(run): count for run, count in found["samples_by_size"].items()}
    beyond_smallest = sum(samples.values()) - samples[min(samples)] if samples else 0
    oom = len(found["out_of_memory"])
    if size is None:
        totals = f"({sum(samples.values())}) | ({beyond_smallest})"
        return f"none: see below | {oom} | {len(samples)} | {totals} | none | none | none"
    survived = f"{found['trainings'].count(None)}/{len(found['trainings'])}"
    return (
        f"{size} | {oom} | {len(samples)} | {sum(samples.values()) / size:.1f} | {beyond_smallest / size:.1f} "
        f"| {seconds:.1f} | {seconds / size * 1e3:.0f} | {survived}"
    )


def arguments_of_lightnings() -> str:
    """What Lightning's finder was given, and its own defaults for the rest."""
    parameters = inspect.signature(BatchSizeFinder).parameters
    rest = [f"{name}={one.default!r}" for name, one in parameters.items() if name not in ("mode", "init_val")]
    return f"Lightning's BatchSizeFinder: mode, init_val=2, and by default {', '.join(rest)}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", nargs=2, metavar=("NAME", "WAY"), help="(internal) search in this process")
    parser.add_argument("--train", nargs=2, metavar=("NAME", "SIZE"), help="(internal) train in this process")
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS), help="these workloads only")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS, help="these finders only")
    parser.add_argument("--survivors", type=int, default=5, help="trainings at each size found")
    parser.add_argument("--steps", type=int, default=20, help="of each training")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each process; longer is a failure")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    seed_everything(0, verbose=False)
    if arguments.search:
        answer(search(*arguments.search))
    elif arguments.train:
        answer(train(arguments.train[0], int(arguments.train[1]), arguments.steps))
    else:
        limits = {"survivors": arguments.survivors, "steps": arguments.steps, "timeout_seconds": arguments.timeout}
        results = compare(arguments.only, arguments.ways, **limits)
        report(f"{machine()}; {arguments_of_lightnings()}", table(results), results, arguments.json)


if __name__ == "__main__":
    main()
