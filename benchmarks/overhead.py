"""Time that a monitoring callback adds to each training step.

Lightning's DeviceStatsMonitor and ThroughputMonitor and this package's MemoryProfiler (with its CSV) run in one Trainer
with a CSVLogger, on a small network. The time inside each callback's hooks, and inside the hooks that it registers on
an optimizer's step, is summed per step. Each run takes the median and mean over its steps after a warm-up, with the
callbacks in another order; the table has medians over the runs, and of MemoryProfiler's time over that of each
callback. On CUDA ThroughputMonitor synchronizes in each step, and that time is included.

    python -m benchmarks.overhead            # a Markdown table, on CUDA too if available
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
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import report, trainer_for
from lightning_batchmem import MemoryProfiler

OURS = "MemoryProfiler"
STEPS_BY_INTERVAL = {50: 2000, 1: 500}
"""``log_every_n_steps`` -> steps that count in each run."""

WARM_UP_STEPS = 100
"""Steps that do not count: ThroughputMonitor reports rates once its window of 100 is full."""

BATCH_SIZE, FEATURES = 16, 64
HEAD = ("accelerator", "log_every_n_steps", "callback", "median us", "mean us", "median ratio", "mean ratio")


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


class HookTimer(Callback):
    """Times the hooks of other callbacks; the first of the Trainer's callbacks, so that it counts the steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))  # callback -> step
        self._step = -1
        self._owner: str | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = batch_idx

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = -1

    def timed(self, owner: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, timed for ``owner``, unless another timed hook calls it."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._owner is not None:
                return function(*args, **kwargs)
            self._owner = owner
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[owner][self._step] += time.perf_counter() - begin
                self._owner = None

        return run

    def time_callback(self, owner: str, callback: Callback) -> None:
        """Time the hooks that ``callback`` overrides."""
        for name in dir(Callback):
            is_hook = name.startswith("on_") or name == "setup"
            if is_hook and getattr(type(callback), name) is not getattr(Callback, name):
                setattr(callback, name, self.timed(owner, getattr(callback, name)))

    @contextmanager
    def time_optimizer_hooks(self) -> Iterator[None]:
        """Time the hooks on an optimizer's step that a callback registers inside one of its hooks."""

        def timed_register(register: Callable[..., Any]) -> Callable[..., Any]:
            def run(optimizer: Optimizer, hook: Callable[..., Any]) -> Any:
                return register(optimizer, self.timed(self._owner, hook) if self._owner is not None else hook)

            return run

        with ExitStack() as patches:
            for name in ("register_step_pre_hook", "register_step_post_hook"):
                patches.enter_context(patch.object(Optimizer, name, timed_register(getattr(Optimizer, name))))
            yield


def run(accelerator: str, interval: int, turn: int) -> dict[str, Any]:
    """Train once with all callbacks, their order rotated by ``turn``; median and mean seconds of each."""
    steps = WARM_UP_STEPS + STEPS_BY_INTERVAL[interval]
    callbacks = {
        "DeviceStatsMonitor": DeviceStatsMonitor(),
        "ThroughputMonitor": ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0])),
        OURS: MemoryProfiler(csv=True),
    }
    names = list(callbacks)
    order = names[turn % 3 :] + names[: turn % 3]
    timer = HookTimer()
    for name, callback in callbacks.items():
        timer.time_callback(name, callback)
    data = TensorDataset(torch.randn(steps * BATCH_SIZE, FEATURES))
    with tempfile.TemporaryDirectory() as directory, timer.time_optimizer_hooks(), redirect_stdout(io.StringIO()):
        trainer = trainer_for(
            [timer, *(callbacks[name] for name in order)],
            steps,
            accelerator=accelerator,
            logger=CSVLogger(directory),
            log_every_n_steps=interval,
        )
        trainer.fit(Small(), DataLoader(data, batch_size=BATCH_SIZE))
    costs = {name: [timer.seconds[name][step] for step in range(WARM_UP_STEPS, steps)] for name in names}
    return {
        "accelerator": accelerator,
        "log_every_n_steps": interval,
        "median_seconds": {name: statistics.median(values) for name, values in costs.items()},
        "mean_seconds": {name: statistics.fmean(values) for name, values in costs.items()},
    }


def table(runs: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for kind in dict.fromkeys((one["accelerator"], one["log_every_n_steps"]) for one in runs):
        same = [one for one in runs if (one["accelerator"], one["log_every_n_steps"]) == kind]
        for name in same[0]["median_seconds"]:
            median, mean = (
                statistics.median(one[key][name] for one in same) * 1e6 for key in ("median_seconds", "mean_seconds")
            )
            ratios = [
                f"{statistics.median(one[key][OURS] / one[key][name] for one in same):.2f}"
                for key in ("median_seconds", "mean_seconds")
            ]
            lines.append(f"| {kind[0]} | {kind[1]} | {name} | {median:,.1f} | {mean:,.1f} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=6, help="runs of each kind, a multiple of 3; default: %(default)s")
    parser.add_argument("--write", action="store_true", help="write to benchmarks/results")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(0, verbose=False)
    torch.set_num_threads(1)  # the hooks run in one thread
    kinds = [(a, n) for a in (["cpu", "gpu"] if torch.cuda.is_available() else ["cpu"]) for n in STEPS_BY_INTERVAL]
    runs = [run(accelerator, interval, turn) for turn in range(arguments.runs) for accelerator, interval in kinds]
    report("overhead", table(runs), {"runs": runs}, write=arguments.write)


if __name__ == "__main__":
    main()
