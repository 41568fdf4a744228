"""Cases of ``tests/gpu/test_cuda_search_only.py``: a search by itself, then a training at its size.

Each of both runs in processes of its own, with a device for each rank, and with gloo.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    Strategy,
)
from torch import Tensor, nn
from torch.distributed._composable.fsdp import fully_shard
from torch.utils.data import DataLoader

from benchmarks.common import silence
from lightning_batchmem import BatchFinder, Plan
from lightning_batchmem.devices.tensors import bytes_of
from lightning_batchmem.simulated_gpu.values import Values
from tests.helpers.cuda_stub import PeakOfTraining, mib
from tests.helpers.lawful import quiet_trainer
from tests.helpers.rank_processes import run_ranks

RANKS = 2
WIDTH = 512
LENGTH = 64
SAMPLES = 3_000
PLAN = "plan.json"
MOST_STARTS = 4
KILLED_ABOVE = 16
"""In the case ``killed`` one rank is killed in the first step with more samples."""


class Block(nn.Module):
    """A block of a transformer without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(LightningModule):
    """Blocks with Adam; the samples are long sequences."""

    killed_above: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 4
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]
            for block in self.blocks:
                fully_shard(block, mesh=mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        is_last = self.global_rank == self.trainer.world_size - 1
        if is_last and self.killed_above is not None and len(batch) > self.killed_above:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.empty(len(batch), LENGTH, WIDTH, device=self.device)
        return self.blocks(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(range(SAMPLES), batch_size=self.batch_size)


def deepspeed_of(**options: Any) -> Strategy:
    # The values that it reads decide whether a step overflows, which all ranks have to answer
    # equally.
    Values().enter()
    return DeepSpeedStrategy(process_group_backend="gloo", **options)


def deepspeed(stage: int) -> Callable[[], Strategy]:
    buckets = dict.fromkeys(("allgather_bucket_size", "reduce_bucket_size"), 2_000_000)
    return lambda: deepspeed_of(stage=stage, **buckets)


WAYS: dict[str, Callable[[], Strategy]] = {
    "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
    "fsdp2": lambda: ModelParallelStrategy(RANKS, 1, process_group_backend="gloo"),
    "deepspeed 1": deepspeed(1),
    "deepspeed 2": deepspeed(2),
    "deepspeed 3": deepspeed(3),
    # The optimizer is torch's, because DeepSpeed compiles its own.
    "deepspeed 2, offload": lambda: deepspeed_of(
        config={
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "reduce_bucket_size": 2_000_000,
                "allgather_bucket_size": 2_000_000,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    ),
}


def run(
    way: str, devices: int, accumulate: int, finder: BatchFinder, module: Net
) -> PeakOfTraining:
    """Fit; a search ends the process in it."""
    peak = PeakOfTraining()
    trainer = quiet_trainer(
        finder,
        peak,
        accelerator="gpu",
        devices=devices,
        strategy=WAYS[way](),
        max_epochs=2,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(module)
    return peak


def find(rank: int, folder: Path, way: str, devices: int, accumulate: int, is_killed: bool) -> None:
    """Search, and end the process."""
    silence()
    module = Net()
    module.killed_above = KILLED_ABOVE if is_killed else None
    finder = BatchFinder(
        objective="memory", min_steps_per_epoch=None, plan=folder / PLAN, then="exit"
    )
    run(way, devices, accumulate, finder, module)
    Path(f"{rank}.json").write_text("nothing after fit may run")


def apply(rank: int, folder: Path, way: str, devices: int, accumulate: int) -> None:
    """Train at the size of the plan."""
    silence()
    module = Net()
    finder = BatchFinder(plan=folder / PLAN, apply=True)
    peak = run(way, devices, accumulate, finder, module)
    found = {
        "size": module.batch_size,
        "steps": module.trainer.global_step,
        "trained_mib": mib(peak.peak_bytes),
    }
    Path(f"{rank}.json").write_text(json.dumps(found))


def main(folder: Path, way: str, case: str = "", devices: str = str(RANKS)) -> None:
    """Print the exit codes of each start, the plan, and what each rank found in the training.

    Args:
        folder: where the plan is written.
        way: the strategy.
        case: ``killed`` to kill a rank in the first start, ``accumulate`` for two batches to an
            optimizer step.
        devices: the number of ranks.
    """
    ranks = int(devices)
    accumulate = 2 if case == "accumulate" else 1
    starts: list[dict[str, Any]] = []
    while len(starts) < MOST_STARTS and not (folder / PLAN).exists():
        is_killed = case == "killed" and not starts
        codes, outputs = run_ranks(find, folder, way, ranks, accumulate, is_killed, ranks=ranks)
        starts.append({"codes": codes, "outputs": outputs})
    result: dict[str, Any] = {
        "starts": starts,
        "left": sorted(one.name for one in folder.iterdir()),
    }
    if (folder / PLAN).exists():
        plan = Plan.from_json((folder / PLAN).read_text())
        (rehearsal,) = (
            trial
            for trial in plan.trials
            if (trial.kind, trial.batch_size) == ("rehearsal", plan.batch_size)
        )
        result["plan"] = {
            "size": plan.batch_size,
            "limited_by": plan.limited_by,
            "verified": plan.verified,
            "limit_mib": mib(plan.limit_bytes),
            "rehearsed_mib": mib(rehearsal.memory.held_bytes),
            # DDP makes its buckets after the first step of a training, and no step of a rank alone
            # does.
            "buckets_mib": mib(bytes_of(Net().parameters())) if way == "ddp" else 0,
            "out_of_memory": [
                trial.batch_size for trial in plan.trials if trial.outcome == "out_of_memory"
            ],
        }
        codes, outputs = run_ranks(apply, folder, way, ranks, accumulate, ranks=ranks)
        result["training"] = {"codes": codes, "outputs": outputs}
        result["found"] = [
            json.loads((folder / f"{rank}.json").read_text())
            for rank in range(ranks)
            if codes[rank] == 0
        ]
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
