"""Get at the loaders of a stage, set their batch size, and make Lightning build the training loader anew.

Read in lightning 2.5.0 and 2.6.6: each loop's ``_data_source`` says where its loaders come from; ``setup_data`` wraps
them into a ``CombinedLoader`` and keeps that in ``_combined_loader``, and ``fit_loop`` an iterator of it in
``_data_fetcher``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.connectors.data_connector import (  # private in 2.5.0 to 2.6.6
    _DataLoaderSource,
    _request_dataloader,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_unflatten  # what CombinedLoader itself uses (lightning 2.5.0 to 2.6.6)
from torch.utils.data import BatchSampler, DataLoader

from lightning_batchmem._lightning.evaluation import stage_loop, validation_loop


@dataclass(frozen=True)
class DataSource:
    """Where one stage takes its loaders from: a hook, or what was passed to ``fit``, ``validate`` and so on.

    Args:
        trainer: whose stage it is.
        source: Lightning's own record of it, kept by the loop of the stage.
        default_mode: how Lightning combines several loaders that are not a ``CombinedLoader`` yet.
    """

    trainer: Trainer
    source: _DataLoaderSource
    default_mode: Literal["max_size_cycle", "sequential"]

    @property
    def passed(self) -> bool:
        """Whether loaders were passed, instead of being taken from a hook."""
        return not self.source.is_module()

    @property
    def hook(self) -> str:
        """Name of the hook: ``"train_dataloader"``, ``"val_dataloader"``, ..."""
        return self.source.name

    @property
    def stage(self) -> str:
        """As in the names of hooks and of ``limit_*_batches``: ``"train"``, ``"val"``, ``"test"``, ``"predict"``."""
        return self.hook.removesuffix("_dataloader")

    @property
    def beside_training(self) -> bool:
        """Whether these are the validation loaders of a ``fit``."""
        return self.trainer.state.fn == TrainerFn.FITTING and self.default_mode == "sequential"

    def passed_loaders(self) -> list[DataLoader[Any]]:
        """The loaders that were passed, as far as they are torch's."""
        requested = _request_dataloader(self.source) if self.passed else []
        combined = requested if isinstance(requested, CombinedLoader) else CombinedLoader(requested, self.default_mode)
        return [loader for loader in combined.flattened if isinstance(loader, DataLoader)]

    def request(self) -> CombinedLoader:
        """The user's loaders, from their hook or as they were passed, combined as Lightning's ``setup_data`` does.

        Raises:
            ValueError: when one of them is not a :class:`~torch.utils.data.DataLoader`.
        """
        requested = _request_dataloader(self.source)
        is_combined = isinstance(requested, CombinedLoader)
        combined = requested if is_combined else CombinedLoader(requested, self.default_mode)
        for loader in combined.flattened:
            if not isinstance(loader, DataLoader):
                raise ValueError(
                    f"the loaders of {self.hook} must be torch DataLoaders for BatchFinder, got"
                    f" {type(loader).__name__}; set the batch size by hand"
                )
        return combined


def replicas_of(trainer: Trainer, loader: DataLoader[Any]) -> int:
    """Among how many ranks Lightning will divide the samples of ``loader``; 1 where it leaves its sampler alone.

    ``_data_connector._requires_distributed_sampler`` in 2.5.0 to 2.6.6.
    """
    if not trainer._data_connector._requires_distributed_sampler(loader):
        return 1
    return int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))


def train_source(trainer: Trainer) -> DataSource:
    """Where ``fit`` takes its training loaders from."""
    return DataSource(trainer, trainer.fit_loop._data_source, "max_size_cycle")


def validation_source(trainer: Trainer) -> DataSource:
    """Where ``fit`` takes its validation loaders from."""
    return DataSource(trainer, validation_loop(trainer)._data_source, "sequential")


def stage_source(trainer: Trainer) -> DataSource:
    """Where ``trainer.validate``, ``trainer.test`` or ``trainer.predict``, whichever runs, takes its loaders from."""
    return DataSource(trainer, stage_loop(trainer)._data_source, "sequential")


