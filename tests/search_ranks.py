"""A training with a search on several processes, as test_ranks.py asks for; each rank leaves what it saw in a file."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_batchmem.batch_finder
from lightning_batchmem import BatchFinder
from tests.conftest import FakeMeter

MIB = 2**20
SAMPLES = 600

METERS: list[FakeMeter] = []


class Net(LightningModule):
    """Fails, or uses memory, where it is told to; with BatchNorm, whose buffers DDP would exchange."""

    def __init__(self, asked: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="asked")
        self.asked, self.batch_size = asked, asked.get("batch_size", 4)
        self.steps, self.lr = 0, 0.01
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))

    def configure_model(self) -> None:
        if self.asked.get("strategy") == "fsdp2":
            from torch.distributed._composable.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            for layer in self.layers:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.layers, mesh=mesh)

    def trouble(self, where: str) -> None:
        asked = self.asked
        here = (self.global_rank, where, self.steps)
        if here != (asked.get("on_rank", 1), asked.get("where"), asked.get("at_step", 3)):
            return
        match asked["trouble"]:
            case "out of memory":
                raise torch.cuda.OutOfMemoryError("CUDA out of memory (made up)")
            case "error":
                raise ValueError("the user's own error")
            case name:
                os.kill(os.getpid(), getattr(signal, name))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        self.trouble("forward")
        for meter in METERS:
            more = self.asked.get("more", 0) * (self.global_rank == 1 and len(batch[0]) > 50)
            meter.use(100 * MIB + (len(batch[0]) + more) * MIB)
            meter.free()
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        if self.asked.get("sync"):  # collectives of the user's own
            self.log("loss", loss, sync_dist=True)
            self.all_gather(loss.detach())
            self.trainer.strategy.barrier()
        if loss.requires_grad:
            loss.register_hook(lambda gradient: self.trouble("backward"))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.trouble("optimizer")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(SAMPLES, 8, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=self.batch_size, shuffle=True)


class Validated(Net):
    """Validates too, and logs it over all ranks."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataloader().dataset, batch_size=self.batch_size)


class Witness(Callback):
    """Writes down what training itself saw, and what it left, in the process where it happened."""

    def __init__(self, directory: Path, finder: BatchFinder) -> None:
        self.directory, self.finder = directory, finder
        self.sizes: list[int] = []
        self.batches: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))
        self.batches += batch

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plan, state = self.finder.plan, trainer.optimizers[0].state_dict()["state"]
        moments = [value for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
        seen = {
            "plan": None if plan is None else json.loads(plan.to_json()),
            "sizes": self.sizes,
            "left": {
                "parameters": digest([*pl_module.parameters()]),
                "buffers": digest([*pl_module.buffers()]),
                "moments": digest(moments),
                "random": digest([torch.get_rng_state()]),
                "batches": digest(self.batches),
            },
        }
        (self.directory / f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))


def digest(tensors: list[Any]) -> str:
    assert tensors
    found = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(local.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def strategy_of(asked: dict[str, Any]) -> Any:
    match asked.get("strategy", "ddp"):
        case "ddp":
            return DDPStrategy(process_group_backend="gloo", **asked.get("ddp", {}))
        case "fsdp2":
            return ModelParallelStrategy(data_parallel_size=asked["ranks"], tensor_parallel_size=1)
        case name:
            return name


def train(asked: dict[str, Any], directory: Path) -> None:
    warnings.simplefilter("ignore")
    if budgets := asked.get("budgets"):
        METERS.append(FakeMeter(budget_bytes=budgets[own_rank()] * MIB))
        lightning_batchmem.batch_finder.meter_for = lambda device: METERS[0]  # type: ignore[assignment]
    seed_everything(7, verbose=False)
    finder = BatchFinder(**asked.get("finder", {}))
    trainer = Trainer(
        accelerator="cpu",
        devices=asked["ranks"] // asked.get("nodes", 1),
        num_nodes=asked.get("nodes", 1),
        strategy=strategy_of(asked),
        max_steps=asked.get("steps", 4),
        callbacks=[Witness(directory, finder), *([finder] if asked.get("search", True) else [])],
        logger=False,
        default_root_dir=directory,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit((Validated if asked.get("validates") else Net)(asked))
    print("after fit:", finder.plan and finder.plan.batch_size)  # noqa: T201 - for the test to read


def own_rank() -> int:
    """Before there is a trainer that knows it; torchrun gives both, Lightning's launcher of scripts only the second."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


def train_as_rank(asked: dict[str, Any], directory: Path, rank: int, port: int) -> None:
    """One rank of those that the caller starts, as a cluster does; what it says is in a file of its own."""
    os.setpgrp()  # its workers are found by it
    said = os.open(directory / f"rank{rank}.out", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    here = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in here.items()})
    train(asked, directory)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]), Path(sys.argv[2]))
