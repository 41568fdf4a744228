"""The ways to train in which the contract is checked: modules, data and options of a Trainer."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import random
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as lightning_callbacks
import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    default_collate,
    random_split,
)
from torchmetrics import CatMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.helpers.wrapped_optimizers import Lookahead

# Every search of the contract ends with this size: max_batch_size bounds it, and memory does not.
SIZE = 8
SAMPLES = 32


class Noisy(Dataset):
    """Samples augmented with all three generators, and with one of the data set's own."""

    def __init__(self, own_generator: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 6, generator=generator)
        self.y = torch.randint(3, (SAMPLES,), generator=generator)
        self.generator = torch.Generator().manual_seed(2) if own_generator else None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = (
            torch.randn(6, generator=self.generator) + random.random() + float(np.random.random())
        )
        return self.x[index] + 0.1 * noise, self.y[index]


def shuffled(size: int, dataset: Dataset[Any] | None = None, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(dataset or Noisy(), batch_size=size, shuffle=True, **arguments)


class Net(LightningModule):
    """BatchNorm, dropout, a metric, a non-persistent buffer and attributes that steps change.

    The metric is logged as an object.
    """

    def __init__(
        self, batch_size: int, optimizer: str = "sgd", workers: int = 0, lr: float = 1e-2
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.lr = lr
        self.optimizer_name = optimizer
        self.workers = workers
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
        )
        self.accuracy = MulticlassAccuracy(num_classes=3)
        self.register_buffer("steps_seen", torch.zeros(()), persistent=False)
        self.history: list[int] = []
        self.running = {"loss": torch.zeros(())}

    def on_train_epoch_start(self) -> None:
        self.epoch_steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        scores = self.layers(x)
        loss = nn.functional.cross_entropy(scores, y)
        self.steps_seen += 1
        self.epoch_steps += 1
        self.history.append(batch_idx)
        self.running["loss"] = self.running["loss"] * 0.9 + loss.detach() * 0.1
        self.accuracy(scores, y)
        self.log("loss", loss)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(x), y))

    def configure_optimizers(self) -> Any:
        # The generator must be in the same state here as in the hard-coded run.
        torch.rand(1)
        sgd = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if self.optimizer_name == "onecycle":
            total = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                sgd, max_lr=10 * self.lr, total_steps=total
            )
            return {"optimizer": sgd, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        if self.optimizer_name == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0, factor=0.5)
            return {
                "optimizer": sgd,
                "lr_scheduler": {"scheduler": plateau, "monitor": "epoch_loss"},
            }
        return sgd

    def train_dataloader(self) -> DataLoader[Any]:
        return shuffled(
            self.batch_size, num_workers=self.workers, persistent_workers=self.workers > 0
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Noisy(), batch_size=self.batch_size)


class OfLookahead(Net):
    """Its optimizer is inside another one, which does not call ``Optimizer.__init__``."""

    def configure_optimizers(self) -> Any:
        return Lookahead(super().configure_optimizers())


class Adversarial(Net):
    """Manual optimization with two optimizers."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.automatic_optimization = False
        self.critic = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        first, second = self.optimizers()
        scores = self.layers(x)
        loss = nn.functional.cross_entropy(scores, y) - self.critic(scores).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        judged = self.critic(self.layers(x).detach()).pow(2).mean()
        second.zero_grad()
        self.manual_backward(judged)
        second.step()
        self.steps_seen += 1
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.layers.parameters(), lr=1e-2),
            torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9),
        ]


class Data(LightningDataModule):
    """The size in the datamodule's hyperparameters."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader[Any]:
        return shuffled(self.hparams.batch_size)


class ManyLoaders(Net):
    """Several training loaders, one with a size of its own and one with twice the batch size."""

    def train_dataloader(self) -> Any:
        return {
            "labeled": shuffled(self.batch_size),
            "unlabeled": shuffled(2 * self.batch_size, Noisy(True)),
            "anchors": DataLoader(Noisy(), batch_size=5),
        }

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch["labeled"], batch_idx)
        others = torch.cat([batch["unlabeled"][0], batch["anchors"][0]])
        return loss + 0.1 * self.layers(others).square().mean()


class FixedValidation(Net):
    """Validation has batch sizes that stay, draws and counts."""

    def val_dataloader(self) -> Any:
        return [DataLoader(Noisy(), batch_size=7), DataLoader(Noisy(True), batch_size=5)]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.history.append(len(batch[1]))
        torch.rand(1)

    def on_validation_epoch_end(self) -> None:
        self.log("batches", float(len(self.history)))