def combined_mode(combined: CombinedLoader) -> str:
    """``"min_size"``, ``"max_size"``, ``"max_size_cycle"`` or ``"sequential"`` (``_mode`` in 2.5.0 to 2.6.6)."""
    return combined._mode


def in_structure(combined: CombinedLoader, batches: Sequence[Any]) -> Any:
    """One batch for each loader, in the collection that the loaders came in (``_spec`` in 2.5.0 to 2.6.6)."""
    return tree_unflatten(list(batches), combined._spec)


def generators_of(loader: DataLoader[Any]) -> list[Any]:
    """The random generators of a loader's own: its own attributes, those of its samplers."""
    holders = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    kinds = torch.Generator | random.Random | np.random.RandomState | np.random.Generator
    values = [value for holder in holders for value in getattr(holder, "__dict__", {}).values()]
    return [value for value in values if isinstance(value, kinds)]


def loader_batch_size(loader: DataLoader[Any]) -> int | None:
    """The batch size that ``loader`` will use; ``None`` when it does no batching, or its sampler does not tell."""
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def set_loader_batch_size(loader: DataLoader[Any], batch_size: int) -> None:
    """Set the batch size of an existing loader in place, which works for subclasses with arguments of their own too.

    Raises:
        ValueError: when a batch sampler of the user's own does not follow: its batches were made before, say.
    """
    sampler = loader.batch_sampler
    if hasattr(sampler, "batch_size"):
        name = type(sampler).__name__
        try:
            sampler.batch_size = batch_size  # type: ignore[union-attr]
        except AttributeError as error:
            raise ValueError(f"the batch sampler {name} must let its batch_size be set, got {error}") from error
        if type(sampler) is not BatchSampler:
            first = next(iter(copy.deepcopy(sampler, {id(loader.dataset): loader.dataset})), [])  # type: ignore[arg-type]
            if len(first) > batch_size or len(first) < batch_size <= len(loader.dataset):  # type: ignore[arg-type]
                raise ValueError(
                    f"the batch sampler {name} must make batches of its batch_size, got one of {len(first)} samples"
                    f" after it was set to {batch_size}; let it make its batches in __iter__"
                )
    if loader.batch_size is not None:
        vars(loader)["batch_size"] = batch_size  # DataLoader.__setattr__ refuses it (torch 2.5.1 to 2.13)


def attach_loaders(
    trainer: Trainer,
    loaders: CombinedLoader,
    batches: float,
    validation: CombinedLoader | None,
    validation_batches: list[float],
) -> None:
    """Let the trainer's questions about its data have answers during the search, without starting a worker.

    Args:
        trainer: in a search.
        loaders: the training loaders.
        batches: batches in an epoch; ``inf`` when unknown.
        validation: the validation loaders; ``None`` when there are none, or Lightning is to request them.
        validation_batches: batches of each of them.
    """
    trainer.fit_loop._combined_loader = loaders
    trainer.fit_loop.max_batches = batches
    if validation is not None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop._combined_loader = validation
        loop._max_batches = list(validation_batches)
    elif trainer.enable_validation:
        validation_loop(trainer).setup_data()  # builds the validation loaders, and no iterator


def forget_train_loader(trainer: Trainer) -> None:
    """Drop the loader that Lightning has built, its workers included; it is requested again when it is next needed."""
    fit_loop = trainer.fit_loop
    if fit_loop._data_fetcher is not None:
        fit_loop._data_fetcher.teardown()
    fit_loop._data_fetcher = None
    fit_loop._combined_loader = None


def set_initial_hparam(holder: LightningModule | LightningDataModule, name: str, value: Any) -> None:
    """Correct a hyperparameter in the copy that Lightning logs (``hparams_initial``), where it is recorded there."""
    initial = getattr(holder, "_hparams_initial", None)
    if initial is not None and name in initial:
        initial[name] = value
