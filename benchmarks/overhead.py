"""What does a monitoring callback cost in each step?

Lightning's DeviceStatsMonitor and ThroughputMonitor and this package's MemoryProfiler (its CSV on) in one Trainer with
a CSVLogger, on a small network. The time inside every hook that a callback overrides, and inside every hook that it
puts on an optimizer's step, is added up step by step. Runs at both settings of ``log_every_n_steps`` alternate, the
callbacks in another order each time. A run gives the median, mean and 90th percentile over its steps after a warm-up,
and their ratios; the table has the medians of these over the runs. What a callback does at every 50th step only is in
the mean, not in the median.

Not in it: what Lightning does to call a hook, which it does for hooks that a callback does not override too. In it: the
reading of the clock, for each hook that is called; the first line says how much that is. What a logger writes is on the
account of the callback that makes it write, whoever logged it: ThroughputMonitor does so whenever it logs, the others
leave it to the logger. "In the logger" is the part of the mean that this concerns. On CUDA ThroughputMonitor waits for
the device in each step, and that wait is in its time.

    python -m benchmarks.overhead            # a Markdown table; on CUDA too where there is one
    python -m benchmarks.overhead --write    # also to benchmarks/results
"""

from __future__ import annotations

import argparse
import functools
import io
import logging
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import report
from lightning_batchmem import MemoryProfiler

OURS = "MemoryProfiler"
STEPS_BY_INTERVAL = {50: 2000, 1: 500}
"""``log_every_n_steps`` -> steps that count in each run; a multiple of it, so that the mean has its share of logs."""
TARGETS = {50: ("ThroughputMonitor", 3 / 2), 1: ("DeviceStatsMonitor", 1 / 3)}
"""``log_every_n_steps`` -> with whose median ours is compared, and the ratio it may have on the CPU."""
WARM_UP_STEPS = 100
"""Steps at the start of a run that do not count: ThroughputMonitor reports rates once its window of 100 is full."""
BATCH_SIZE, FEATURES = 16, 64
NO_STEP = -1


