"""The loaders of a project at any batch size, which is set at one of its places."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
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
    made_for_ranks,
    replicas_of,
    stage_loaders,
)
from lightning_batchmem._lightning.places import (
    InHook,
    InPassedLoaders,
    ProjectAttribute,
    SizeNotFollowedError,
    SizePlace,
)
from lightning_batchmem._lightning.trainer_state import datamodules_of
from lightning_batchmem.batches.batch_sampler import single_samples
from lightning_batchmem.batches.budget_batches import BUDGET_FACTOR
from lightning_batchmem.batches.loader_size import (
    check_batch_of_one,
    check_batch_sampler,
    check_iteration,
    loader_batch_size,
)
from lightning_batchmem.batches.loaders import (
    BudgetLoader,
    LoaderInfo,
    StageLoaders,
    forms_own_batches,
)
from lightning_batchmem.batches.probe_batches import ProbeBatches
from lightning_batchmem.devices.foreign_values import attributes_of
from lightning_batchmem.state.contents import refill

_LEAVE_OUT = "Leave batch_arg_name out, so that BatchFinder looks for the place itself."


def batch_size_setting(
    trainer: Trainer, module: LightningModule, source: DataSource, path: str, *, is_budget: bool
) -> BatchSizeSetting:
    """The setting of a stage: the attribute at ``path``, or the loaders that were passed."""
    attribute = ProjectAttribute(trainer, module, path)
    place: SizePlace = attribute
    if source.passed and is_budget:
        # Loaders that exist already do not read an attribute of the module.
        owners = [
            owner for loader in source.passed_loaders() for owner in _owners_of_budget(loader)
        ]
        place = replace(attribute, owners=tuple(owners))
    elif source.passed:
        place = InPassedLoaders(attribute, source)
    return BatchSizeSetting(trainer, module, source, place, is_budget).in_place(place)


@dataclass(frozen=True)
class BatchSizeSetting:
    """The batch size of one stage of a project: where it is set, and the loaders that it gives.

    Args:
        trainer: the Trainer.
        module: the module.
        source: the origin of the loaders.
        place: where the size is read and set.
        is_budget: whether it is a budget, within which loaders form their own batches.
        project_size: the batch size of the project, before a search has set another one; ``None``
            unless it is a positive whole number.
    """

    trainer: Trainer
    module: LightningModule
    source: DataSource
    place: SizePlace
    is_budget: bool
    project_size: int | None = None

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def sets_loaders(self) -> bool:
        """Whether the loaders get the size after the project has made them."""
        return self.place.source is self.source

    @property
    def owners(self) -> list[Any]:
        """The objects that may have the size, or make its loaders."""
        return [self.module, *datamodules_of(self.trainer), *self.source.passed_loaders()]

    @property
    def size(self) -> int | None:
        """The batch size that is set now; ``None`` unless it is a positive whole number."""
        value = self.place.value
        # A budget may be a number of seconds, with a fraction.
        if self.is_budget and isinstance(value, float) and math.isfinite(value):
            value = int(value)
        return int(value) if isinstance(value, Integral) and int(value) > 0 else None

    @property
    def project_budget(self) -> int:
        """The budget of the project, from which a search looks for the smallest useful one.

        Raises:
            ValueError: if it is not a positive number.
        """
        if (budget := self.project_size) is None:
            raise ValueError(
                f"`{self.name}` must be a budget of at least 1 with budget=True, got"
                f" {self.place.value!r:.80}"
            )
        return budget

    def at(self, text: str) -> BatchSizeSetting:
        """The setting at the place that a plan names; an empty text is the place of this one.

        Loaders that were passed have no other place.
        """
        if not text or self.source.passed:
            return self
        if text.endswith("()"):
            return self.in_place(InHook(self.source))
        attribute = ProjectAttribute(self.trainer, self.module, text)
        # Other owners may use the name for something else.
        of_owner = replace(attribute, owners=(self.source.owner,))
        return self.in_place(of_owner if of_owner.exists else attribute)

    def in_place(self, place: SizePlace) -> BatchSizeSetting:
        """The setting at a place whose size a search has not set yet."""
        moved = replace(self, place=place)
        return replace(moved, project_size=moved.size)

    def check_budget(self) -> None:
        """Raise a ValueError where no attribute has the budget."""
        if self.is_budget and not self.place.exists:
            owners = "the module, the datamodule or their hparams, which train_dataloader reads,"
            if self.source.passed:
                owners = "the batch sampler, the sampler or the data set of a loader"
            raise ValueError(
                f"batch_arg_name must name an attribute of {owners} with budget=True, got"
                f" {self.name!r}"
            )

    def write(self, batch_size: int) -> None:
        """Set the size."""
        self.place.write(batch_size)

    def loaders_for(self, batch_size: int, *, may_be_fixed: bool = False) -> StageLoaders:
        """Set the size and request the loaders.

        Raises:
            SizeNotFollowedError: if no loader follows the size, unless they ``may_be_fixed``.
            ValueError: if the loaders cannot be searched at any place of the size.
        """
        if not (self.place.exists or may_be_fixed):
            raise SizeNotFollowedError(
                "batch_arg_name must name an attribute of the module, the datamodule or their"
                f" hparams, got {self.name!r}. {_LEAVE_OUT}"
            )
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
        if keeps_sizes:
            follows = [False] * len(sizes)
        elif self.sets_loaders:
            self._check_loaders_that_were_set(batch_size)
            follows = [True] * len(sizes)
        else:
            follows = self._follows(
                sizes,
                batch_size,
                may_be_fixed=may_be_fixed,
                needs_other_size=self.project_size == batch_size,
            )
            for loader, is_following in zip(combined.flattened, follows, strict=True):
                if is_following:
                    check_iteration(loader)
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
        """Raise a ValueError unless new loaders have the sizes that ``loaders`` predict."""
        actual = self.sizes_at(batch_size)
        sized = [loader for loader in loaders.sized if isinstance(loader, LoaderInfo)]
        expected = [loader.size_at(batch_size) for loader in sized]
        if actual != expected:
            raise ValueError(
                f"{self.source.hook} must follow `{self.name}` at every size, got loaders of batch"
                f" sizes {_listed(actual)} instead of {_listed(expected)} after it was set to"
                f" {batch_size}. Build them with `{self.name}` itself, and limit the size with"
                " max_batch_size."
            )
        if self.sets_loaders:
            for loader in self.source.request().flattened:
                check_batch_sampler(loader)

    def check_samples(self, batches: ProbeBatches) -> None:
        """Raise a ValueError if the samples of loaders that get the size are batches already."""
        # With a larger size the project itself collates several samples of the data set.
        if self.project_size == 1 and self.sets_loaders:
            check_batch_of_one(batches.batch(1)[0], self.source.hook)

    def sizes_at(self, batch_size: int) -> list[int]:
        """Set the size and request the loaders; returns their batch sizes."""
        self.write(batch_size)
        return self._sizes(self.source.request())

    def loaders_of_project(self) -> tuple[list[DataLoader[Any]], list[int]]:
        """Request the loaders without setting a size; returns them and their batch sizes."""
        combined = self.source.request()
        return combined.flattened, self._sizes(combined)

    def _follows(
        self, sizes: list[int], batch_size: int, *, may_be_fixed: bool, needs_other_size: bool
    ) -> list[bool]:
        """Whether each loader follows the size; at ``batch_size`` they have these ``sizes``.

        A second size is set for a moment where the first one does not show this.
        """
        follows = [size == batch_size for size in sizes]
        if len(sizes) > 1 or may_be_fixed or needs_other_size:
            twice_sizes = self.sizes_at(2 * batch_size)
            self.write(batch_size)
            pairs = list(zip(sizes, twice_sizes, strict=False))
            follows = [size != twice for size, twice in pairs]
            is_multiple = [twice in (size, 2 * size) for size, twice in pairs]
            if len(twice_sizes) != len(sizes) or not all(is_multiple):
                raise SizeNotFollowedError(
                    f"{self.source.hook} must give each loader a fixed batch size, or"
                    f" `{self.name}` times a number, got {_listed(sizes)} after {self.name} was set"
                    f" to {batch_size}, and {_listed(twice_sizes)} at {2 * batch_size}"
                )
        if not (any(follows) or may_be_fixed):
            raise SizeNotFollowedError(
                f"{self.source.hook} must use `{self.name}`, got loaders of batch sizes"
                f" {_listed(sizes)} after it was set to {batch_size}. {_LEAVE_OUT}"
            )
        return follows

    def _check_loaders_that_were_set(self, batch_size: int) -> None:
        """Raise a ValueError unless loaders that were set make batches of this size.

        Another size is set before, because a loader may have had this one already.
        """
        for size in (2 * batch_size, batch_size):
            self.write(size)
            for loader in self.source.request().flattened:
                check_iteration(loader)
                if replicas_of(self.trainer, loader) == 1:
                    continue
                made_size = loader_batch_size(made_for_ranks(self.trainer, loader))
                if made_size != size:
                    raise ValueError(
                        f"the class {type(loader).__name__} must take an argument batch_size,"
                        " because Lightning makes its loaders again for several ranks, got batch"
                        f" size {made_size} after it was set to {size}"
                    )

    def _loaders_with_budget(
        self, combined: CombinedLoader, budget: int, *, may_be_fixed: bool, keeps_budget: bool
    ) -> StageLoaders:
        """The loaders of a stage. At least one forms its own batches."""
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
                if keeps_budget:
                    infos.append(BudgetLoader(loader, partial(_at_any_budget, loader), False))
                else:
                    infos.append(BudgetLoader(loader, partial(self._at_budget, index)))
            else:
                size = self._size_of(loader)
                infos.append(LoaderInfo(single_samples(loader), size, None, replicas))
        if not may_be_fixed and all(isinstance(info, LoaderInfo) for info in infos):
            raise ValueError(
                "batch_arg_name must name a budget with budget=True, but no loader of"
                f" {self.source.hook} forms its own batches"
            )
        sizes = self._sizes(combined)
        if not keeps_budget and sizes != self.sizes_at(BUDGET_FACTOR * budget):
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
            undo.callback(self.place.restorer())
            for loader in self.source.passed_loaders():
                for owner in _owners_of_budget(loader):
                    attributes = attributes_of(owner)
                    undo.callback(refill, attributes, dict(attributes))
            self.write(budget)
            yield self.source.request().flattened[index]

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
                f" {actual}. Give it a batch_size, or let an attribute of the module or the"
                " datamodule decide how large its batches are, and pass that attribute as"
                " batch_arg_name with budget=True."
            )
        return size


def _at_any_budget(loader: DataLoader[Any], _: int) -> AbstractContextManager[DataLoader[Any]]:
    """A loader that was passed and keeps its budget."""
    return nullcontext(loader)


def _owners_of_budget(loader: DataLoader[Any]) -> list[Any]:
    """The parts of a loader that may have a budget."""
    parts = (loader.batch_sampler, loader.sampler, loader.dataset)
    return [part for part in parts if part is not None]


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
