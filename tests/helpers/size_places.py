"""The ways in which projects hold their batch size, each with the place that a search finds."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from tests.helpers.contract_cases import Case, Noisy, Plain, shuffled


class InAttribute(Plain):
    """The size in an attribute of another name."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.size_name = name
        setattr(self, name, size)

    def train_dataloader(self) -> DataLoader[Any]:
        return shuffled(getattr(self, self.size_name))


class InObject(Plain):
    """The size in an attribute of another object, or of an object of that one."""

    def __init__(self, make: Callable[[int], Any], read: Callable[[Any], int], size: int) -> None:
        super().__init__()
        self.task = make(size)
        self.read = read

    def train_dataloader(self) -> DataLoader[Any]:
        return shuffled(self.read(self.task))


@dataclass
class LoaderConfig:
    batch_size: int
    num_workers: int = 0


@dataclass
class Config:
    seed: int
    loader: LoaderConfig
    widths: list[int] = field(default_factory=lambda: [3, 3])


class Slotted:
    __slots__ = ("samples",)

    def __init__(self, samples: int) -> None:
        self.samples = samples


class OfClass(Plain):
    """The size in an attribute of the class."""

    BATCH = 0

    def train_dataloader(self) -> DataLoader[Any]:
        return shuffled(self.BATCH)


def of_class(size: int) -> Plain:
    return type("OfClassWithSize", (OfClass,), {"BATCH": size})()


def constant_in_hook(size: int, optimizer: str = "sgd", **arguments: Any) -> Plain:
    class Constant(Plain):
        # The number is in the code of the hook, so no attribute leads to it.
        def train_dataloader(self) -> DataLoader[Any]:
            return shuffled(size, **arguments)

        def val_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Noisy(), batch_size=4)

    return Constant(optimizer=optimizer)


def counts_its_batches(size: int) -> Plain:
    class Counts(Plain):
        """Reads the number of batches where the optimizers are configured."""

        def train_dataloader(self) -> DataLoader[Any]:
            return shuffled(size)

        def configure_optimizers(self) -> Any:
            self.lr = 0.1 / len(self.train_dataloader())
            return super().configure_optimizers()

    return Counts()


class MadeAtFirst(Plain):
    """A loader that is made in ``__init__``, and returned by the hook."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.loader = shuffled(size)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader


class OwnLoader(DataLoader[Any]):
    """A loader whose class has no argument for the size."""

    def __init__(self, dataset: Any, kind: str) -> None:
        super().__init__(dataset, batch_size={"small": 3, "large": 8}[kind], shuffle=True)


def of_own_loader(size: int) -> Plain:
    class Owned(Plain):
        def train_dataloader(self) -> DataLoader[Any]:
            return OwnLoader(Noisy(), "large" if size == 8 else "small")

    return Owned()


class Sorted(Sampler[int]):
    """Draws chunks of a number of samples that it knows itself, and sorts each of them."""

    def __init__(self, samples: int, batch_size: int) -> None:
        self.inner = RandomSampler(range(samples))
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Any:
        indices = list(self.inner)
        for start in range(0, len(indices), self.batch_size):
            yield from sorted(indices[start : start + self.batch_size])


def of_sampler_that_knows_the_size(size: int) -> Plain:
    class OfSampler(Plain):
        def train_dataloader(self) -> DataLoader[Any]:
            dataset = Noisy()
            batches = BatchSampler(Sorted(len(dataset), size), size, drop_last=False)
            return DataLoader(dataset, batch_sampler=batches)

    return OfSampler()


class DerivedInSetup(LightningDataModule):
    """A size from which ``setup`` makes the one that is used."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.per_device = 0

    def setup(self, stage: str) -> None:
        self.per_device = self.batch_size // 1

    def train_dataloader(self) -> DataLoader[Any]:
        return shuffled(self.per_device)


class OfTwoSizes(LightningDataModule):
    """One size for training and another one for validation."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.eval_batch_size = 4
        self.train_batch_size = size

    def train_dataloader(self) -> DataLoader[Any]:
        return shuffled(self.train_batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Noisy(), batch_size=self.eval_batch_size)


HOOK = "train_dataloader()"

# A case, and the place in its plan.
PLACES: dict[str, tuple[Case, str]] = {
    "private_attribute": (Case(partial(InAttribute, "_bs")), "_bs"),
    "attribute_without_the_word_batch": (Case(partial(InAttribute, "samples")), "samples"),
    "attribute_of_the_class": (Case(of_class), "BATCH"),
    "object_one_step_away": (
        Case(
            partial(
                InObject,
                lambda size: SimpleNamespace(batch_size=size),
                lambda task: task.batch_size,
            )
        ),
        "task.batch_size",
    ),
    "namespace_and_dict_in_it": (
        Case(
            partial(
                InObject, lambda size: Namespace(data={"bs": size}), lambda task: task.data["bs"]
            )
        ),
        "task.data.bs",
    ),
    "nested_dataclasses": (
        Case(
            partial(
                InObject,
                lambda size: Config(seed=size, loader=LoaderConfig(size)),
                lambda task: task.loader.batch_size,
            )
        ),
        "task.loader.batch_size",
    ),
    "slots": (Case(partial(InObject, Slotted, lambda task: task.samples)), "task.samples"),
    "derived_in_setup": (
        Case(Plain, fit=lambda size: {"datamodule": DerivedInSetup(size)}),
        "per_device",
    ),
    "sizes_of_training_and_validation": (
        Case(Plain, fit=lambda size: {"datamodule": OfTwoSizes(size)}),
        "train_batch_size",
    ),
    "constant_in_a_hook": (Case(partial(constant_in_hook, optimizer="onecycle")), HOOK),
    "constant_in_a_hook_with_workers": (
        Case(partial(constant_in_hook, num_workers=1, persistent_workers=True)),
        HOOK,
    ),
    "constant_in_a_hook_reloaded_in_every_epoch": (
        Case(constant_in_hook, trainer={"reload_dataloaders_every_n_epochs": 1}),
        HOOK,
    ),
    "batches_counted_for_the_optimizers": (Case(counts_its_batches), HOOK),
    "loader_made_at_first": (Case(MadeAtFirst), HOOK),
    "own_class_of_loader": (Case(of_own_loader), HOOK),
    "sampler_that_knows_the_size": (Case(of_sampler_that_knows_the_size), HOOK),
}
