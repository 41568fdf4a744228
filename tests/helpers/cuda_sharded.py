"""Cases of ``tests/gpu/test_cuda_sharded.py``: two ranks with a device each, with gloo.

Each way to train runs in new processes: after a search, and with the size hard-coded.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)
from torch import Tensor, nn
from torch.distributed._composable.fsdp import fully_shard
from torch.utils.data import DataLoader

from benchmarks.common import silence
from lightning_batchmem import BatchFinder, find_batch_size
from tests.helpers.cuda_stub import mib
from tests.helpers.lawful import quiet_trainer
from tests.helpers.rank_processes import run_ranks
from tests.helpers.search_ranks import roots_in

RANKS = 2
SIZE = 256
WIDTH = 1024


class Net(LightningModule):
    """Layers whose parameters take more memory than a batch."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]
            for layer in (*self.layers, self.layers):
                fully_shard(layer, mesh=mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(torch.empty(len(batch), WIDTH, device=self.device)).square().mean()

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # The parameters of FSDP1 may be those of its wrapper only.
        return torch.optim.Adam(self.trainer.model.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(range(100_003), batch_size=self.batch_size)

    val_dataloader = train_dataloader


class TrainingMemory(Callback):
    """Reads what the training takes of this rank's device, without the search before it."""

    def on_train_start(self, *_: Any) -> None:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        self.start = self._now()

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.found = {
            **self.start,
            "peak_live_mib": mib(torch.cuda.max_memory_allocated()),
            "peak_reserved_mib": mib(torch.cuda.max_memory_reserved()),
            "roots": roots_in(trainer.strategy.model),
        }

    def _now(self) -> dict[str, Any]:
        return {
            "start_live_mib": mib(torch.cuda.memory_allocated()),
            "start_reserved_mib": mib(torch.cuda.memory_reserved()),
        }


def fsdp(**options: Any) -> Callable[[], Strategy]:
    def make() -> Strategy:
        return FSDPStrategy(process_group_backend="gloo", auto_wrap_policy={nn.Linear}, **options)

    return make


WAYS: dict[str, Callable[[], Strategy]] = {
    "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
    "fsdp": fsdp(),
    "fsdp, flat parameters": fsdp(use_orig_params=False),
    "fsdp, SHARD_GRAD_OP": fsdp(sharding_strategy="SHARD_GRAD_OP"),
    "fsdp, NO_SHARD": fsdp(sharding_strategy="NO_SHARD"),
    "fsdp, CPU offload": fsdp(cpu_offload=True),
    "fsdp2": lambda: ModelParallelStrategy(RANKS, 1, process_group_backend="gloo"),
}


def train(way: str, search: str) -> dict[str, Any]:
    """Train after a search.

    It is one ``in fit`` up to a size, one that memory limits (``largest``), or one ``before`` fit.
    With the size ``hard-coded`` there is none.
    """
    module = Net(SIZE if search == "hard-coded" else 2)
    memory = TrainingMemory()
    options: dict[str, Any] = {"min_steps_per_epoch": None}
    if search != "largest":
        options["max_batch_size"] = SIZE
    finder = BatchFinder(**options, objective="memory")
    trainer = quiet_trainer(
        *([finder] if search in ("in fit", "largest") else []),
        memory,
        accelerator="gpu",
        devices=RANKS,
        strategy=WAYS[way](),
        max_steps=5,
        limit_val_batches=2,
    )
    if search == "before":
        module.batch_size = find_batch_size(
            trainer, module, **options, objective="memory"
        ).batch_size
    trainer.fit(module)
    found = {"size": module.batch_size, "steps": trainer.global_step, **memory.found}
    # It is not a callback of each training.
    plan = getattr(finder, "plan", None)
    if plan is not None:
        found["limited_by"] = plan.limited_by
        found["verified"] = plan.verified
        found["limit_mib"] = mib(plan.limit_bytes)
    return found


def run_rank(rank: int, folder: Path, way: str, search: str) -> None:
    silence()
    Path(f"{rank}.json").write_text(json.dumps(train(way, search)))


def main(folder: Path, way: str, *searches: str) -> None:
    """Print what each rank found in each training."""
    found = {}
    for search in searches:
        of_search = folder / search
        of_search.mkdir()
        codes, outputs = run_ranks(run_rank, of_search, way, search)
        if any(codes):
            raise RuntimeError("\n".join(outputs))
        found[search] = [json.loads((of_search / f"{r}.json").read_text()) for r in range(RANKS)]
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
