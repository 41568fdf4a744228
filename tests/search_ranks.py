"""A training with a search on several processes, as test_ranks.py asks for; each rank leaves what it saw in a file."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.weak import WeakIdKeyDictionary

import lightning_batchmem.batch_finder
from lightning_batchmem import BatchFinder, MemoryProfiler
from tests.conftest import FakeDevice

MIB = 2**20
SAMPLES = 600


class LiveBytes(FakeDevice, TorchDispatchMode):
    """Counts the bytes of all tensors that are alive: no copies of gloo's, no heap that keeps what is freed.

    A storage is known from the first operation that takes or gives it; FSDP2 gathers into it and frees it by resizing.
    """

    def __init__(self, budget_bytes: int) -> None:
        TorchDispatchMode.__init__(self)
        FakeDevice.__init__(self, budget_bytes)
        self._storages: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its shards come by themselves
        given = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, given)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._storages[tensor.untyped_storage()] = True
        self.reset_current()
        return given

    def reset_current(self) -> None:
        self._current_bytes = sum(storage.nbytes() for storage in list(self._storages))
        self._peak_bytes = max(self._peak_bytes, self._current_bytes)

    def reset_peak(self) -> None:
        self.reset_current()
        super().reset_peak()

    def use(self, size_bytes: int) -> None:
        """Nothing is made up."""

    def free(self, size_bytes: int | None = None) -> None:
        """Nothing is made up."""


METERS: list[FakeDevice] = []
CALLS: Counter[str] = Counter()
"""Of hooks, where no search can put it back."""


def loader_of(asked: dict[str, Any], rank: int, batch_size: int) -> DataLoader[Any]:
    """The training samples, in the shape that was asked for."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(asked.get("samples", SAMPLES), 8, generator=generator)
    data: Dataset[Any] = TensorDataset(x, x.sum(1, keepdim=True))
    match asked.get("data"):
        case "stream":
            return DataLoader(Stream(data, rank, asked["ranks"]), batch_size=batch_size)
        case "uneven":  # with use_distributed_sampler=False, each rank has what it has
            data = TensorDataset(*(tensor[: SAMPLES // (1 + rank)] for tensor in data.tensors))  # type: ignore[attr-defined]
    return DataLoader(data, batch_size=batch_size, shuffle=True)


class Stream(IterableDataset[Any]):
    """Every second sample (of two ranks): no length, and a rank's own."""

    def __init__(self, data: Any, rank: int, ranks: int) -> None:
        self.data, self.rank, self.ranks = data, rank, ranks

    def __iter__(self) -> Any:
        return (self.data[index] for index in range(self.rank, len(self.data), self.ranks))


class Data(LightningDataModule):
    """Has the batch size, which the module then does not have."""

    def __init__(self, asked: dict[str, Any]) -> None:
        super().__init__()
        self.asked, self.batch_size = asked, asked.get("batch_size", 4)

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        return loader_of(self.asked, self.trainer.global_rank, self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataloader().dataset, batch_size=self.batch_size)


class Net(LightningModule):
    """Fails, or uses memory, where it is told to; with BatchNorm, whose buffers DDP would exchange."""

    def __init__(self, asked: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="asked")
        self.asked, self.batch_size = asked, asked.get("batch_size", 4)
        self.steps, self.lr = 0, 0.01
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
        if width := asked.get("width"):  # parameters of 32 width^2 bytes, activations of about 64 width bytes a sample
            hidden = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.Tanh())]
            self.layers = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, width), *hidden, nn.Linear(width, 1))
        if asked.get("unused"):
            self.unused = nn.Linear(8, 1)
        if asked.get("data") == "datamodule":
            del self.batch_size

    def configure_model(self) -> None:
        if self.asked.get("strategy") == "fsdp2":
            from torch.distributed._composable.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            for layer in self.layers:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.layers, mesh=mesh)

    def trouble(self, where: str, count: int | None = None) -> None:
        asked = self.asked
        here = (where, self.steps if count is None else count)
        on_rank = asked.get("on_rank", 1)
        if here != (asked.get("where"), asked.get("at_step", 3)) or on_rank not in (self.global_rank, "all"):
            return
        match asked["trouble"]:
            case "out of memory":
                raise torch.cuda.OutOfMemoryError("CUDA out of memory (made up)")
            case "error":
                raise ValueError("the user's own error")
            case name:
                os.kill(os.getpid(), getattr(signal, name))

    def use_memory(self, batch: Any, *, more: int = 0) -> None:
        for device_memory in METERS:
            device_memory.use(100 * MIB + (len(batch[0]) + more) * MIB)
            device_memory.free()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        self.trouble("forward")
        self.use_memory(batch, more=self.asked.get("more", 0) * (self.global_rank == 1 and len(batch[0]) > 50))
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

    def configure_optimizers(self) -> Any:
        CALLS["configure_optimizers"] += 1
        self.trouble("configure_optimizers", CALLS["configure_optimizers"])
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        if not self.asked.get("scheduled"):
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[Any]:
        CALLS["train_dataloader"] += 1
        self.trouble("train_dataloader", CALLS["train_dataloader"])
        return loader_of(self.asked, self.global_rank, self.batch_size)


