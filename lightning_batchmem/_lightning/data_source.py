"""Dataloaders of a stage: request them, set their batch size, discard them.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import torch
from lightning.pytorch import Trainer

# _DataLoaderSource is private in lightning 2.5.0 to 2.6.6.
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities import CombinedLoader

# CombinedLoader uses the same private module of torch in lightning 2.5.0 to 2.6.6.
from torch.utils._pytree import tree_unflatten
from torch.utils.data import BatchSampler, DataLoader

from lightning_batchmem._lightning.run_step import EvaluationLoop
from lightning_batchmem._lightning.strategies import lightning_name


def validation_loop(trainer: Trainer) -> EvaluationLoop:
    return trainer.fit_loop.epoch_loop.val_loop


def stage_loop(trainer: Trainer) -> EvaluationLoop:
    """The loop of ``trainer.validate``, ``trainer.test`` or ``trainer.predict``, whichever runs."""
    # _active_loop is private in lightning 2.5.0 to 2.6.6.
    return trainer._active_loop


@dataclass(frozen=True)
class DataSource:
    """Origin of the loaders of one stage: a hook, or an argument of a method such as ``fit``."""

    trainer: Trainer
    source: _DataLoaderSource
    # Lightning combines several loaders in this mode, unless they are in a CombinedLoader already.
    default_mode: Literal["max_size_cycle", "sequential"]

    @property
    def passed(self) -> bool:
        return not self.source.is_module()

    @property
    def hook(self) -> str:
        return self.source.name

    @property
    def stage(self) -> str:
        """The name of the stage in hooks and in ``limit_*_batches``.

        It is ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.
        """
        return self.hook.removesuffix("_dataloader")

    @property
    def is_empty(self) -> bool:
        """Whether there is an empty list in place of loaders."""
        return all(isinstance(loader, list | tuple | dict) for loader in self._combined().flattened)

    def passed_loaders(self) -> list[DataLoader[Any]]:
        loaders = self._combined().flattened if self.passed else []
        return [loader for loader in loaders if isinstance(loader, DataLoader)]

    def request(self) -> CombinedLoader:
        """The loaders of the hook or the argument, combined as in Lightning's ``setup_data``."""
        combined = self._combined()
        for loader in combined.flattened:
            if not isinstance(loader, DataLoader):
                raise ValueError(
                    f"the loaders of {self.hook} must be torch DataLoaders for BatchFinder, got"
                    f" {type(loader).__name__}. Make the batches in a torch DataLoader, from a data"
                    " set of single samples, in the hook or passed to fit."
                )
        return combined

    def _combined(self) -> CombinedLoader:
        request = lightning_name(
            self.trainer, "trainer.connectors.data_connector._request_dataloader"
        )
        combined_class = lightning_name(self.trainer, "utilities.CombinedLoader")
        requested: Any = request(self.source)
        if not isinstance(requested, combined_class):
            requested = combined_class(requested, self.default_mode)
        return cast("CombinedLoader", requested)


def replicas_of(trainer: Trainer, loader: DataLoader[Any]) -> int:
    """Number of ranks among which Lightning divides the samples of ``loader``."""
    # _requires_distributed_sampler is private in lightning 2.5.0 to 2.6.6.
    if not trainer._data_connector._requires_distributed_sampler(loader):
        return 1
    return int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))


def train_source(trainer: Trainer) -> DataSource:
    return DataSource(trainer, trainer.fit_loop._data_source, "max_size_cycle")


def validation_source(trainer: Trainer) -> DataSource:
    return DataSource(trainer, validation_loop(trainer)._data_source, "sequential")


def stage_source(trainer: Trainer) -> DataSource:
    return DataSource(trainer, stage_loop(trainer)._data_source, "sequential")


def combined_mode(combined: CombinedLoader) -> str:
    # _mode is private in lightning 2.5.0 to 2.6.6.
    return combined._mode


def in_structure(combined: CombinedLoader, batches: Sequence[Any]) -> Any:
    """One batch per loader, in the collection of the loaders (``_spec`` in 2.5.0 to 2.6.6)."""
    return tree_unflatten(list(batches), combined._spec)