class Plain(Net):
    """No loader of its own and no batch size."""

    train_dataloader = LightningModule.train_dataloader
    val_dataloader = LightningModule.val_dataloader

    def __init__(self, batch_size: int = 0, optimizer: str = "sgd") -> None:
        super().__init__(batch_size, optimizer)
        del self.batch_size


class InHparams(Plain):
    """The size in the hyperparameters of the module."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader[Any]:
        return shuffled(self.hparams.batch_size)


class OfLists(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x, y), (other, _) = batch
        return super().training_step((x, y), batch_idx) + self.layers(other).square().mean()


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Hooked(Net):
    """Puts hooks on tensors and a parametrization on a layer.

    It reads the trainer's data before the first batch, and a step reads the logger's directory.
    """

    def on_fit_start(self) -> None:
        self.layers[0].weight.register_hook(lambda gradient: gradient * 0.5)
        self.layers[0].bias.register_post_accumulate_grad_hook(halve)

    def on_train_start(self) -> None:
        nn.utils.parametrizations.orthogonal(self.layers[4], orthogonal_map="householder")
        loaders = self.trainer.train_dataloader, self.trainer.val_dataloaders
        self.history += [
            *map(len, loaders),
            len(loaders[0].dataset),
            int(self.trainer.num_training_batches),
        ]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.logger.log_dir
        assert self.trainer.log_dir
        return super().training_step(batch, batch_idx)


class Weights(Callback):
    """Has a weight for each step, drawn and counted."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(8)
        self.drawn: list[float] = []
        self.calls = 0

    def weight(self) -> float:
        self.calls += 1
        self.drawn.append(float(torch.rand(1, generator=self.generator)))
        return self.drawn[-1] + self.calls


class ReadsCallbacks(Net):
    """A step reads callbacks and the logger."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weights = next(one for one in self.trainer.callbacks if isinstance(one, Weights))
        assert isinstance(self.logger, CSVLogger)
        self.logger.log_metrics({"own": 1.0}, step=batch_idx)
        experiment = self.logger.experiment
        assert experiment.NAME_METRICS_FILE == "metrics.csv"
        self.history += [
            self.trainer.early_stopping_callback.patience,
            len(experiment.metrics),
            len(weights.drawn),
        ]
        return super().training_step(batch, batch_idx) * weights.weight()


class Saves(Callback):
    """Counts the checkpoints that have its state, which begins in ``on_train_start``."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.saves = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # mypy does not see that the module has this attribute.
        pl_module.history.append(self.saves)  # type: ignore[union-attr, operator]

    def state_dict(self) -> dict[str, Any]:
        self.saves += 1
        return {"saves": self.saves}


class Quantized(Net):
    """Trains for int8: the observers of each channel resize their buffers in the first step."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.quantize = FakeQuantize(
            MovingAveragePerChannelMinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * self.quantize(self.layers[0].weight).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.quantize(self.layers[0].weight)
        super().validation_step(batch, batch_idx)


class Extractor:
    """Keeps what a layer puts out, from a hook on the layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.features: list[Tensor] = []
        layer.register_forward_hook(lambda module, inputs, output: self.features.append(output))


