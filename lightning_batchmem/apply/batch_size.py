"""Read and set the batch size of a project: its attribute, and loaders that were passed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr

from lightning_batchmem._lightning.data_source import (
    DataSource,
    combined_mode,
    in_structure,
    loader_batch_size,
    replicas_of,
    set_initial_hparam,
    set_loader_batch_size,
)
from lightning_batchmem.apply.loaders import LoaderInfo, StageLoaders
from lightning_batchmem.measure.samples import LoaderSamples
from lightning_batchmem.measure.worst_case import warn_if_ragged
from lightning_batchmem.plan.options import WorstCase

__all__ = ["BatchSizeSetting", "ProbeBatches", "StageLoaders"]


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
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]  # set where mypy does not look
        for holder in (self.module, datamodule):
            if holder is not None:
                set_initial_hparam(holder, self.name, batch_size)

    def keep(self) -> Callable[[], None]:
        """Record the sizes of loaders that were passed; returns a function that restores them."""
        kept = [(loader, loader_batch_size(loader)) for loader in self.source.passed_loaders()]

        def restore() -> None:
            for loader, size in kept:
                if size is not None:
                    set_loader_batch_size(loader, size)

        return restore

    def loaders_for(self, batch_size: int, *, may_be_fixed: bool = False) -> StageLoaders:
        """Set the size and request the loaders of the stage; a ValueError where none of them follows it.

        A hook is called again at twice the size unless its only loader has exactly the size: which of several loaders
        follow it is then unclear. Loaders of an evaluation ``may_be_fixed``: validation loaders that were passed to
        ``fit`` keep their sizes.
        """
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


class ProbeBatches:
    """A few real samples of each loader, drawn once, that make batches of any size.

    Nothing of the data sets' own moves in this process: see :class:`~lightning_batchmem.measure.samples.LoaderSamples`.

    Args:
        loaders: of one stage.
        worst_case: ``None`` for 32 samples from all over each set, and a warning where some of them are much larger
            than most. ``"longest"``, or a callable that measures a sample as the data set gives it, for the largest
            sample only: each batch of a probe repeats it, which no batch can exceed. Where batches are padded one
            long sample makes as large a batch; where they are not (packed, nested) this is the bound. ``"longest"``
            goes by :func:`.measure.worst_case.element_count`. Up to 10,000 samples are looked at for at
            most 60 seconds: of a larger set some from all over it, of a stream the first.

    Raises:
        ValueError: when a data set has no sample, or ``"longest"`` finds nothing to count in them.
        Exception: what a ``worst_case`` of the user's raises.
    """

    def __init__(self, loaders: StageLoaders, worst_case: WorstCase = None) -> None:
        self._loaders = loaders
        self._drawn = [LoaderSamples(one.loader, worst_case) for one in loaders.sized]
        if worst_case is None:
            any(warn_if_ragged(drawn.samples) for drawn in self._drawn)  # once, for the first of them

    @property
    def round(self) -> int:
        """How many consecutive batches show every loader."""
        return len(self._drawn) if combined_mode(self._loaders.combined) == "sequential" else 1

    def batch(self, batch_size: int, index: int = 0) -> tuple[Any, int]:
        """The ``index``-th batch at ``batch_size``, on the host; those that come from the same loaders are alike.

        Returns:
            The batch as the mode of the loaders makes it (of a sequence of loaders one's after the other's, else one
            of each in the collection that the loaders came in), and the ``dataloader_idx`` that goes with it.
        """
        if combined_mode(self._loaders.combined) == "sequential":
            loader_index = index % len(self._drawn)
            return self._batch_of(loader_index, batch_size), loader_index
        batches = [self._batch_of(loader_index, batch_size) for loader_index in range(len(self._drawn))]
        return in_structure(self._loaders.combined, batches), 0

    def _batch_of(self, loader_index: int, batch_size: int) -> Any:
        one = self._loaders.sized[loader_index]
        size, samples = one.size_at(batch_size), one.samples
        # a set with fewer samples, for validation say, never gives a full batch
        return self._drawn[loader_index].batch(size if samples is None else max(1, min(size, samples)))
