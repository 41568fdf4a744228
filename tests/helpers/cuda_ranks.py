"""Cases of ``tests/gpu/test_cuda_ranks.py``: two ranks with a device each, under DDP with gloo."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from benchmarks.common import silence
from benchmarks.networks import group, project
from benchmarks.networks.trainings import Project
from lightning_batchmem import BatchFinder
from lightning_batchmem.devices.tensors import bytes_of
from tests.helpers.cuda_stub import PeakOfTraining, mib
from tests.helpers.lawful import MIB, quiet_trainer
from tests.helpers.rank_processes import run_ranks

NETWORKS = group("device")
STEPS = 5
FAILING_RANK = 1


def train(
    module: Project,
    *callbacks: Callback,
    finder: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Search and train on both ranks; returns what this rank found."""
    batch_finder = BatchFinder(
        **{"objective": "memory", "min_steps_per_epoch": None, **(finder or {})}
    )
    peak = PeakOfTraining()
    trainer = quiet_trainer(
        batch_finder,
        peak,
        *callbacks,
        **{
            "accelerator": "gpu",
            "devices": 2,
            "strategy": DDPStrategy(process_group_backend="gloo"),
            "max_steps": STEPS,
            "limit_val_batches": 2,
            **options,
        },
    )
    trainer.fit(module)
    plan = batch_finder.plan
    (rehearsal,) = (
        trial
        for trial in plan.trials
        if trial.kind == "rehearsal" and trial.batch_size == plan.batch_size
    )
    return {
        "total_bytes": torch.cuda.mem_get_info(trainer.strategy.root_device)[1],
        "batch_size": module.batch_size,
        "verified": plan.verified,
        "limited_by": plan.limited_by,
        "errors": sum(trial.outcome == "out_of_memory" for trial in plan.trials),
        "steps": trainer.global_step,
        "limit_mib": mib(plan.limit_bytes),
        "gradient_mib": mib(bytes_of(module.parameters())),
        "rehearsed_mib": mib(rehearsal.memory.held_bytes),
        "trained_mib": mib(peak.peak_bytes),
        "fraction": peak.fraction,
    }


def memory() -> dict[str, Any]:
    """A search that memory limits."""
    return train(project(NETWORKS["mlp"]))


def ways() -> dict[str, Any]:
    """Other ways to train, one after the other."""
    return {
        "16-mixed": train(project(NETWORKS["mlp"]), precision="16-mixed"),
        "activation checkpointing": train(project(NETWORKS["checkpointed gpt"])),
        # Both optimizers count a step.
        "two optimizers": train(project(NETWORKS["gan"]), max_steps=2 * STEPS),
        "LearningRateFinder": train(
            WithRate(NETWORKS["mlp"]), LearningRateFinder(num_training_steps=20)
        ),
        "WeightAveraging": train(project(NETWORKS["mlp"]), WeightAveraging()),
    }


class WithRate(Project):
    """A project with a learning rate, which a LearningRateFinder sets."""

    lr = 0.01

    def configure_optimizers(self) -> Any:
        return self.network.optimizer(self.module.parameters(), lr=self.lr)


def memory_limit(name: str, limit_mib: str) -> dict[str, Any]:
    """Three short epochs within a limit of the user."""
    return train(
        project(NETWORKS[name]),
        finder={"memory_limit": int(limit_mib) * MIB},
        max_steps=-1,
        max_epochs=3,
        limit_train_batches=20,
    )


class Failing(Project):
    """A project that fails on one rank, in a step of the search."""

    def __init__(self, fail: Callable[[], object], *, calls_collectives: bool) -> None:
        super().__init__(NETWORKS["mlp"])
        self.fail = fail
        self.calls_collectives = calls_collectives

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if self.calls_collectives:
            torch.distributed.all_reduce(torch.zeros(1))
        loss = super().training_step(batch, batch_idx)
        is_due = len(batch[0]) > 2
        if loss is not None and is_due and self.global_rank == FAILING_RANK:
            loss.register_hook(lambda gradient: self._fail_in_backward())
        return loss

    def _fail_in_backward(self) -> None:
        Path("failed_at").write_text(str(time.time()))
        self.fail()


def out_of_memory() -> dict[str, Any]:
    """One rank runs out of memory in backward, where the other waits for its gradients."""

    def fail() -> None:
        torch.empty(2**40, dtype=torch.uint8, device="cuda")

    return train(Failing(fail, calls_collectives=True))


def killed() -> dict[str, Any]:
    """One rank is killed in a step that each rank takes alone."""
    return train(Failing(lambda: os.kill(os.getpid(), signal.SIGKILL), calls_collectives=False))


CASES = {
    "memory": memory,
    "ways": ways,
    "memory_limit": memory_limit,
    "out_of_memory": out_of_memory,
    "killed": killed,
}


def run_rank(rank: int, folder: Path, case: str, *arguments: str) -> None:
    silence()
    try:
        outcome = CASES[case](*arguments)
    finally:
        Path(f"ended_at.{rank}").write_text(str(time.time()))
    Path(f"{rank}.json").write_text(json.dumps(outcome))


def main(folder: Path, *arguments: str) -> None:
    """Print the exit code, the output and what was found of each rank."""
    codes, outputs = run_ranks(run_rank, folder, *arguments)
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("?.json"))]
    moments = {path.name: float(path.read_text()) for path in folder.glob("*ed_at*")}
    result = {"codes": codes, "outputs": outputs, "found": found, "moments": moments}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