class Entangled(Net):
    """Two generators, an unregistered teacher, a hook that fills a list, and a sparse buffer.

    One of the generators is the loader's.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size, "onecycle")
        self.noise = torch.Generator().manual_seed(4)
        self.order = torch.Generator().manual_seed(6)
        self.teacher = [nn.Linear(6, 3)]
        self.extractor = Extractor(self.layers[0])
        self.register_buffer("adjacency", torch.eye(6).to_sparse())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        noise = torch.rand(x.shape, generator=self.noise)
        x = torch.sparse.mm(self.adjacency, x.t()).t() + 0.1 * noise
        loss = super().training_step((x, y), batch_idx)
        with torch.no_grad():
            self.teacher[0].weight.mul_(0.99).add_(self.layers[4].weight[:, :6], alpha=0.01)
        features = self.extractor.features.pop()
        penalty = 0.01 * features.square().mean()
        distance = (self.teacher[0](x) - self.layers(x)).square().mean()
        return loss + penalty + distance

    def train_dataloader(self) -> DataLoader[Any]:
        return shuffled(self.batch_size, generator=self.order)


class OwnOptimizers(Net):
    """Makes optimizers and schedules once, in ``__init__``.

    It returns some to Lightning, and steps the others itself.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.adam = torch.optim.Adam(self.layers.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.adam, 2)
        self.offset = nn.Parameter(torch.zeros(3))
        self.aux = torch.optim.Adam([self.offset], lr=0.1)
        self.decay = torch.optim.lr_scheduler.OneCycleLR(self.aux, 0.1, total_steps=SAMPLES // SIZE)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.aux.zero_grad()
        self.offset.sub(1).square().sum().backward()
        self.aux.step()
        self.decay.step()
        loss = super().training_step(batch, batch_idx)
        return loss + self.offset.detach().sum() * self.layers[0].weight.sum()

    def configure_optimizers(self) -> Any:
        return {
            "optimizer": self.adam,
            "lr_scheduler": {"scheduler": self.schedule, "interval": "step"},
        }


class KeepsSchedule(Net):
    """Keeps the schedule that ``configure_optimizers`` makes, and steps it itself."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return optimizer

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.schedule.step()


class AveragedInValidation(Net):
    """Validates with an average of its weights, which two start hooks swap in.

    A step with the average is an error, as with the optimizers of schedulefree.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.register_buffer("average", torch.zeros(3, 16))
        self.swaps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.swaps % 2 == 0
        self.average.lerp_(self.layers[4].weight.detach(), 0.1)
        return super().training_step(batch, batch_idx)

    def swap(self) -> None:
        weight = self.layers[4].weight.data.clone()
        self.layers[4].weight.data.copy_(self.average)
        self.average.copy_(weight)
        self.swaps += 1

    on_validation_start = on_validation_end = swap

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.swaps % 2 == 1
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("swaps", float(self.swaps))


def scripted(batch_size: int) -> Net:
    module = Net(batch_size)
    module.layers = torch.jit.script(module.layers)
    return module


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        # mypy does not accept an object that is iterable through __getitem__ alone.
        return iter(Noisy())  # type: ignore[call-overload]


class Collate:
    """Takes the samples apart and counts its calls, and the count changes the batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.calls += 1
        y = torch.stack([sample.pop() for sample in samples])
        return torch.stack([sample.pop() for sample in samples]) + 0.01 * self.calls, y


class Mixing(Noisy):
    """A data set whose collate function is a method that draws, counts and has a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.order = torch.Generator().manual_seed(7)
        self.calls = 0
        self.cache: dict[str, Tensor] = {}

    def collate(self, samples: list[Any]) -> Any:
        self.calls += 1
        x, y = default_collate(samples)
        last = self.cache.get("last", x[:1])
        self.cache["last"] = x[-1:]
        noise = torch.randn(x.shape, generator=self.order)
        return x + 0.1 * noise + 0.01 * self.calls + 0.1 * last, y


class Popping(Noisy):
    def __getitem__(self, index: int) -> Any:
        return list(super().__getitem__(index))


class Splitting(Data):
    """Splits at random on the first request of a loader, and keeps the split."""

    def train_dataloader(self) -> DataLoader[Any]:
        if not hasattr(self, "part"):
            self.part, _ = random_split(Noisy(), [SAMPLES - 8, 8])
        return shuffled(self.hparams.batch_size, self.part)


class InDict(LightningDataModule):
    """The size in a dict of arguments, as in torch_geometric, and in the hyperparameters."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.save_hyperparameters({"kwargs": {"batch_size": batch_size}})
        self.kwargs = {"batch_size": batch_size, "shuffle": True}

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Noisy(), **self.kwargs)


class ReadsBatches(Noisy):
    """Reads all samples of a batch at once."""

    def __getitem__(self, indices: Any) -> Any:
        return default_collate([super(ReadsBatches, self).__getitem__(index) for index in indices])


class Cached(Noisy):
    """Keeps augmented samples in shared memory, and counts its reads there."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.zeros(SAMPLES, 6).share_memory_()
        self.is_cached = multiprocessing.Array("b", SAMPLES)
        self.reads = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # Typeshed has no types of what these hold.
        self.reads.value += 1  # type: ignore[attr-defined]
        if not self.is_cached[index]:  # type: ignore[index]
            self.cache[index] = super().__getitem__(index)[0]
            self.is_cached[index] = True  # type: ignore[index]
        return self.cache[index] + 0.01 * self.reads.value, self.y[index]  # type: ignore[attr-defined]


class CountsInSharedMemory:
    """A collate function for workers that count together, as for a size that changes with time."""

    def __init__(self) -> None:
        self.calls = multiprocessing.Value("i", 0)

    def __call__(self, samples: list[Any]) -> Any:
        self.calls.value += 1  # type: ignore[attr-defined]
        x, y = default_collate(samples)
        return x + 0.01 * self.calls.value, y  # type: ignore[attr-defined]


class LockedCounts:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = [0]


class LockedCollate:
    """Counts in an object that cannot be copied."""

    def __init__(self) -> None:
        self.counts = LockedCounts()

    def __call__(self, samples: list[Any]) -> Any:
        with self.counts.lock:
            self.counts.calls[0] += 1
        x, y = default_collate(samples)
        return x + 0.01 * self.counts.calls[0], y


class Lines(Noisy):
    """Reads on in a file that stays open."""

    def __init__(self) -> None:
        super().__init__()
        with tempfile.NamedTemporaryFile("w", delete=False) as file:
            file.write("\n".join(map(str, range(10_000))))
        self.file = Path(file.name).open()  # noqa: SIM115
        Path(file.name).unlink()

    def __del__(self) -> None:
        self.file.close()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + 0.001 * float(self.file.readline()), y


class Owning:
    """Has a folder that is removed with this object, and counts."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "scale").write_text("0.01")
        self.calls: list[int] = []

    def __del__(self) -> None:
        # A forked process has it too, and may have removed it.
        shutil.rmtree(self.folder, ignore_errors=True)

    def scaled(self) -> float:
        self.calls.append(len(self.calls))
        return float((self.folder / "scale").read_text()) * len(self.calls)


class OwningRows(Owning, Noisy):
    def __init__(self) -> None:
        Owning.__init__(self)
        Noisy.__init__(self)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = Noisy.__getitem__(self, index)
        return x + self.scaled(), y


class OwningOrder(Owning, Sampler[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        begin = round(100 * self.scaled())
        return iter([(begin + index) % SAMPLES for index in range(SAMPLES)])


class OwningCollate(Owning):
    def __call__(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x + self.scaled(), y


def all_owning(size: int) -> DataLoader[Any]:
    return DataLoader(
        OwningRows(), batch_size=size, sampler=OwningOrder(), collate_fn=OwningCollate()
    )


class FetchesBatches(Noisy):
    """Reads a batch at once, in a form that only it can join: padded to its longest sample."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        self.reads += 1
        samples = [super(FetchesBatches, self).__getitem__(index) for index in indices]
        x, y = default_collate(samples)
        mask = torch.ones(len(indices), 1 + max(index % 3 for index in indices))
        return {"x": x + 0.01 * self.reads, "y": y, "mask": mask}


def unchanged(batch: Any) -> Any:
    return batch


def fetched(size: int) -> DataLoader[Any]:
    return shuffled(size, FetchesBatches(), collate_fn=unchanged)


class OfFetched(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch["x"], batch["y"]), batch_idx) * batch["mask"].mean()


