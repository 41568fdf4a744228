"""Read and set the batch size of a project: its attribute, and loaders that were passed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_batchmem._lightning.data_source import (
    DataSource,
    combined_mode,
    replicas_of,
    stage_loaders,
)
from lightning_batchmem._lightning.project_attribute import ProjectAttribute
from lightning_batchmem.batches.batch_sampler import single_samples
from lightning_batchmem.batches.budget_loader import BudgetLoader, forms_own_batches
from lightning_batchmem.batches.loaders import (
    LoaderInfo,
    StageLoaders,
    keep_sizes,
    loader_batch_size,
    set_loader_batch_size,
)
from lightning_batchmem.state.attributes import refill

# Whether a loader follows the budget shows at this multiple of it.
_OTHER_BUDGET = 4


@dataclass(frozen=True)
class BatchSizeSetting:
    """All places in which a project keeps the batch size ``name`` of one stage.

    They are read and written together.
    """

    trainer: Trainer
    module: LightningModule
    name: str
    source: DataSource
    # The size is a budget, within which loaders form their own batches.
    is_budget: bool = False

    @property
    def attribute(self) -> ProjectAttribute:
        """The attribute that has the size; it may not exist where loaders were passed."""
        owners: tuple[Any, ...] | None = None
        if self.is_budget and self.source.passed:
            # Loaders that exist already do not read an attribute of the module.
            owners = tuple(
                owner
                for loader in self.source.passed_loaders()
                for owner in _owners_of_budget(loader)
            )
        return ProjectAttribute(self.trainer, self.module, self.name, owners)

    @property
    def value(self) -> object:
        """The batch size as the project has it now, of any type; ``None`` without one."""
        if self.attribute.exists:
            return self.attribute.value
        return next((loader_batch_size(loader) for loader in self.source.passed_loaders()), None)

    @property
    def size(self) -> int | None:
        """The batch size of the project; ``None`` unless it is a positive whole number."""
        value = self.value
        # A budget may be a number of seconds, with a fraction.
        if self.is_budget and isinstance(value, float) and math.isfinite(value):
            value = int(value)
        return int(value) if isinstance(value, Integral) and int(value) > 0 else None

    @property
    def project_budget(self) -> int:
        """The budget of the project, from which a search looks for the smallest useful one.

        Raises:
            ValueError: if it is no positive number.
        """
        if (budget := self.size) is None:
            raise ValueError(
                f"`{self.name}` must be a budget of at least 1 with budget=True, got"
                f" {self.value!r:.80}"
            )
        return budget

    def check(self) -> None:
        """Raise a ValueError where there is no place to set the size."""
        if self.is_budget:
            if not self.attribute.exists:
                place = "the module, the datamodule or their hparams"
                if self.source.passed:
                    place = "the batch sampler, the sampler or the data set of a loader"
                raise ValueError(
                    f"batch_arg_name must name an attribute of {place} with budget=True, got"
                    f" {self.name!r}"
                )
            return
        if not self.source.passed and not self.attribute.exists:
            sizes = self._sizes(self.source.request())
            raise ValueError(
                "batch_arg_name must name an attribute of the module, the datamodule or their"
                f" hparams, got {self.name!r} and loaders of batch sizes {_listed(sizes)}."
                f" {self._remedy(sizes)}"
            )

    def write(self, batch_size: int, *, also_logged: bool = False) -> None:
        """Set the size in the attribute and in loaders that were passed.

        With ``also_logged`` it is also set in the hyperparameters that Lightning logs.
        """
        if self.source.passed and not self.is_budget:
            combined = self.source.request()
            if len(sizes := sorted(set(self._sizes(combined)))) > 1:
                raise ValueError(
                    f"loaders that are passed must have one batch size, got {_listed(sizes)}. Build"
                    f" them in {self.source.hook} instead, from one attribute: `{self.name}`, 4 *"
                    f" `{self.name}`."
                )
            for loader in combined.flattened:
                set_loader_batch_size(loader, batch_size)
        if not self.attribute.exists:
            return
        try:
            self.attribute.set(batch_size, also_logged=also_logged)
        # A setter or a read-only configuration may raise any exception.
        except Exception as error:
            raise ValueError(
                f"`{self.name}` must be an attribute that can be set, got {type(error).__name__}:"
                f" {error}"
            ) from error
        if (actual := self.attribute.value) != batch_size:
            raise ValueError(
                f"`{self.name}` must keep the value it is set to, got {actual} after it was set to"
                f" {batch_size}. Remove the limit, or pass max_batch_size={actual}."
            )

    def keep(self) -> Callable[[], None]:
        """Record the size wherever it is; returns a function that restores it."""
        undo = ExitStack()
        undo.callback(self.attribute.keep())
        undo.callback(keep_sizes(self.source.passed_loaders()))
        return undo.close

    def loaders_for(self, batch_size: int, *, may_be_fixed: bool = False) -> StageLoaders:
        """Set the size and request the loaders.

        A ValueError is raised where no loader follows the size, unless they ``may_be_fixed``.
        """
        # Validation loaders that were passed to fit keep their sizes.
        keeps_sizes = (
            may_be_fixed
            and self.source.passed
            and self.source.stage == "val"
            and self.trainer.state.fn == TrainerFn.FITTING
        )
        if not keeps_sizes:
            self.write(batch_size)
        combined = self.source.request()
        if combined_mode(combined) == "sequential" and self.source.default_mode != "sequential":
            # Lightning raises such an error too, but only after the search.
            raise ValueError(
                'the loaders of train_dataloader must be combined by "min_size", "max_size" or'
                ' "max_size_cycle", which Lightning can train with, got "sequential"'
            )
        if self.is_budget:
            return self._loaders_with_budget(
                combined, batch_size, may_be_fixed=may_be_fixed, keeps_budget=keeps_sizes
            )
        sizes = self._sizes(combined)
        if self.source.passed:
            follows = [not keeps_sizes] * len(sizes)
        elif len(sizes) == 1 and not may_be_fixed:
            follows = [sizes == [batch_size]]
        else:
            twice_sizes = self._sizes_at(2 * batch_size)
            self.write(batch_size)
            follows = [size != twice for size, twice in zip(sizes, twice_sizes, strict=False)]
            is_multiple = [
                twice in (size, 2 * size) for size, twice in zip(sizes, twice_sizes, strict=False)
            ]
            if len(twice_sizes) != len(sizes) or not all(is_multiple):
                raise ValueError(
                    f"{self.source.hook} must give each loader a fixed batch size, or"
                    f" `{self.name}` times a number, got {_listed(sizes)} after {self.name} was set"
                    f" to {batch_size}, and {_listed(twice_sizes)} at {2 * batch_size}"
                )
        if not (any(follows) or may_be_fixed):
            raise ValueError(
                f"{self.source.hook} must use `{self.name}`, got loaders of batch sizes"
                f" {_listed(sizes)} after it was set to {batch_size}. {self._remedy(sizes)}"
            )
        infos = [
            LoaderInfo(
                single_samples(loader),
                size,
                batch_size if is_following else None,
                replicas_of(self.trainer, loader),
            )
            for loader, size, is_following in zip(combined.flattened, sizes, follows, strict=True)
        ]
        return stage_loaders(combined, infos, self.source.hook)

    def check_loaders(self, batch_size: int, loaders: StageLoaders) -> None:
        """Raise a ValueError unless new loaders have the predicted sizes at ``batch_size``.

        The prediction is that of ``loaders``.
        """
        self._check_sizes(batch_size, self._sizes_at(batch_size), loaders)

    def _check_sizes(self, batch_size: int, actual: list[int], loaders: StageLoaders) -> None:
        sized = [loader for loader in loaders.sized if isinstance(loader, LoaderInfo)]
        expected = [loader.size_at(batch_size) for loader in sized]
        if actual != expected:
            raise ValueError(
                f"{self.source.hook} must follow `{self.name}` at every size, got loaders of batch"
                f" sizes {_listed(actual)} instead of {_listed(expected)} after it was set to"
                f" {batch_size}. Build them with `{self.name}` itself, and limit the size with"
                " max_batch_size."
            )

    def _sizes_at(self, batch_size: int) -> list[int]:
        self.write(batch_size)
        return self._sizes(self.source.request())

    def _loaders_with_budget(
        self, combined: CombinedLoader, budget: int, *, may_be_fixed: bool, keeps_budget: bool
    ) -> StageLoaders:
        """The loaders of a stage, of which at least one forms its own batches."""
        infos: list[LoaderInfo | BudgetLoader] = []
        for index, loader in enumerate(combined.flattened):
            replicas = replicas_of(self.trainer, loader)
            if forms_own_batches(loader):
                if replicas > 1:
                    raise ValueError(
                        "Trainer must have use_distributed_sampler=False, because Lightning would"
                        f" replace {type(loader.batch_sampler).__name__}, which forms its own"
                        " batches. Divide the data among the ranks there."
                    )
                at_budget = self._at_own_budget if keeps_budget else self._at_budget
                infos.append(BudgetLoader(loader, partial(at_budget, index), not keeps_budget))
            else:
                size = self._size_of(loader)
                infos.append(LoaderInfo(single_samples(loader), size, None, replicas))
        if not may_be_fixed and all(isinstance(info, LoaderInfo) for info in infos):
            raise ValueError(
                "batch_arg_name must name a budget with budget=True, but no loader of"
                f" {self.source.hook} forms its own batches"
            )
        sizes = self._sizes(combined)
        if not keeps_budget and sizes != self._sizes_at(_OTHER_BUDGET * budget):
            raise ValueError(
                f"each loader of {self.source.hook} must form its own batches within"
                f" `{self.name}`, or have a batch size that does not depend on it"
            )
        if not keeps_budget:
            self.write(budget)
        return stage_loaders(combined, infos, self.source.hook)

    @contextmanager
    def _at_budget(self, index: int, budget: int) -> Iterator[DataLoader[Any]]:
        """Set the budget, give the loader at this place, and restore the budget at the end.

        A sampler that was passed may keep the batches that it has made, so all of its attributes
        are restored.
        """
        with ExitStack() as undo:
            undo.callback(self.keep())
            for loader in self.source.passed_loaders():
                for owner in _owners_of_budget(loader):
                    attributes = getattr(owner, "__dict__", {})
                    undo.callback(refill, attributes, dict(attributes))
            self.write(budget)
            yield self.source.request().flattened[index]

    @contextmanager
    def _at_own_budget(self, index: int, budget: int) -> Iterator[DataLoader[Any]]:
        """Give the loader at this place, which keeps its budget."""
        yield self.source.request().flattened[index]

    def _remedy(self, sizes: Sequence[int]) -> str:
        """The change that lets the loaders follow the size.

        Another attribute with a size of the loaders may be the one that sets it.
        """
        if names := self.attribute.others_with(sizes):
            also = f" (also of this value: {', '.join(names[1:5])})" if names[1:] else ""
            return f'Pass batch_arg_name="{names[0]}"{also}, or pass the loaders to fit.'
        return f"Build them with batch_size=self.{self.name}, or pass the loaders to fit."

    def _sizes(self, combined: CombinedLoader) -> list[int]:
        """The batch sizes of loaders, without those that form their own batches in a budget."""
        return [
            self._size_of(loader)
            for loader in combined.flattened
            if not (self.is_budget and forms_own_batches(loader))
        ]

    def _size_of(self, loader: DataLoader[Any]) -> int:
        size = loader_batch_size(loader)
        if size is None:
            actual = "batch_size=None"
            if loader.batch_sampler is not None:
                actual = f"the batch sampler {type(loader.batch_sampler).__name__}"
            raise ValueError(
                f"the loaders of {self.source.hook} must have a batch size that can be set, got"
                f" {actual}. Use DataLoader(single_samples, batch_size=self.{self.name}), or pass"
                " budget=True and the attribute that limits its batches as batch_arg_name."
            )
        return size


def _owners_of_budget(loader: DataLoader[Any]) -> list[Any]:
    """The parts of a loader that may have a budget."""
    parts = (loader.batch_sampler, loader.sampler, loader.dataset)
    return [part for part in parts if part is not None]


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
