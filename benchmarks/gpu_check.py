"""Everything that a CUDA device has to confirm, in under ten minutes and without a network connection.

    python -m benchmarks.gpu_check                        # all parts; writes benchmarks/results/<device>/gpu_check.*
    python -m benchmarks.gpu_check --only simulator sync  # these parts; prints the tables only

Parts, each in a process with a time budget; what fails or takes too long is a row of its table:

- tests: ``tests/gpu`` with four configurations of the allocator;
- simulator: peaks of ResNet-18 on the device and in ``tests/simulated_cuda``;
- search: a search and 200 steps for four networks at three memory fractions, and the largest size found by bisection;
- compile: a search and 50 steps with ``torch.compile``, without and with CUDA graphs;
- overhead: time inside the hooks of both callbacks;
- sync: whether hooks of MemoryProfiler wait for the device.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from benchmarks import overhead
from benchmarks.common import ROOT, emit, in_fresh_process, one_line, report, trainer_for
from benchmarks.gpu_search import BY_NAME, DEVICE, Rows, Trained, batch_on, compile_modes, search
from lightning_batchmem import BatchFinder, MemoryProfiler
from lightning_batchmem.devices.cuda import CudaMemory
from tests.simulated_cuda.device import SimulatedCuda
from tests.simulated_cuda.trace import trace_of

MIB = 2**20

ALLOCATORS = ("", "expandable_segments:True", "backend:cudaMallocAsync", "max_split_size_mb:128")


def tests() -> Rows:
    """``tests/gpu`` with each configuration of the allocator."""
    for setting in ALLOCATORS:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
        begin = time.monotonic()
        row: dict[str, Any] = {"allocator": setting or "default"}
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=70)
        except subprocess.TimeoutExpired as error:
            row["error"] = one_line(error)
        else:
            counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", "".join(done.stdout.splitlines()[-1:]))
            row |= {kind.rstrip("s"): int(count) for count, kind in counts}
            failed = re.findall(r"^(?:FAILED|ERROR) \S*?::(\S+)", done.stdout, re.MULTILINE)
            if done.returncode:
                row["error"] = ", ".join(failed) or f"pytest ended with {done.returncode}"
        yield {**row, "seconds": round(time.monotonic() - begin, 1)}


def simulator() -> Rows:
    """Peaks of the second step and of the later ones, simulated and on the device."""
    name = "ResNet-18 SGD"
    memory, network = CudaMemory(DEVICE), BY_NAME[name]
    simulated = SimulatedCuda(trace_of(name), torch.cuda.mem_get_info(DEVICE)[1])
    for size in (8, 32, 64, 128):
        with torch.device(DEVICE):
            module = network.module()
        optimizer = network.optimizer(module.parameters())
        simulated.fresh()
        simulated.load_model()
        for step in range(1, 6):
            memory.reset_peak()
            simulated.reset_peak()
            inputs, target = batch_on(DEVICE, network, size)
            loss = network.criterion(module(inputs), target)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            del inputs, target, loss
            simulated.train_step(size)
            if step in (2, 5):
                row: dict[str, Any] = {"network": name, "size": size, "step": step}
                for kind in ("requested_bytes", "allocated_bytes", "reserved_bytes"):
                    expected, found = (getattr(one.peak(), kind) for one in (simulated, memory))
                    kind = kind.removesuffix("_bytes")
                    row |= {f"{kind} simulated MiB": round(expected / MIB, 1)}
                    row |= {f"{kind} MiB": None if found is None else round(found / MIB, 1)}
                yield row
        del module, optimizer
        memory.release_cached()


def hook_times() -> Rows:
    """Mean time per step inside the hooks of each callback, and the time of a search."""
    for interval in overhead.STEPS_BY_INTERVAL:
        means = overhead.run("gpu", interval, 0)["mean_seconds"]
        yield {"log_every_n_steps": interval} | {f"{name} us": round(1e6 * mean, 1) for name, mean in means.items()}
    timer, finder = overhead.HookTimer(), BatchFinder(max_batch_size=64)
    timer.time_callback("BatchFinder", finder)
    trainer_for([timer, finder], 100).fit(Trained(BY_NAME["MLP 8x4096 Adam"]))
    seconds = timer.seconds["BatchFinder"]
    mean = statistics.fmean(seconds[step] for step in range(50, 100))
    yield {"BatchFinder us": round(1e6 * mean, 1), "BatchFinder outside of steps s": round(seconds[-1], 1)}


def sync() -> Rows:
    """Hooks of MemoryProfiler that run in every step, with synchronization as an error."""
    counts: dict[str, list[int]] = {}

    def checked(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name][0] += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                return hook(*args, **kwargs)
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                counts[name][1] += 1
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    profiler = MemoryProfiler()
    for name in dir(Callback):
        in_step = any(word in name for word in ("batch_start", "batch_end", "backward", "optimizer_step", "zero_grad"))
        if in_step and getattr(MemoryProfiler, name) is not getattr(Callback, name):
            counts[name] = [0, 0]
            setattr(profiler, name, checked(name, getattr(profiler, name)))
    with tempfile.TemporaryDirectory() as folder:
        module = Trained(BY_NAME["MLP 8x4096 Adam"], 64)
        trainer_for([profiler], 30, logger=CSVLogger(folder), log_every_n_steps=1).fit(module)
    rows = ({"hook": name, "calls": calls, "synchronized": times} for name, (calls, times) in counts.items())
    yield from (row for row in rows if row["calls"])


PARTS: dict[str, tuple[Callable[[], Rows], float]] = {
    "tests": (tests, 285), "simulator": (simulator, 30), "search": (search, 160), "compile": (compile_modes, 60),
    "overhead": (hook_times, 40), "sync": (sync, 20),
}  # fmt: skip
"""Part -> its rows, and its time budget in seconds."""


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """One Markdown table for each part."""
    lines = []
    for part, rows in results.items():
        head = list(dict.fromkeys(key for row in rows for key in row))
        lines += ["", f"## {part}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in rows:
            cells = ("" if row.get(key) is None else str(row[key]).replace("|", "/") for key in head)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines).strip()


def run_part(part: str) -> None:
    """Run one part in this process, and send its rows to the parent process as they are measured."""
    rows = []
    try:
        for row in PARTS[part][0]():
            rows.append(row)
            emit(rows=rows)
    except Exception as error:  # noqa: BLE001 - the other parts run anyway
        emit(rows=[*rows, {"error": one_line(error)}])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 2 without a CUDA device, 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts, without writing files")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)  # in a process of its own
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA device, and torch finds none.", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if chosen.part:
        run_part(chosen.part)
        return 0
    results: dict[str, list[dict[str, Any]]] = {}
    for part in chosen.only or PARTS:
        begin = time.monotonic()
        found = in_fresh_process("benchmarks.gpu_check", "--part", part, timeout_seconds=PARTS[part][1])
        results[part] = [*found.get("rows", []), *([{"error": found["error"]}] if found["error"] else [])]
        print(f"{part}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    report("gpu_check", table(results), results, write=chosen.only is None)
    return int(any("error" in row for rows in results.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