class Grows(Net):
    """Frozen layers and few features at first; both, and a memory bank, come later."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        self.features = 3
        self.bank: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.bank = [*self.bank, x][-6:]
        mask = (torch.arange(6, device=x.device) < self.features).to(x.dtype)
        return super().training_step([self.backbone(x * mask), y], batch_idx)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.features = 3 * (1 + self.current_epoch)

    def configure_optimizers(self) -> Any:
        # Finetuning adds the rest.
        return torch.optim.Adam(parameter for parameter in self.layers.parameters())


class GrowsByHook(Grows):
    """A hook of the module unfreezes the backbone."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.backbone.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.backbone.requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def full(trainer: Trainer, module: Any) -> None:
    """Make the state at the end of the training; it draws and counts too."""
    module.features = 6
    module.backbone.requires_grad_(True)
    module.bank = [torch.rand(module.batch_size, 6, device=module.device) for _ in range(6)]
    module.running["loss"] += 1
    module.history.append(-1)


class InTwoSteps(BaseFinetuning):
    """Unfreezes one layer in the first epoch, and the other one in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.unfrozen: list[int] = []

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        self.unfrozen.append(epoch)
        layer = pl_module.backbone[2 * epoch].requires_grad_(True)
        optimizer.add_param_group({"params": list(layer.parameters())})


class FreezesAgain(InTwoSteps):
    """Trains the backbone in the first epoch only."""

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 0:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)
        else:
            self.freeze(pl_module.backbone)


class Narrow(Noisy):
    """Samples of which only the first features are there."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x[: self.features], y


class Resolution(Net):
    """The samples of each epoch have more features."""

    forced = 0

    def train_dataloader(self) -> DataLoader[Any]:
        features = self.forced or 3 * (1 + self.trainer.current_epoch)
        return shuffled(self.batch_size, Narrow(features))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.history.append(x.shape[1])
        x = nn.functional.pad(x, (0, 6 - x.shape[1]))
        return super().training_step([x, y], batch_idx)


def all_features(trainer: Trainer, module: Any) -> None:
    module.forced = 6