class Small(LightningModule):
    """Three linear layers under Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.network(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.Adam(self.parameters())


class Stopwatch(Callback):
    """Times what others do, and, as the first of the Trainer's callbacks, counts the steps.

    Attributes:
        seconds: whose hook -> its name -> step -> seconds inside it. Step ``NO_STEP`` is all that is outside of steps.
        logger_seconds: whose hook -> step -> seconds of those in ``seconds`` that a logger took.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, dict[int, float]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(float))
        )
        self.logger_seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._step = NO_STEP
        self._owner: str | None = None
        self._in_logger = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = batch_idx  # of the only epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = NO_STEP

    def hook(self, owner: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, timed on ``owner``'s account; inside another hook it is in that one's time already."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._owner is not None:
                return function(*args, **kwargs)
            self._owner = owner
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - begin
                self._owner = None
                self.seconds[owner][name][self._step] += seconds

        return timed

    def watch_callback(self, owner: str, callback: Callback) -> None:
        """Time the hooks that ``callback`` overrides."""
        for name in dir(Callback):
            is_hook = name.startswith("on_") or name in ("setup", "teardown")
            if is_hook and getattr(type(callback), name) is not getattr(Callback, name):
                setattr(callback, name, self.hook(owner, name, getattr(callback, name)))

    def watch_logger(self, logger: CSVLogger) -> None:
        """Time what ``logger`` does inside a hook."""

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if self._owner is None or self._in_logger:  # log_metrics may call save
                    return function(*args, **kwargs)
                self._in_logger = True
                begin = time.perf_counter()
                try:
                    return function(*args, **kwargs)
                finally:
                    self.logger_seconds[self._owner][self._step] += time.perf_counter() - begin
                    self._in_logger = False

            return run

        for name in ("log_metrics", "save"):
            setattr(logger, name, timed(getattr(logger, name)))

    @contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Time what a callback, inside one of its hooks, puts on an optimizer's step."""

        def on_account(register: Callable[..., Any]) -> Callable[..., Any]:
            def run(optimizer: Optimizer, hook: Callable[..., Any]) -> Any:
                if self._owner is not None:
                    hook = self.hook(self._owner, register.__name__.removeprefix("register_"), hook)
                return register(optimizer, hook)

            return run

        with ExitStack() as patches:
            for name in ("register_step_pre_hook", "register_step_post_hook"):
                patches.enter_context(patch.object(Optimizer, name, on_account(getattr(Optimizer, name))))
            yield

    def account(self, owner: str, steps: range) -> dict[str, Any]:
        """What ``owner`` cost in ``steps``, and outside of all steps."""
        by_hook, in_logger = self.seconds[owner], self.logger_seconds[owner]
        costs = [sum(by_step.get(step, 0.0) for by_step in by_hook.values()) for step in steps]
        return {
            "median_seconds": statistics.median(costs),
            "mean_seconds": statistics.fmean(costs),
            "p90_seconds": statistics.quantiles(costs, n=10)[-1],
            "mean_logger_seconds": statistics.fmean(in_logger.get(step, 0.0) for step in steps),
            "outside_seconds": sum(by_step.get(NO_STEP, 0.0) for by_step in by_hook.values()),
            "median_seconds_by_hook": {
                name: statistics.median(by_step.get(step, 0.0) for step in steps)
                for name, by_step in by_hook.items()
                if any(step in by_step for step in steps)
            },
        }


def run(accelerator: str, interval: int, turn: int) -> dict[str, Any]:
    """Train once with all callbacks, their order rotated by ``turn``, and account for each."""
    steps = WARM_UP_STEPS + STEPS_BY_INTERVAL[interval]
    callbacks = {
        "DeviceStatsMonitor": DeviceStatsMonitor(),
        "ThroughputMonitor": ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0])),
        OURS: MemoryProfiler(csv=True),
    }
    names = list(callbacks)
    order = names[turn % 3 :] + names[: turn % 3]
    watch = Stopwatch()
    for name, callback in callbacks.items():
        watch.watch_callback(name, callback)
    with tempfile.TemporaryDirectory() as directory:
        logger = CSVLogger(directory)
        watch.watch_logger(logger)
        trainer = Trainer(
            accelerator=accelerator,
            devices=1,
            max_epochs=1,
            callbacks=[watch, *(callbacks[name] for name in order)],
            logger=logger,
            log_every_n_steps=interval,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = TensorDataset(torch.randn(steps * BATCH_SIZE, FEATURES))
        with watch.watching_optimizers(), redirect_stdout(io.StringIO()):  # the profiler's table
            trainer.fit(Small(), DataLoader(data, batch_size=BATCH_SIZE))
        assert trainer.global_step == steps
        csv_lines = (Path(logger.log_dir) / "memory_per_batch.csv").read_text().splitlines()
        assert len(csv_lines) == 1 + steps
    counted = range(WARM_UP_STEPS, steps)
    accounts = {name: watch.account(name, counted) for name in names}
    return {"accelerator": accelerator, "log_every_n_steps": interval, "order": order, "callbacks": accounts}


def table(runs: list[dict[str, Any]]) -> str:
    """The results as Markdown: the costs, and below them the ratios with their targets."""
    lines = [
        "| accelerator | log_every_n_steps | callback | median us | mean us | of it in the logger us "
        "| 90th percentile us | outside of steps ms |",
        "|" + "---|" * 8,
    ]
    said = []
    for accelerator, interval in dict.fromkeys((one["accelerator"], one["log_every_n_steps"]) for one in runs):
        same = [
            one["callbacks"]
            for one in runs
            if (one["accelerator"], one["log_every_n_steps"]) == (accelerator, interval)
        ]
        for name in same[0]:
            us = [
                f"{statistics.median(one[name][key] for one in same) * 1e6:,.1f}"
                for key in ("median_seconds", "mean_seconds", "mean_logger_seconds", "p90_seconds")
            ]
            outside_ms = statistics.median(one[name]["outside_seconds"] for one in same) * 1e3
            lines.append(f"| {accelerator} | {interval} | {name} | {' | '.join(us)} | {outside_ms:.1f} |")
        said.append(f"- {accelerator}, at {interval}: {_comparison(same, interval, has_target=accelerator == 'cpu')}")
    return "\n".join([*lines, "", *said])


def _comparison(same: list[dict[str, Any]], interval: int, *, has_target: bool) -> str:
    other, target = TARGETS[interval]
    by_median, by_mean = (
        sorted(one[OURS][key] / one[other][key] for one in same) for key in ("median_seconds", "mean_seconds")
    )
    ratio = statistics.median(by_median)
    verdict = f"target at most {target:.2f}, {'met' if ratio <= target else 'MISSED'}" if has_target else "no target"
    return (
        f"{OURS}'s median is {ratio:.2f} times {other}'s ({by_median[0]:.2f} to {by_median[-1]:.2f}; {verdict}),"
        f" its mean {statistics.median(by_mean):.2f} times ({by_mean[0]:.2f} to {by_mean[-1]:.2f})"
    )


def clock_seconds() -> float:
    """What the stopwatch reads for a hook that does nothing."""
    watch, times = Stopwatch(), 10_000
    hook = watch.hook("nobody", "nothing", lambda: None)
    for _ in range(times):
        hook()
    return watch.seconds["nobody"]["nothing"][NO_STEP] / times


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=6, help="of each kind; a multiple of 3 has each order alike often")
    parser.add_argument("--write", action="store_true", help="write to benchmarks/results")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(0, verbose=False)
    torch.set_num_threads(1)  # the hooks have one; on a machine that others use, the network's others hold up its steps
    kinds = [(a, n) for a in (["cpu", "gpu"] if torch.cuda.is_available() else ["cpu"]) for n in STEPS_BY_INTERVAL]
    runs = [run(accelerator, interval, turn) for turn in range(arguments.runs) for accelerator, interval in kinds]
    head = f"Runs of each kind: {arguments.runs}"
    head += f"; an empty hook reads {clock_seconds() * 1e6:.2f} us"
    report("overhead", f"{head}\n\n{table(runs)}", {"runs": runs}, write=arguments.write)


if __name__ == "__main__":
    main()