def batch_sampler_of(loader: DataLoader[Any]) -> Any:
    """The sampler that makes the indices of a batch.

    It may also be passed as ``sampler``, with ``batch_size=None``.
    """
    is_sampler = loader.batch_size is None and hasattr(loader.sampler, "batch_size")
    return loader.sampler if is_sampler and loader.batch_sampler is None else loader.batch_sampler


def state_of(loaders: Sequence[DataLoader[Any]]) -> SimpleNamespace:
    """Data sets of loaders, and random generators that are attributes of loaders and samplers."""
    samplers = [batch_sampler_of(loader) for loader in loaders]
    holders = [*loaders, *(loader.sampler for loader in loaders), *samplers]
    holders += [getattr(sampler, "sampler", None) for sampler in samplers]
    kinds = torch.Generator | random.Random | np.random.RandomState | np.random.Generator
    values = [value for holder in holders for value in getattr(holder, "__dict__", {}).values()]
    generators = [value for value in values if isinstance(value, kinds)]
    return SimpleNamespace(generators=generators, data_sets=[loader.dataset for loader in loaders])


def keep_sizes(loaders: Iterable[DataLoader[Any]]) -> Callable[[], None]:
    """Record the batch sizes of loaders; returns a function that restores them."""
    undo = ExitStack()
    for loader in loaders:
        if (size := loader_batch_size(loader)) is not None:
            undo.callback(set_loader_batch_size, loader, size)
    return undo.close


def loader_batch_size(loader: DataLoader[Any]) -> int | None:
    """The batch size of ``loader``, or ``None`` where it has none.

    A loader without batching has none, and neither has a batch sampler without a size.
    """
    size = loader.batch_size
    if size is None:
        size = getattr(batch_sampler_of(loader), "batch_size", None)
    return size if isinstance(size, int) else None


def set_loader_batch_size(loader: DataLoader[Any], batch_size: int) -> None:
    """Set the batch size of an existing loader in place, whatever arguments its class takes."""
    sampler = batch_sampler_of(loader)
    if hasattr(sampler, "batch_size"):
        name = type(sampler).__name__
        try:
            sampler.batch_size = batch_size
        except AttributeError as error:
            raise ValueError(
                f"the batch sampler {name} must have a batch_size that can be set, got {error}"
            ) from error
        if type(sampler) is not BatchSampler:
            # The memo keeps deepcopy from copying the data set.
            copied = copy.deepcopy(sampler, {id(loader.dataset): loader.dataset})
            first: Any = next(iter(copied), [])
            # mypy does not see that a data set with a batch sampler has a length.
            if len(first) > batch_size or len(first) < batch_size <= len(loader.dataset):  # type: ignore[arg-type]
                raise ValueError(
                    f"the batch sampler {name} must make batches of its batch_size, got one of"
                    f" {len(first)} samples after it was set to {batch_size}. Make the batches in"
                    " __iter__."
                )
    if loader.batch_size is not None:
        # DataLoader.__setattr__ raises an error for this attribute (torch 2.5.1 to 2.13).
        vars(loader)["batch_size"] = batch_size


def attach_loaders(
    trainer: Trainer,
    loaders: CombinedLoader,
    batches: float,
    validation: CombinedLoader | None,
    validation_batches: list[float],
) -> None:
    """Attach loaders and their numbers of batches to the trainer, where hooks may read them.

    No worker is started.
    """
    trainer.fit_loop._combined_loader = loaders
    trainer.fit_loop.max_batches = batches
    if validation is not None:
        validation_loop(trainer)._combined_loader = validation
        validation_loop(trainer)._max_batches = validation_batches
    elif trainer.enable_validation:
        # This builds the validation loaders but no iterator, so no worker is started.
        validation_loop(trainer).setup_data()


def discard_train_loader(trainer: Trainer) -> None:
    """Discard the training loader and its workers, so that Lightning requests the loader again."""
    fit_loop = trainer.fit_loop
    if fit_loop._data_fetcher is not None:
        fit_loop._data_fetcher.teardown()
    fit_loop._data_fetcher = None
    fit_loop._combined_loader = None
