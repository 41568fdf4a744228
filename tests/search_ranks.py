"""Searches on several processes, as test_ranks.py asks for; what each rank saw is in a file of its own."""

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


class Net(LightningModule):
    """Fails, or uses memory, where it is told to; with BatchNorm, whose buffers DDP would exchange."""

    def __init__(self, asked: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="asked")
        self.asked, self.batch_size = asked, asked.get("batch_size", 4)
        self.steps = 0
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
        meter = METERS[0] if METERS else None
        self.use = (lambda size: (meter.use(100 * MIB + size * MIB), meter.free())) if meter else (lambda size: None)

    def configure_model(self) -> None:
        if self.asked.get("strategy") == "fsdp2":
            from torch.distributed._composable.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            for layer in self.layers:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.layers, mesh=mesh)

    def trouble(self, where: str) -> None:
        if (self.global_rank, self.asked.get("where"), self.steps) != (1, where, self.asked.get("at_step", 3)):
            return
        match self.asked["trouble"]:
            case "out of memory":
                raise torch.cuda.OutOfMemoryError("CUDA out of memory (made up)")
            case "error":
                raise ValueError("the user's own error")
            case name:
                os.kill(os.getpid(), getattr(signal, name))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        self.trouble("forward")
        self.use(len(batch[0]))
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        if loss.requires_grad:
            loss.register_hook(lambda gradient: self.trouble("backward"))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.trouble("optimizer")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(SAMPLES, 8, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=self.batch_size, shuffle=True)


class Sizes(Callback):
    """The batches that training itself ran."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [len(batch[0]), round(float(batch[0].sum()), 4)]


METERS: list[FakeMeter] = []


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(local.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    asked, directory = json.loads(sys.argv[1]), Path(sys.argv[2])
    warnings.simplefilter("ignore")
    ranks = asked.get("ranks", 2)
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    callbacks: list[Callback] = [Sizes()]
    finder = BatchFinder(**asked.get("finder", {}))
    if asked.get("search", True):
        callbacks.append(finder)
    if budgets := asked.get("budgets"):
        METERS.append(FakeMeter(budget_bytes=budgets[rank] * MIB))
        lightning_batchmem.batch_finder.meter_for = lambda device: METERS[0]  # type: ignore[assignment]
    seed_everything(7, verbose=False)
    strategy: Any = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    if asked.get("strategy") != "fsdp2":
        strategy = DDPStrategy(process_group_backend="gloo", **asked.get("ddp", {}))
    net = Net(asked)
    trainer = Trainer(
        accelerator="cpu",
        devices=asked.get("devices", ranks),
        num_nodes=asked.get("nodes", 1),
        strategy=strategy,
        max_steps=asked.get("steps", 4),
        callbacks=callbacks,
        logger=False,
        default_root_dir=directory,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **asked.get("trainer", {}),
    )
    trainer.fit(net)
    state = trainer.optimizers[0].state_dict()["state"]
    moments = [value for entry in state.values() for value in entry.values()]
    result = {
        "plan": None if finder.plan is None else json.loads(finder.plan.to_json()),
        "sizes": callbacks[0].seen,  # type: ignore[attr-defined]
        "weights": digest([*net.parameters(), *net.buffers()]),
        "parameters": digest([*net.parameters()]),
        "moments": digest([one for one in moments if isinstance(one, torch.Tensor)]),
        "random": digest([torch.get_rng_state()]),
    }
    (directory / f"rank{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
