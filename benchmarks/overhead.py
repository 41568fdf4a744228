"""Time that a monitoring callback adds to each training step.

Lightning's DeviceStatsMonitor and ThroughputMonitor and this package's MemoryProfiler (with its CSV) run in one Trainer
with a CSVLogger, on a small network. Lightning's SimpleProfiler times their hooks, and those that MemoryProfiler
registers on an optimizer's step. Each run takes the median and mean over its steps after a warm-up, with the callbacks
in another order; the table has medians over the runs, and of MemoryProfiler's time over that of each callback. On CUDA
ThroughputMonitor synchronizes in each step, and that time is included.

    python -m benchmarks.overhead            # a Markdown table, on CUDA too if available
    python -m benchmarks.overhead --write    # also to benchmarks/results
"""

from __future__ import annotations

import argparse
import io
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import markdown, report, trainer_for
from lightning_batchmem import MemoryProfiler

OURS = "MemoryProfiler"
STEPS_BY_INTERVAL = {50: 2000, 1: 500}
"""``log_every_n_steps`` -> steps that count in each run."""

WARM_UP_STEPS = 100
"""Steps that do not count: ThroughputMonitor reports rates once its window of 100 is full."""

FEATURES = 64


class Small(LightningModule):
    """Three linear layers under Adam.

    Args:
        steps: batches of 16 samples.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )
        self.data = [torch.randn(16 * steps, FEATURES)]  # in a list, so that it stays on the host

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.network(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*self.data), batch_size=16)


def run(accelerator: str, interval: int, turn: int) -> dict[str, Any]:
    """Train once with all callbacks, their order rotated by ``turn``; median and mean seconds of each."""
    steps = WARM_UP_STEPS + STEPS_BY_INTERVAL[interval]
    callbacks: list[Callback] = [
        DeviceStatsMonitor(), ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0])), MemoryProfiler(csv=True),
    ]  # fmt: skip
    profiler, register = SimpleProfiler(), Optimizer.register_step_post_hook

    def register_timed(optimizer: Optimizer, hook: Callable[..., Any]) -> Any:  # only MemoryProfiler has such hooks
        return register(optimizer, profiler.profile(f"[Callback]{OURS}.register_step_post_hook")(hook))

    with (
        tempfile.TemporaryDirectory() as directory,
        patch.object(Optimizer, "register_step_post_hook", register_timed),
        redirect_stdout(io.StringIO()),
    ):
        arguments = {"accelerator": accelerator, "log_every_n_steps": interval, "logger": CSVLogger(directory)}
        trainer_for(callbacks[turn % 3 :] + callbacks[: turn % 3], steps, profiler=profiler, **arguments).fit(
            Small(steps)
        )
    costs = {type(callback).__name__: step_seconds(profiler, callback, steps) for callback in callbacks}
    return {
        "accelerator": accelerator,
        "log_every_n_steps": interval,
        "median": {name: statistics.median(values) for name, values in costs.items()},
        "mean": {name: statistics.fmean(values) for name, values in costs.items()},
    }


def step_seconds(profiler: SimpleProfiler, callback: Callback, steps: int) -> list[float]:
    """Seconds in the hooks of a callback that run once in each step, after the warm-up."""
    kind, hooks = type(callback), []
    for action, seconds in profiler.recorded_durations.items():
        owner, _, name = action.partition(".")
        is_own = owner == f"[Callback]{kind.__name__}" and getattr(kind, name, None) is not getattr(Callback, name, "")
        if is_own and len(seconds) == steps:
            hooks.append(seconds)
    return [sum(step) for step in zip(*hooks, strict=True)][WARM_UP_STEPS:]


def table(runs: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    rows = []
    for kind in dict.fromkeys((one["accelerator"], one["log_every_n_steps"]) for one in runs):
        same = [one for one in runs if (one["accelerator"], one["log_every_n_steps"]) == kind]
        for name in same[0]["median"]:
            row = {"accelerator": kind[0], "log_every_n_steps": kind[1], "callback": name}
            for key in ("median", "mean"):
                row[f"{key} us"] = f"{1e6 * statistics.median(one[key][name] for one in same):,.1f}"
            for key in ("median", "mean"):
                row[f"{key} ratio"] = f"{statistics.median(one[key][OURS] / one[key][name] for one in same):.2f}"
            rows.append(row)
    return markdown(rows)


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