class Validated(Net):
    """Validates too, and logs it over all ranks."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.use_memory(batch)
        self.log("val/loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataloader().dataset, batch_size=self.batch_size)


class Evaluated(Validated):
    """Tests too."""

    test_step = Validated.validation_step

    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()


class Witness(Callback):
    """Writes down what the run itself saw, and what it left, in the process where it happened."""

    def __init__(self, directory: Path, finder: BatchFinder) -> None:
        self.directory, self.finder = directory, finder
        self.sizes: list[int] = []
        self.evaluated: list[int] = []
        self.batches: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))
        self.batches += batch

    def on_validation_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.evaluated.append(len(batch[0]))

    on_test_batch_end = on_validation_batch_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = trainer.optimizers[0].state_dict()["state"]
        moments = [value for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
        self.write(trainer, pl_module, moments=digest(moments), batches=digest(self.batches))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            self.write(trainer, pl_module)

    on_test_end = on_validation_end

    def write(self, trainer: Trainer, module: LightningModule, **left: str) -> None:
        plan = self.finder.plan
        seen = {
            "plan": None if plan is None else json.loads(plan.to_json()),
            "probes": sum(device_memory.num_releases for device_memory in METERS),
            "sizes": self.sizes,
            "evaluated": self.evaluated,
            "global_step": trainer.global_step,
            "left": {
                "parameters": digest([*module.parameters()]),
                "buffers": digest([*module.buffers()]),
                "random": digest([torch.get_rng_state()]),
                **left,
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
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    if budgets := asked.get("budgets"):
        device_memory = LiveBytes if asked.get("live_bytes") else FakeDevice
        METERS.append(device_memory(budget_bytes=budgets[own_rank()] * MIB))
        lightning_batchmem.batch_finder.device_memory_for = lambda device: METERS[0]  # type: ignore[assignment]
    seed_everything(7, verbose=False)
    finder = BatchFinder(**asked.get("finder", {}))
    callbacks: list[Callback] = [Witness(directory, finder)]
    if asked.get("profiled"):  # as in a project: both, and checkpoints
        callbacks += [MemoryProfiler(), ModelCheckpoint(directory, filename="last", every_n_train_steps=2)]
    trainer = Trainer(
        accelerator="cpu",
        devices=asked["ranks"] // asked.get("nodes", 1),
        num_nodes=asked.get("nodes", 1),
        strategy=strategy_of(asked),
        max_steps=asked.get("steps", 4),
        callbacks=[*callbacks, *([finder] if asked.get("search", True) else [])],
        logger=False,
        default_root_dir=directory,
        enable_checkpointing=bool(asked.get("profiled")),
        enable_progress_bar=False,
        enable_model_summary=False,
        **asked.get("trainer", {}),
    )
    kind = {"validate": Evaluated, "test": Evaluated, "fit": Validated if asked.get("validates") else Net}
    entry = asked.get("entry", "fit")
    passed: dict[str, Any] = {"datamodule": Data(asked)} if asked.get("data") == "datamodule" else {}
    if "resume" in asked:
        passed["ckpt_path"] = asked["resume"]
    module = kind[entry](asked)
    with METERS[0] if asked.get("live_bytes") else nullcontext():  # type: ignore[attr-defined]
        getattr(trainer, entry)(module, **passed)
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
    node, local_rank = divmod(rank, asked["ranks"] // asked.get("nodes", 1))
    here = {"RANK": rank, "LOCAL_RANK": local_rank, "NODE_RANK": node}
    here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in here.items()})
    train(asked, directory)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]), Path(sys.argv[2]))