class Rollout(Net):
    """Each epoch has a longer rollout; the last one has a teacher, and another layer.

    A hook of the module adds the layer to the optimizer, and copies the teacher.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.cell = nn.Linear(6, 6)
        self.rollout = 1
        self.teacher: nn.Module | None = None

    def lengthen(self) -> None:
        self.rollout = 3
        if self.teacher is None:
            self.teacher = copy.deepcopy(self.cell).requires_grad_(False)
            self.extra = nn.Linear(6, 6, device=self.device)
            optimizer: Any = self.optimizers()
            group = {"params": list(self.extra.parameters())}
            optimizer.optimizer.add_param_group(group)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.lengthen()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for _ in range(self.rollout):
            x = self.cell(x).tanh()
        if self.teacher is None:
            return super().training_step([x, y], batch_idx)
        with torch.no_grad():
            for own, taught in zip(self.cell.parameters(), self.teacher.parameters(), strict=True):
                taught.lerp_(own, 0.1)
        loss = super().training_step([self.extra(x), y], batch_idx)
        return loss + (self.teacher(batch[0]) - x).square().mean()


def longest_rollout(trainer: Trainer, module: Any) -> None:
    # The search calls it before there is an optimizer too.
    if trainer.optimizers:
        module.lengthen()


class LateCritic(Adversarial):
    """The critic begins in the second epoch."""

    has_critic = False

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.has_critic = self.current_epoch > 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.has_critic:
            super().training_step(batch, batch_idx)
            return
        x, y = batch
        first, _ = self.optimizers()
        first.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.layers(x), y))
        first.step()


def with_critic(trainer: Trainer, module: Any) -> None:
    module.has_critic = True


class Replays(Net):
    """Keeps batches, their losses and all scores, and trains on a drawn batch too."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.buffer: deque[Tensor] = deque(maxlen=5)
        self.losses: list[Tensor] = []
        # A stub of a device computes no values, and they could be NaN.
        self.scores = CatMetric(nan_strategy=0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.buffer.append(batch[0])
        self.losses.append(loss.detach())
        scores = self.layers(self.buffer[int(torch.randint(len(self.buffer), ()))])
        self.scores.update(scores.detach().flatten())
        return loss + scores.square().mean()

    def on_train_epoch_end(self) -> None:
        self.log("scores", self.scores.compute().mean() + len(self.losses))
        self.scores.reset()
        self.losses.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.scores.update(self.layers(batch[0]).flatten())

    def on_validation_epoch_end(self) -> None:
        self.log("val_scores", self.scores.compute().mean())


def full_buffer(trainer: Trainer, module: Any) -> None:
    module.buffer.extend(torch.ones(5, module.batch_size, 6, device=module.device))


class Adapted(Net):
    """Low-rank adapters beside a frozen layer."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.layers[0].requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step([x + self.adapter(x), y], batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(one for one in self.parameters() if one.requires_grad)


@dataclass
class Case:
    """One way to train: a module for a batch size, what ``fit`` gets, what the Trainer gets."""

    module: Callable[[int], LightningModule]
    fit: Callable[[int], dict[str, Any]] = lambda size: {}
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list
    start: int = 3
    # The search gets these further arguments of BatchFinder.
    finder: dict[str, Any] = field(default_factory=dict)
    # The hard-coded run gets these arguments of the Trainer in place of the search.
    follows: dict[str, Any] = field(default_factory=dict)
    # The hard-coded run makes its module with this function, or with `module` where it is None.
    hard_coded: Callable[[int], LightningModule] | None = None
    limited_by: str = "max_batch_size"


def given(make: Callable[[int], Any]) -> Callable[[int], dict[str, Any]]:
    """What ``fit`` gets for training loaders."""
    return lambda size: {"train_dataloaders": make(size)}


def in_order(size: int) -> DataLoader[Any]:
    return DataLoader(Noisy(True), batch_size=size)


def of_mixing(size: int) -> DataLoader[Any]:
    dataset = Mixing()
    return shuffled(size, dataset, collate_fn=dataset.collate)


def of_batches(size: int) -> DataLoader[Any]:
    return DataLoader(
        ReadsBatches(),
        batch_size=None,
        sampler=BatchSampler(RandomSampler(range(SAMPLES)), size, True),
    )


def of_every_second(size: int) -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=size, sampler=SubsetRandomSampler(range(0, SAMPLES, 2)))


class DrawingBatches:
    """A batch sampler that draws from the generator of the process."""

    def __init__(self, size: int) -> None:
        self.batch_size = size

    def __len__(self) -> int:
        return SAMPLES // self.batch_size

    def __iter__(self) -> Any:
        order = torch.randperm(SAMPLES).tolist()
        for start in range(len(self)):
            yield order[start :: len(self)][: self.batch_size]


class WithinCost:
    """A batch sampler whose samples cost one to three each; it draws twice and has state."""

    # Lightning 2.5 reads this attribute of the batch sampler of a validation.
    sampler = None

    def __init__(self, max_cost: int) -> None:
        self.max_cost = max_cost
        self.generator = torch.Generator().manual_seed(4)
        self.epochs = 0

    def __len__(self) -> int:
        return SAMPLES // self.max_cost

    def __iter__(self) -> Any:
        self.epochs += 1
        batches: list[list[int]] = [[]]
        for index in torch.randperm(SAMPLES, generator=self.generator).tolist():
            if sum(1 + other % 3 for other in [*batches[-1], index]) > self.max_cost:
                batches.append([])
            batches[-1].append(index)
        # One sample is an error to BatchNorm.
        full = [batch for batch in batches if len(batch) > 1]
        order = torch.randperm(len(full)).tolist()
        return iter([full[position] for position in order[: len(self)]])


def within_cost(max_cost: int) -> DataLoader[Any]:
    return DataLoader(Noisy(True), batch_sampler=WithinCost(max_cost))


class InBudget(Net):
    """Loaders of training and validation that follow a budget of the module."""

    def train_dataloader(self) -> DataLoader[Any]:
        return within_cost(self.batch_size)

    val_dataloader = train_dataloader


class BatchesWithinCost(IterableDataset):
    """A data set that makes its own batches within a budget."""

    def __init__(self, max_cost: int) -> None:
        self.max_cost = max_cost

    def __iter__(self) -> Any:
        dataset = Noisy()
        for indices in WithinCost(self.max_cost):
            yield default_collate([dataset[index] for index in indices])


def stream_within_cost(max_cost: int) -> DataLoader[Any]:
    return DataLoader(BatchesWithinCost(max_cost), batch_size=None)


onecycle = partial(Net, optimizer="onecycle")

CASES = {
    "sgd_momentum": Case(Net),
    "onecycle_from_a_larger_start": Case(onecycle, start=SAMPLES),
    "onecycle_of_few_steps": Case(onecycle, trainer={"max_steps": 5, "max_epochs": -1}),
    "onecycle_with_persistent_workers": Case(partial(onecycle, workers=2)),
    "reduce_on_plateau": Case(partial(Net, optimizer="plateau")),
    "manual_two_optimizers": Case(Adversarial),
    "several_loaders_of_several_sizes": Case(ManyLoaders),
    "loaders_passed_in_a_list": Case(
        OfLists, fit=given(lambda size: [shuffled(size), in_order(size)])
    ),
    "a_combined_loader": Case(
        OfLists,
        fit=given(lambda size: CombinedLoader([shuffled(size), shuffled(size)], "min_size")),
    ),
    "weights_swapped_by_hooks_of_validation": Case(AveragedInValidation),
    "validation_of_fixed_sizes": Case(FixedValidation),
    "validation_loaders_passed_too": Case(
        Plain,
        fit=lambda size: {"train_dataloaders": shuffled(size), "val_dataloaders": in_order(6)},
    ),
    "target_batch_size": Case(
        onecycle, finder={"target_batch_size": 16}, follows={"accumulate_grad_batches": 2}
    ),
    "recipe_in_fewer_batches": Case(
        onecycle,
        start=4,
        trainer={
            "accumulate_grad_batches": 2,
            "limit_train_batches": 4,
            "limit_val_batches": 4,
            "val_check_interval": 2,
        },
        finder={"objective": "recipe", "max_batch_size": None},
        follows={
            "accumulate_grad_batches": 1,
            "limit_train_batches": 2,
            "limit_val_batches": 2,
            "val_check_interval": 1,
        },
        limited_by="recipe",
    ),
    "scaled_learning_rate": Case(
        onecycle,
        start=4,
        finder={"lr_scaling": "linear"},
        hard_coded=partial(onecycle, lr=2e-2),
    ),
    "worst_case": Case(Net, finder={"worst_case": "longest"}),
    "accumulation_and_clipping": Case(
        Net, trainer={"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}
    ),
    "bf16_mixed": Case(Net, trainer={"precision": "bf16-mixed"}),
    "weights_averaged_stochastically": Case(
        Net, callbacks=lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=1)]
    ),
    "hparams": Case(InHparams),
    "hparams_of_module_and_datamodule": Case(
        InHparams, fit=lambda size: {"datamodule": Data(size)}
    ),
    "stream": Case(Plain, fit=given(lambda size: DataLoader(Stream(), batch_size=size))),
    "datamodule_hparams": Case(Plain, fit=lambda size: {"datamodule": Data(size)}),
    "datamodule_that_caches_a_random_split": Case(
        Plain, fit=lambda size: {"datamodule": Splitting(size)}
    ),
    "hooks_on_tensors_that_ask_the_trainer": Case(Hooked),
    "a_step_that_reads_callbacks_and_the_logger": Case(
        ReadsCallbacks, callbacks=lambda: [Weights(), EarlyStopping("epoch_loss", patience=7)]
    ),
    "layers_that_a_callback_unfreezes": Case(
        Grows, callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1)]
    ),
    "layers_that_are_unfrozen_in_two_steps": Case(Grows, callbacks=lambda: [InTwoSteps()]),
    "a_later_state": Case(GrowsByHook, finder={"later": full}),
    "layers_that_are_frozen_again": Case(Grows, callbacks=lambda: [FreezesAgain()]),
    "more_features_in_each_epoch": Case(
        Resolution,
        trainer={"reload_dataloaders_every_n_epochs": 1},
        finder={"later": all_features},
    ),
    "a_longer_rollout_with_another_layer": Case(Rollout, finder={"later": longest_rollout}),
    "a_critic_that_begins_later": Case(LateCritic, finder={"later": with_critic}),
    "a_replay_buffer_and_a_metric_that_keeps_all": Case(Replays, finder={"later": full_buffer}),
    "what_grows_in_the_first_state": Case(Replays),
    "adapters_beside_frozen_layers": Case(Adapted),
    "accumulation_that_changes": Case(
        Net, callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2})]
    ),
    "a_callback_whose_state_begins_in_training": Case(Net, callbacks=lambda: [Saves()]),
    "buffers_that_steps_resize": Case(Quantized),
    "optimizers_of_its_own": Case(OwnOptimizers, trainer={"max_epochs": 1}),
    "schedule_kept_in_the_module": Case(KeepsSchedule),
    "scripted": Case(scripted),
    "entangled_attributes": Case(Entangled),
    "onecycle_of_a_loader_with_generators": Case(
        partial(Plain, optimizer="onecycle"),
        fit=given(
            lambda size: shuffled(size, Noisy(True), generator=torch.Generator().manual_seed(5))
        ),
    ),
    "stateful_collate_that_takes_samples_apart": Case(
        Plain, fit=given(lambda size: shuffled(size, Popping(), collate_fn=Collate()))
    ),
    "collate_of_the_data_set": Case(Plain, fit=given(of_mixing)),
    "collate_of_another_object": Case(
        Plain, fit=given(lambda size: shuffled(size, collate_fn=Mixing().collate))
    ),
    "data_set_in_shared_memory": Case(Plain, fit=given(lambda size: shuffled(size, Cached()))),
    "collate_that_counts_in_shared_memory": Case(
        Plain, fit=given(lambda size: shuffled(size, collate_fn=CountsInSharedMemory()))
    ),
    "collate_that_cannot_be_copied": Case(
        Plain, fit=given(lambda size: shuffled(size, collate_fn=LockedCollate()))
    ),
    "data_set_that_reads_on_in_a_file": Case(
        Plain, fit=given(lambda size: shuffled(size, Lines()))
    ),
    "parts_that_own_something": Case(Plain, fit=given(all_owning)),
    "data_set_that_fetches_batches": Case(OfFetched, fit=given(fetched)),
    "subset_sampler": Case(Plain, fit=given(of_every_second)),
    "size_in_a_dict": Case(
        Plain,
        fit=lambda size: {"datamodule": InDict(size)},
        finder={"batch_arg_name": "kwargs.batch_size"},
    ),
    "batch_sampler_as_sampler": Case(Plain, fit=given(of_batches)),
    "batch_sampler_that_draws": Case(
        Plain,
        fit=given(lambda size: DataLoader(Noisy(), batch_sampler=DrawingBatches(size))),
    ),
    "budget": Case(InBudget, finder={"budget": True}),
    "budget_of_loaders_that_were_passed": Case(
        Plain,
        fit=lambda size: {
            "train_dataloaders": within_cost(size),
            "val_dataloaders": within_cost(6),
        },
        finder={"budget": True, "batch_arg_name": "max_cost"},
    ),
    "budget_of_a_stream": Case(
        Plain,
        fit=given(stream_within_cost),
        finder={"budget": True, "batch_arg_name": "max_cost"},
    ),
    "budget_of_a_larger_start": Case(
        partial(InBudget, optimizer="onecycle"),
        start=20,
        trainer={"accumulate_grad_batches": 2},
        finder={"budget": True},
    ),
    "steps_of_an_epoch": Case(
        Net,
        finder={"max_batch_size": None, "min_steps_per_epoch": SAMPLES // SIZE},
        limited_by="min_steps_per_epoch",
    ),
    "validation_within_epoch": Case(
        Net, trainer={"val_check_interval": 0.5, "num_sanity_val_steps": 0}
    ),
    "an_optimizer_in_a_wrapper": Case(OfLookahead),
    "limited_batches": Case(Net, trainer={"limit_train_batches": 3, "limit_val_batches": 2}),
}


class Toggled(Adversarial):
    """Toggles the optimizer of a manual step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for optimizer in self.optimizers():
            with self.toggled_optimizer(optimizer):
                scores = self.layers(x)
                loss = nn.functional.cross_entropy(scores, y) - self.critic(scores).mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
        self.log("loss", loss)


class Summarized(Net):
    """Gets a summary of its layers, for which Lightning runs an example."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.example_input_array = torch.zeros(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores


class SkipsTheRest(Net):
    """Ends each epoch after two batches, after which lightning 2.6 steps its schedules."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.history.append(batch_idx)
        return -1 if batch_idx == 2 else None


def averaging(name: str, **arguments: Any) -> Callable[[], list[Callback]]:
    """A callback of Lightning that averages weights."""
    return lambda: [getattr(lightning_callbacks, name)(**arguments)]


def takes(call: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(call).parameters


_HAS_TIME = "timedelta" in str(inspect.signature(Trainer).parameters["val_check_interval"])
_HAS_AVERAGES = hasattr(lightning_callbacks, "EMAWeightAveraging")
_HAS_LOADING = takes(Trainer.fit, "weights_only")

# What Lightning added after 2.5.0, as far as a search or a profile is near it: whether this version
# has it, and a training with it.
NEWER = {
    # Without an interval each batch is followed by a validation, and in ten hours none is.
    "validation_after_no_time": (
        _HAS_TIME,
        Case(Net, trainer={"val_check_interval": timedelta(0)}),
    ),
    "validation_after_a_time_in_a_text": (
        _HAS_TIME,
        Case(Net, trainer={"val_check_interval": "00:10:00:00"}),
    ),
    "validation_after_a_time_in_a_dictionary": (
        _HAS_TIME,
        Case(onecycle, trainer={"val_check_interval": {"hours": 10}}),
    ),
    "validation_after_no_time_in_some_epochs": (
        _HAS_TIME,
        Case(Net, trainer={"val_check_interval": "00:00:00:00", "check_val_every_n_epoch": 2}),
    ),
    "validation_after_no_time_and_every_checkpoint": (
        _HAS_TIME,
        Case(
            Net,
            trainer={"val_check_interval": timedelta(0), "check_val_every_n_epoch": None},
            callbacks=lambda: [Saves(), ModelCheckpoint(monitor="val_loss", save_top_k=-1)],
        ),
    ),
    "an_interval_without_validation": (
        _HAS_TIME,
        Case(Net, trainer={"val_check_interval": 100, "limit_val_batches": 0}),
    ),
    "no_logged_hyperparameters": (
        takes(Trainer, "enable_autolog_hparams"),
        Case(InHparams, trainer={"enable_autolog_hparams": False}),
    ),
    "a_registry_of_models": (
        takes(Trainer, "model_registry"),
        Case(Net, trainer={"model_registry": "organization/teamspace/model"}),
    ),
    "checkpoints_without_objects": (
        _HAS_LOADING,
        Case(InHparams, fit=lambda size: {"weights_only": True}),
    ),
    "checkpoints_of_errors": (
        takes(ModelCheckpoint, "save_on_exception"),
        Case(Net, callbacks=lambda: [ModelCheckpoint(save_on_exception=True, save_last=True)]),
    ),
    "weights_averaged_equally": (
        _HAS_AVERAGES,
        Case(Net, callbacks=averaging("WeightAveraging", use_buffers=False)),
    ),
    "weights_averaged_exponentially": (
        _HAS_AVERAGES,
        Case(Net, callbacks=averaging("EMAWeightAveraging")),
    ),
    "weights_averaged_in_some_steps": (
        _HAS_AVERAGES,
        Case(
            Net,
            callbacks=averaging(
                "EMAWeightAveraging",
                device="cpu",
                decay=0.5,
                update_every_n_steps=2,
                update_starting_at_step=3,
                update_starting_at_epoch=1,
            ),
        ),
    ),
    "toggled_optimizer": (hasattr(LightningModule, "toggled_optimizer"), Case(Toggled)),
    "summary_with_operations": (
        takes(lightning_callbacks.ModelSummary.summarize, "total_flops"),
        Case(Summarized, callbacks=lambda: [lightning_callbacks.ModelSummary(max_depth=2)]),
    ),
    "schedules_of_epochs_that_end_early": (True, Case(SkipsTheRest)),
}
