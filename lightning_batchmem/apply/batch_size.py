"""Read and set the batch size of a project: its attribute, and loaders that were passed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Integral

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr

from lightning_batchmem._lightning.data_source import (
    DataSource,
    combined_mode,
    loader_batch_size,
    replicas_of,
    set_initial_hparam,
    set_loader_batch_size,
)
from lightning_batchmem._lightning.trainer_state import datamodules_of
from lightning_batchmem.apply.loaders import LoaderInfo, StageLoaders


@dataclass(frozen=True)
class BatchSizeSetting:
    """All places in which a project keeps the batch size ``name`` of one stage, read and written together."""

    trainer: Trainer
    module: LightningModule
    name: str
    source: DataSource

    @property
    def in_attribute(self) -> bool:
        """Whether the module, its hparams, the datamodule or its hparams have the attribute."""
        return bool(lightning_hasattr(self.module, self.name))

    @property
    def value(self) -> object:
        """The batch size as the project has it now, of any type; ``None`` without one."""
        if self.in_attribute:
            return lightning_getattr(self.module, self.name)
        return next((loader_batch_size(loader) for loader in self.source.passed_loaders()), None)

    @property
    def size(self) -> int | None:
        """The batch size that the project has now; ``None`` unless it is a positive whole number."""
        value = self.value
        return int(value) if isinstance(value, Integral) and int(value) > 0 else None

    def notes_for(self, batch_size: int) -> list[str]:
        """What a new size does not reach."""
        if not self.in_attribute or self.value == batch_size:
            return []
        return [f"Values computed from `{self.name}` in __init__ or setup keep the old size."]

    def check(self) -> None:
        """Raise a ValueError where there is no place to set the size."""
        if not self.source.passed and not self.in_attribute:
            raise ValueError(
                f"batch_arg_name must name an attribute of the module, its hparams, the datamodule or its hparams,"
                f" got {self.name!r}, which none of them has; add `self.{self.name} = ...` and build the loader with it"
            )

    def write(self, batch_size: int) -> None:
        """Set the size in the attribute and in loaders that were passed."""
        if self.source.passed:
            combined = self.source.request()
            if len(sizes := sorted(set(self._sizes(combined)))) > 1:
                raise ValueError(
                    f"loaders that are passed must have one batch size, got {_listed(sizes)}; build them in"
                    f" {self.source.hook} instead, from one attribute: batch_size=self.{self.name},"
                    f" batch_size=4 * self.{self.name}"
                )
            for loader in combined.flattened:
                set_loader_batch_size(loader, batch_size)
        if not self.in_attribute:
            return
        try:
            lightning_setattr(self.module, self.name, batch_size)
        except AttributeError as error:
            raise ValueError(f"`{self.name}` must be an attribute that can be set, got {error}") from error
        if (actual := lightning_getattr(self.module, self.name)) != batch_size:
            raise ValueError(
                f"`{self.name}` must keep the value it is set to, got {actual} after it was set to {batch_size};"
                f" remove the limit, or pass max_batch_size={actual}"
            )

    def commit(self, batch_size: int) -> None:
        """Set the size as :meth:`write` does, and in the hyperparameters that Lightning logs."""
        self.write(batch_size)
        for holder in (self.module, *datamodules_of(self.trainer)):
            set_initial_hparam(holder, self.name, batch_size)

    def keep(self) -> Callable[[], None]:
        """Record the sizes of loaders that were passed; returns a function that restores them."""
        undo = ExitStack()
        for loader in self.source.passed_loaders():
            if (size := loader_batch_size(loader)) is not None:
                undo.callback(set_loader_batch_size, loader, size)
        return undo.close

    def loaders_for(self, batch_size: int, *, may_be_fixed: bool = False) -> StageLoaders:
        """Set the size and request the loaders; a ValueError where none follows it, unless they ``may_be_fixed``."""
        # validation loaders that were passed to fit keep their sizes
        own_sizes = may_be_fixed and self.source.passed and self.source.is_fit_validation
        if not own_sizes:
            self.write(batch_size)
        combined = self.source.request()
        if combined_mode(combined) == "sequential" and self.source.default_mode != "sequential":
            raise ValueError(  # as Lightning does, after the search
                'the loaders of train_dataloader must be combined by "min_size", "max_size" or "max_size_cycle", which'
                ' Lightning can train with, got "sequential"'
            )
        sizes = self._sizes(combined)
        if self.source.passed:
            follow = [not own_sizes] * len(sizes)
        elif self.in_attribute and sizes == [batch_size]:
            follow = [True]
        elif len(sizes) == 1 and not may_be_fixed:
            raise ValueError(
                f"{self.source.hook} must use `{self.name}`, got a loader of batch size {sizes[0]} after {self.name}"
                f" was set to {batch_size}; build it with DataLoader(..., batch_size=self.{self.name})"
            )
        else:
            follow = self._follow(batch_size, sizes)
        if not (any(follow) or may_be_fixed):
            raise ValueError(
                f"{self.source.hook} must use `{self.name}` in one loader at least, got loaders of batch sizes"
                f" {_listed(sizes)} whatever {self.name} is; build them with"
                f" DataLoader(..., batch_size=self.{self.name})"
            )
        infos = [
            LoaderInfo(loader, size, batch_size if follows else None, replicas_of(self.trainer, loader))
            for loader, size, follows in zip(combined.flattened, sizes, follow, strict=True)
        ]
        return StageLoaders(combined, tuple(infos))

    def check_loaders(self, batch_size: int, loaders: StageLoaders) -> None:
        """Raise a ValueError unless new loaders have the sizes at ``batch_size`` that ``loaders`` predict."""
        self.write(batch_size)
        expected = [one.size_at(batch_size) for one in loaders.sized]
        actual = self._sizes(self.source.request())
        if actual != expected:
            raise ValueError(
                f"{self.source.hook} must follow `{self.name}` at every size, got loaders of batch sizes"
                f" {_listed(actual)} instead of {_listed(expected)} after {self.name} was set to {batch_size}; build"
                f" them with DataLoader(..., batch_size=self.{self.name}) and limit the size with max_batch_size"
            )

    def _follow(self, batch_size: int, sizes: Sequence[int]) -> list[bool]:
        """Which loaders have twice their size at twice the batch size; the others must keep it."""
        if not self.in_attribute:
            return [False] * len(sizes)
        self.write(2 * batch_size)
        twice = self._sizes(self.source.request())
        self.write(batch_size)
        if len(twice) != len(sizes) or any(two not in (one, 2 * one) for one, two in zip(sizes, twice, strict=True)):
            raise ValueError(
                f"{self.source.hook} must give each loader a fixed batch size, or `{self.name}` times a number, got"
                f" {_listed(sizes)} after {self.name} was set to {batch_size}, and {_listed(twice)} at {2 * batch_size}"
            )
        return [two == 2 * one for one, two in zip(sizes, twice, strict=True)]

    def _sizes(self, combined: CombinedLoader) -> list[int]:
        sizes = []
        for loader in combined.flattened:
            if (size := loader_batch_size(loader)) is None:
                sampler = type(loader.batch_sampler).__name__
                raise ValueError(
                    f"the loaders of {self.source.hook} must have a batch size that can be set, got"
                    + (" batch_size=None" if loader.batch_sampler is None else f" the batch sampler {sampler}")
                    + "; let the DataLoader make the batches, or give the batch sampler a `batch_size` attribute"
                )
            sizes.append(size)
        return sizes


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
