"""Time that a monitoring callback adds to each training step.

Lightning's DeviceStatsMonitor and ThroughputMonitor and this package's MemoryProfiler (with its
CSV) run in one Trainer with a CSVLogger, on a small network. A profiler of Lightning times their
hooks. Each run takes the mean over its steps after a warm-up, with the callbacks in another order;
the table has medians over the runs. The time of a hook is that above the same hook of a callback
that does nothing, which Lightning and the clock take. Calls that MemoryProfiler adds to Lightning's
loop are not counted: the request of a batch, and the end of the work of a step.

On the host the time is CPU time. Next to busy processes a hook with ``getrusage``, in which
MemoryProfiler reads a peak, also lasts until the process runs again: the kernel counts the time of
the process in this call, and ends its time slice there. A step takes as long with the call as
without it, since the slice would end in another place; ``--waits`` shows this. On CUDA it is wall
time, because ThroughputMonitor synchronizes in each step, which is included.

    python -m benchmarks.overhead            # a Markdown table, on CUDA too if available
    python -m benchmarks.overhead --write    # also to benchmarks/results
    python -m benchmarks.overhead --waits    # where a process waits next to four busy ones
"""

from __future__ import annotations

import io
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler

from benchmarks.common import command_line, markdown, report, trainer_for
from benchmarks.networks import Network, host_training
from benchmarks.networks.others import wide_mlp
from benchmarks.networks.record import classified
from lightning_batchmem import MemoryProfiler

OURS = "MemoryProfiler"
STEPS_BY_INTERVAL = {50: 2000, 1: 500}
"""``log_every_n_steps`` -> steps that count in each run."""

WARM_UP_STEPS = 100
"""Steps that do not count: ThroughputMonitor reports rates once its window of 100 is full."""


NUM_BUSY_PROCESSES = 4
WAITING_STEPS = 600


class HookTimes(SimpleProfiler):
    """Times actions with any clock."""

    def __init__(self, read_seconds: Callable[[], float]) -> None:
        super().__init__()
        self._read_seconds = read_seconds

    def start(self, action_name: str) -> None:
        self.current_actions[action_name] = self._read_seconds()

    def stop(self, action_name: str) -> None:
        seconds = self._read_seconds() - self.current_actions.pop(action_name)
        self.recorded_durations[action_name].append(seconds)


def small() -> LightningModule:
    """Three linear layers, in batches of 16 samples."""
    return host_training(Network(partial(wide_mlp, 64, 2), classified(64)), batch_size=16)


def run(accelerator: str, interval: int, turn: int) -> dict[str, float]:
    """Train once with all callbacks, in an order rotated by ``turn``.

    Returns:
        Mean microseconds per step of each callback.
    """
    steps = WARM_UP_STEPS + STEPS_BY_INTERVAL[interval]
    callbacks: list[Callback] = [
        DeviceStatsMonitor(),
        ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0])),
        MemoryProfiler(csv=True),
    ]
    empty = Callback()
    profiler = HookTimes(time.thread_time if accelerator == "cpu" else time.perf_counter)
    with tempfile.TemporaryDirectory() as directory, redirect_stdout(io.StringIO()):
        arguments = {
            "accelerator": accelerator,
            "log_every_n_steps": interval,
            "logger": CSVLogger(directory),
        }
        ordered = callbacks[turn % 3 :] + callbacks[: turn % 3]
        trainer_for([*ordered, empty], steps, profiler=profiler, **arguments).fit(small())
    microseconds = {}
    empty_seconds = hook_seconds(profiler, empty, steps)
    for callback in callbacks:
        seconds = sum(
            seconds - empty_seconds[name]
            for name, seconds in hook_seconds(profiler, callback, steps).items()
            if getattr(type(callback), name) is not getattr(Callback, name)
        )
        microseconds[f"{type(callback).__name__} us"] = round(1e6 * seconds, 1)
    return microseconds


def hook_seconds(profiler: SimpleProfiler, callback: Callback, steps: int) -> dict[str, float]:
    """Mean time in each hook of a callback that runs once in each step, after the warm-up."""
    means = {}
    for action, seconds in profiler.recorded_durations.items():
        owner, _, name = action.partition(".")
        if owner == f"[Callback]{type(callback).__name__}" and len(seconds) == steps:
            means[name] = statistics.fmean(seconds[WARM_UP_STEPS:])
    return means


def table(rows: list[dict[str, Any]]) -> str:
    """The results as Markdown: medians over the runs.

    The number in brackets is MemoryProfiler's time over that of the callback.
    """
    medians = []
    for kind in dict.fromkeys((row["accelerator"], row["log_every_n_steps"]) for row in rows):
        same = [row for row in rows if (row["accelerator"], row["log_every_n_steps"]) == kind]
        median = {"accelerator": kind[0], "log_every_n_steps": kind[1]}
        for name in (key for key in same[0] if key.endswith(" us")):
            ratio = statistics.median(row[f"{OURS} us"] / row[name] for row in same)
            median[name] = f"{statistics.median(row[name] for row in same):,.1f} ({ratio:.2f})"
        medians.append(median)
    return markdown(medians)


def waits() -> str:
    """The wall time in some calls of a process that computes, and that of a step, as Markdown."""
    for _ in range(NUM_BUSY_PROCESSES):
        multiprocessing.Process(target=compute_forever, daemon=True).start()
    calls: dict[str, Callable[[], object]] = {
        "none": lambda: None,
        "os.getppid": os.getppid,
        "resource.getrusage": lambda: resource.getrusage(resource.RUSAGE_SELF),
        "time.process_time": time.process_time,
    }
    matrix = torch.randn(200, 200)
    rows = []
    for name, call in calls.items():
        call_seconds = 0.0
        begin = time.perf_counter()
        for _ in range(WAITING_STEPS):
            for _ in range(10):
                _ = matrix @ matrix
            begin_call = time.perf_counter()
            call()
            call_seconds += time.perf_counter() - begin_call
        step_seconds = (time.perf_counter() - begin) / WAITING_STEPS
        rows.append(
            {
                "call": name,
                "in the call, us": f"{1e6 * call_seconds / WAITING_STEPS:,.1f}",
                "step, us": f"{1e6 * step_seconds:,.1f}",
            }
        )
    return markdown(rows)


def compute_forever() -> None:
    while True:
        pass


def main() -> None:
    parser = command_line(__doc__, writes=True)
    parser.add_argument(
        "--runs",
        type=int,
        default=6,
        help="runs of each kind, a multiple of 3; default: %(default)s",
    )
    parser.add_argument(
        "--waits",
        action="store_true",
        help=f"only show where a process waits next to {NUM_BUSY_PROCESSES} busy ones",
    )
    arguments = parser.parse_args()
    # One thread is enough, because the hooks run in one thread.
    torch.set_num_threads(1)
    if arguments.waits:
        print(waits())
        return
    accelerators = ["cpu", "gpu"] if torch.cuda.is_available() else ["cpu"]
    rows: list[dict[str, Any]] = []
    for turn in range(arguments.runs):
        for accelerator in accelerators:
            for interval in STEPS_BY_INTERVAL:
                row = {"accelerator": accelerator, "log_every_n_steps": interval}
                rows.append({**row, **run(accelerator, interval, turn)})
    report("overhead", table(rows), write=arguments.write)


if __name__ == "__main__":
    main()
