"""A search and the training that follows, or training steps at given sizes, on one thread.

    python -m benchmarks.throughput_ways "small CNN" --way throughput    # a search
    python -m benchmarks.throughput_ways "small CNN" --sizes 2 64 256    # steps at these sizes

``benchmarks.throughput`` runs this in a fresh process. The clock of a step is the CPU time of this
process, which includes time in the kernel, and on CUDA the time between two events on the device.
The clock of a search is the same CPU time, and on CUDA wall time.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder

from benchmarks.common import command_line, emit, one_line, silence, trainer_for
from benchmarks.networks import MIB, group, host_training
from benchmarks.networks.trainings import SAMPLES_RUN
from lightning_batchmem import BatchFinder

NETWORKS = group("host, quick")

ROUNDS = 8
"""Rounds in which all sizes are measured, and rounds of the training after a search, by default.

A slow moment of the machine is then not the only one at which a size was measured.
"""

WARM_UP_STEPS = 1
LEAST_STEPS = 3
LEAST_SECONDS = 0.25
"""Steps at each size in a round, after the warm-up, and the time that they take."""

CUDA_LIMIT_BYTES = 4096 * MIB
"""Limit of a search on CUDA, where the process itself needs no memory of the device."""


class CpuClock(Callback):
    """CPU seconds of each training step, without the reading of its batch."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self._start_seconds = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self._start_seconds = time.process_time()

    def on_train_batch_end(self, *args: Any) -> None:
        self.step_seconds.append(time.process_time() - self._start_seconds)


class CudaClock(Callback):
    """Seconds between the start and the end of each training step on the device."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        # torch does not annotate these.
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def on_train_batch_start(self, *args: Any) -> None:
        self._start.record()

    def on_train_batch_end(self, *args: Any) -> None:
        self._end.record()
        self._end.synchronize()
        self.step_seconds.append(self._start.elapsed_time(self._end) / 1e3)


class TimedSteps(Callback):
    """Ends a training once enough rounds of steps were timed; it comes after the clock.

    Args:
        clock: the times of the steps.
        num_rounds: each round has enough steps to contain an undisturbed one.
    """

    def __init__(self, clock: CpuClock | CudaClock, num_rounds: int = 1) -> None:
        self.fastest_seconds: list[float] = []
        self._clock = clock
        self._num_rounds = num_rounds
        self._round: list[float] = []
        self._warm_up_steps = WARM_UP_STEPS

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._warm_up_steps > 0:
            self._warm_up_steps -= 1
            return
        self._round.append(self._clock.step_seconds[-1])
        if len(self._round) >= LEAST_STEPS and sum(self._round) >= LEAST_SECONDS:
            self.fastest_seconds.append(min(self._round))
            self._round = []
        trainer.should_stop = len(self.fastest_seconds) >= self._num_rounds


class SearchClock(Callback):
    """Times a search; it comes after the finder."""

    def __init__(self) -> None:
        self.search_seconds = 0.0
        self.samples_run = 0
        self._start_seconds = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._start_seconds = _seconds()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.search_seconds = _seconds() - self._start_seconds
        self.samples_run = sum(SAMPLES_RUN.values())


def _step_clock() -> CpuClock | CudaClock:
    return CudaClock() if torch.cuda.is_available() else CpuClock()


def _seconds() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


WAYS: dict[str, Callable[[int, int], Callback]] = {
    "memory": lambda limit_bytes, _: BatchFinder(
        objective="memory", memory_limit=limit_bytes, min_steps_per_epoch=None
    ),
    "throughput": lambda limit_bytes, _: BatchFinder(
        objective="throughput", memory_limit=limit_bytes, min_steps_per_epoch=None
    ),
    "Lightning power": lambda _, trials: BatchSizeFinder(
        mode="power", init_val=2, max_trials=trials
    ),
}
"""The finders, made from a limit in bytes and the number of trials of Lightning's finder."""


def search(name: str, way: str, trials: int, num_rounds: int) -> None:
    """Search once, train at the size for some rounds of steps, and emit the results."""
    network = NETWORKS[name]
    if torch.cuda.is_available():
        limit_bytes = CUDA_LIMIT_BYTES
    else:
        limit_bytes = psutil.Process().memory_info().rss + network.room_mib * MIB
    module = host_training(network)
    search_clock = SearchClock()
    clock = _step_clock()
    timed = TimedSteps(clock, num_rounds)
    callbacks = [WAYS[way](limit_bytes, trials), search_clock, clock, timed]
    trainer_for(callbacks, -1, limit_val_batches=0).fit(module)
    emit(
        batch_size=module.batch_size,
        search_seconds=search_clock.search_seconds,
        samples_run=search_clock.samples_run,
        step_seconds=timed.fastest_seconds,
    )


def time_steps(name: str, sizes: Sequence[int], num_rounds: int) -> None:
    """Train for a few steps at each size in each round, and emit the fastest step of each round.

    Other work on the machine only adds time, so the fastest step is the least disturbed one. Each
    training has a process of its own, because the heap of a process that has trained at other sizes
    differs from that of a new one.
    """
    step_seconds: dict[int, list[float]] = {size: [] for size in sizes}
    context = multiprocessing.get_context("forkserver")
    # The server imports everything once, and each process begins as a copy of it.
    context.set_forkserver_preload(["benchmarks.networks"])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        for _ in range(num_rounds):
            for size in sizes:
                fastest = processes.submit(fastest_step_seconds, name, size)
                step_seconds[size].append(fastest.result())
    emit(step_seconds=step_seconds)


def fastest_step_seconds(name: str, size: int) -> float:
    """Train for a few steps in this process, and return the time of the fastest."""
    torch.set_num_threads(1)
    silence()
    network = NETWORKS[name]
    clock = _step_clock()
    timed = TimedSteps(clock)
    trainer_for([clock, timed], -1, limit_val_batches=0).fit(host_training(network, size))
    return timed.fastest_seconds[0]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--way", choices=WAYS, help="search in this way; one of %(choices)s")
    parser.add_argument(
        "--trials", type=int, default=1, help="of Lightning's finder; default: %(default)s"
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=[], help="time steps at these")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="of timed steps; default: %(default)s"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        if arguments.way is not None:
            search(arguments.network, arguments.way, arguments.trials, arguments.rounds)
        else:
            time_steps(arguments.network, arguments.sizes, arguments.rounds)
    # Near the limit memory may run out anywhere, with any error.
    except Exception as error:  # noqa: BLE001
        emit(error=one_line(error))


if __name__ == "__main__":
    main()
