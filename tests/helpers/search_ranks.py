"""One rank of test_ranks.py, which runs trainings in one process group.

It writes the results to a file.
"""

import hashlib
import itertools
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    StrategyRegistry,
)
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import BatchFinder, find_batch_size
from tests.helpers.budgets import OfRank
from tests.helpers.fake_device import FakeDevice
from tests.helpers.lawful import MIB, quiet_trainer

_devices = []
_steps = itertools.count()


class HostFSDPStrategy(FSDPStrategy):
    """FSDP1 on the host.

    Lightning refuses the host for the class itself, and not for one that is derived from it. torch
    takes the host only where it is named.
    """

    def _setup_model(self, model):
        # Lightning leaves a model with wrapped parts as it is.
        if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
            return super()._setup_model(model)
        return FullyShardedDataParallel(
            module=model,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


class Net(LightningModule):
    """A network that uses memory and fails as the case requires.

    DDP would exchange the buffers of its BatchNorm.
    """

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.lr = 0.01
        self.size = 0
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)
        )
        if case.get("unfreezes") == "later":
            self.layers[0].requires_grad_(False)
        self.kept = []

    def configure_model(self):
        if "fsdp2" in self.case.get("strategy", ""):
            from torch.distributed._composable.fsdp import fully_shard

            for layer in (self.layers[0], self.layers[3], self.layers):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def on_train_epoch_start(self):
        if self.case.get("collectives_of_epoch"):
            torch.distributed.all_reduce(torch.zeros(1))
        if self.case.get("unfreezes") == "later" and self.current_epoch == 1:
            unfreeze(self.trainer, self)

    def fail(self, where):
        fails = self.case.get("fails", {})
        fails_here = (fails.get("where"), fails.get("rank", 1)) == (where, self.global_rank)
        if not fails_here or self.size < fails["size"]:
            return
        (Path(self.trainer.default_root_dir) / "failed_at").write_text(str(time.time()))
        if fails["error"] == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        errors = {"ValueError": ValueError, "OutOfMemoryError": torch.cuda.OutOfMemoryError}
        raise errors[fails["error"]]("made up")

    def keep(self, stage):
        """Keep a MiB of each step of a stage, on one rank only."""
        if self.case.get("keeps") == [stage, self.global_rank]:
            self.kept.append(torch.ones(MIB // 4))

    def forget(self, stage):
        """Exchange something at the end of an epoch, and forget what was kept."""
        if self.case.get("keeps", [""])[0] == stage:
            torch.distributed.all_reduce(torch.ones(1))
            self.kept = []

    def on_train_epoch_end(self):
        self.forget("training")

    def on_validation_epoch_end(self):
        self.forget("validation")

    def training_step(self, batch, batch_idx):
        self.keep("training")
        self.use_memory(len(batch[0]))
        self.fail("forward")
        # A step takes as long at any size, so a larger size is clearly faster.
        time.sleep(self.case.get("step_seconds", 0))
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        # These collectives go through Lightning.
        if self.case.get("exchanges"):
            self.log("loss", loss, sync_dist=True)
            self.all_gather(loss.detach())
        # This collective is the user's own, so Lightning does not know of it.
        if self.case.get("collectives"):
            torch.distributed.all_reduce(loss.detach().clone())
        if loss.requires_grad:
            loss.register_hook(lambda gradient: self.fail("backward"))
        return loss

    def use_memory(self, size):
        self.size = size
        if "unfreezes" in self.case and self.layers[0].weight.requires_grad:
            size = 2 * size
        is_small = self.case.get("varies") == self.global_rank and next(_steps) % 2
        for device in _devices:
            device.use((100 + (size // 2 if is_small else size)) * MIB)
            device.free()

    def validation_step(self, batch, batch_idx):
        self.keep("validation")
        self.use_memory(len(batch[0]))
        self.log(
            "val/loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True
        )

    def on_before_optimizer_step(self, optimizer):
        self.fail("optimizer")

    def configure_optimizers(self):
        self.fail("configure_optimizers")
        # The parameters of FSDP1 may be those of its wrapper only.
        optimizer = torch.optim.Adam(self.trainer.model.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Unfreezes(BaseFinetuning):
    """Unfreezes the first layer in the second epoch, in which a sample takes twice as much."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.layers[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.make_trainable(pl_module.layers[0])


def unfreeze(trainer, module):
    """Unfreeze what the case freezes in a hook of the user."""
    module.layers[0].requires_grad_(True)


class OwnLoader(DataLoader):
    """A loader of a class with an argument of its own, which Lightning makes again."""

    def __init__(self, dataset, batch_size, kind, **arguments):
        super().__init__(dataset, batch_size=batch_size, **arguments)
        self.kind = kind


class WithHook(Net):
    """The batch size is a number in the hook."""

    def __init__(self, case, dataset):
        super().__init__(case)
        self.rows = dataset
        self.made = self.make() if case["hook"] == "made at first" else None

    def make(self):
        # The attributes have no size.
        size = int(self.case.get("batch_size", "4"))
        if self.case["hook"] == "own class":
            return OwnLoader(self.rows, size, "kind", shuffle=True)
        return DataLoader(self.rows, batch_size=size, shuffle=True)

    def train_dataloader(self):
        return self.made or self.make()


class Recorder(Callback):
    """The batches of the run itself, without the search."""

    def __init__(self):
        self.batches = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, *_):
        self.batches.append(batch[0])

    on_validation_batch_end = on_train_batch_end


class WorkerEnvironment(LightningEnvironment):
    """Processes that another program has started; as in RayLightningEnvironment."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks

    def world_size(self):
        return self.ranks

    def set_world_size(self, size):
        pass

    def global_rank(self):
        return int(os.environ["RANK"])

    def set_global_rank(self, rank):
        pass


class OfWorker:
    """A strategy for a Trainer that has one device on each rank, as those of Ray Train."""

    @property
    def root_device(self):
        return torch.device("cpu")

    @property
    def distributed_sampler_kwargs(self):
        return {"num_replicas": self.world_size, "rank": self.global_rank}


class WorkerStrategy(OfWorker, DDPStrategy):
    """As RayDDPStrategy."""


class WorkerFSDPStrategy(OfWorker, HostFSDPStrategy):
    """As RayFSDPStrategy."""


class AllSharded(ModelParallelStrategy):
    """FSDP2 over all ranks, without an argument; projects register such a class as "fsdp2"."""

    def setup_environment(self):
        self._data_parallel_size = self.world_size
        self._tensor_parallel_size = 1
        super().setup_environment()


class WorkerModelParallelStrategy(OfWorker, AllSharded):
    """As the RayModelParallelStrategy that projects write."""


StrategyRegistry.register("fsdp2", AllSharded, override=True)


def strategy_of(case, ranks):
    """The arguments of the Trainer that choose the strategy of a case."""
    given = case.get("ddp", case.get("fsdp", {}))
    if "auto_wrap_policy" in given:
        given = {**given, "auto_wrap_policy": {nn.Linear}}
    kinds = {
        "workers": WorkerStrategy,
        "workers, fsdp": WorkerFSDPStrategy,
        "workers, fsdp2": WorkerModelParallelStrategy,
        "fsdp": HostFSDPStrategy,
        "ddp": DDPStrategy,
    }
    name = case.get("strategy", "ddp")
    if name == "fsdp2":
        sharded = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
        return {"devices": ranks, "strategy": sharded}
    if name == "fsdp2 by name":
        return {"devices": ranks, "strategy": "fsdp2"}
    strategy = kinds[name](**given)
    if isinstance(strategy, OfWorker):
        return {"strategy": strategy, "plugins": [WorkerEnvironment(ranks)]}
    return {"devices": ranks, "strategy": strategy}


def digest(tensors):
    """A hash of the tensors; of this rank's shards under FSDP2."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return hashlib.sha256(
        b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in local)
    ).hexdigest()


def roots_in(module):
    """The number of modules that FSDP1 takes for a root, which keep what they have gathered."""
    parts = [part for part in module.modules() if isinstance(part, FullyShardedDataParallel)]
    return sum(part._is_root is True for part in parts)


def run_case(case, directory, ranks):
    """Train, or validate, and return what this rank saw, with the warnings of BatchFinder."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = _run_case(case, directory, ranks)
    texts = [str(warning.message) for warning in caught]
    return {
        **seen,
        "warnings": [text for text in texts if text.startswith("BatchFinder leaves")],
        "not_restored": [text for text in texts if "restore" in text],
    }


def _run_case(case, directory, ranks):
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    (directory / f"{os.getpid()}.pid").touch()
    _devices.clear()
    if budgets := case.get("budgets", [400] * ranks):
        _devices.append(FakeDevice(available_bytes=budgets[rank] * MIB))
        _devices[0].is_host = case.get("is_shared", False)
    seed_everything(7, verbose=False)
    options = {"objective": "memory", "min_steps_per_epoch": None, **case.get("finder", {})}
    if case.get("unfreezes") == "later":
        options["later"] = case.get("later", unfreeze)
    # Only the first rank can read the file of the plan.
    if case.get("reuses"):
        options["plan"] = directory / ("plan.txt" if rank == 0 else "none")
    finder = (BatchFinder.optional if case.get("optional") else BatchFinder)(**options)
    if _devices:
        finder.device_memory = lambda device: module.fail("check") or _devices[0]
    recorder = Recorder()
    searches_in_fit = case.get("search", True) and "find" not in case
    callbacks = [recorder, finder] if searches_in_fit else [recorder]
    if case.get("unfreezes") == "callback":
        callbacks.append(Unfreezes())
    if case.get("saves"):
        callbacks.append(ModelCheckpoint(directory, "last", every_n_train_steps=2))
    trainer = quiet_trainer(
        *callbacks,
        default_root_dir=directory,
        enable_checkpointing=bool(case.get("saves")),
        **{
            "max_steps": 3,
            "limit_val_batches": 0,
            **strategy_of(case, ranks),
            **case.get("trainer", {}),
        },
    )
    x = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(x, x.sum(1, keepdim=True))
    module = WithHook(case, rows) if "hook" in case else Net(case)
    data = DataLoader(rows, batch_size=int(case.get("batch_size", 4)), shuffle=True)
    if "max_tokens" in case:
        lengths = [1 + index % 5 for index in range(len(x))]
        sampler = OfRank(lengths, case["max_tokens"], rank, ranks)
        data = DataLoader(data.dataset, batch_sampler=sampler)
    plan = None
    if "find" in case and case.get("search", True):
        plan = find_batch_size(trainer, module, None, data, data, **options)
        data = DataLoader(rows, batch_size=plan.batch_size, shuffle=True)
    if case.get("entry") == "validate":
        trainer.validate(module, data, verbose=False)
    else:
        trained = None if "hook" in case else data
        trainer.fit(
            module,
            trained,
            data,
            ckpt_path=directory / "last.ckpt" if case.get("resumes") else None,
        )
    if case.get("saves") and rank == 0:
        (directory / "plan.txt").write_text(finder.plan.to_json())
    states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
    entries = itertools.chain.from_iterable(state.values() for state in states)
    moments = [value for entry in entries for value in entry.values() if hasattr(value, "shape")]
    plan = plan or getattr(finder, "plan", None)
    model = trainer.strategy.model
    return {
        "plan": json.loads(plan.to_json()) if plan else None,
        "releases": sum(device.num_releases for device in _devices),
        "sizes": [len(batch) for batch in recorder.batches],
        "batches": digest(recorder.batches),
        "left": {
            "steps": trainer.global_step,
            "parameters": digest([*model.parameters(), *model.buffers()]),
            "moments": digest(moments),
            "roots": roots_in(model),
            "random": digest([torch.get_rng_state()]),
        },
    }


def run_cases(rank, directory, cases, ranks):
    """Run the cases one after the other; an error of a single case is part of the result."""
    seen = {}
    for name, case in cases.items():
        try:
            seen[name] = run_case(case, directory, ranks)
        except (RuntimeError, ValueError) as error:
            if case.get("ends"):
                raise
            seen[name] = {"error": f"{type(error).__name__}: {error}"}
    (directory / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    run_case(json.loads(sys.argv[1]), Path(sys.argv[2]), ranks=2)
