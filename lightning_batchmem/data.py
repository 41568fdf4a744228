"""Where the batch size lives, and samples to make batches of any size from."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import types
from collections.abc import Sized
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.parsing import lightning_hasattr, lightning_setattr
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_batchmem._lightning.loaders import (
    loader_batch_size,
    loaders_passed_to_fit,
    request_train_loader,
    set_initial_hparam,
    set_loader_batch_size,
)

_log = logging.getLogger(__name__)

_DRAWN_SAMPLES = 32
"""How many samples are drawn; batches repeat them. Enough to meet several lengths, few enough to be drawn at once."""

_WORKER_TIMEOUT_SECONDS = 60
"""A forked worker that waits for a thread of its parent waits for ever; then the samples are drawn otherwise."""


@dataclass(frozen=True)
class BatchSizeHome:
    """The one or several places in which a project keeps its batch size, read and written together.

    Args:
        trainer: in ``fit``.
        module: the module that is trained.
        name: attribute that holds the batch size.
    """

    trainer: Trainer
    module: LightningModule
    name: str

    @property
    def in_attribute(self) -> bool:
        """Whether the module, its hparams, the datamodule or its hparams have the attribute."""
        return bool(lightning_hasattr(self.module, self.name))

    def write(self, batch_size: int) -> None:
        """Set the size in the attribute, wherever it exists, and in a loader that was passed to ``fit``."""
        if self.in_attribute:
            lightning_setattr(self.module, self.name, batch_size)
        if loaders_passed_to_fit(self.trainer):
            self.write_passed_loader(batch_size)

    def write_passed_loader(self, batch_size: int) -> None:
        """Set the size in the loader that was passed to ``fit``."""
        set_loader_batch_size(request_train_loader(self.trainer), batch_size)

    def write_for_good(self, batch_size: int) -> None:
        """Set the size as :meth:`write` does, and in the hyperparameters that Lightning is about to log."""
        self.write(batch_size)
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]  # set where mypy does not look
        for holder in (self.module, datamodule):
            if holder is not None:
                set_initial_hparam(holder, self.name, batch_size)

    def size_of_passed_loader(self) -> int | None:
        """The size of the loader that was passed to ``fit``; ``None`` when there is none, or it has no size."""
        return loader_batch_size(request_train_loader(self.trainer)) if loaders_passed_to_fit(self.trainer) else None

    def check(self) -> None:
        """Make sure that there is a place to set the size in.

        Raises:
            ValueError: when no loader was passed to ``fit`` and nothing has the attribute.
        """
        if not loaders_passed_to_fit(self.trainer) and not self.in_attribute:
            raise ValueError(
                f"batch_arg_name must name an attribute of the module, its hparams, the datamodule or its hparams,"
                f" got {self.name!r}, which none of them has; add `self.{self.name} = ...` and build the loader with it"
            )

    def loader_for(self, batch_size: int) -> DataLoader[Any]:
        """The training loader at ``batch_size``, as the project itself makes it.

        Raises:
            ValueError: when the project does not follow the size: a loader without a batch size, or a
                ``train_dataloader`` that does not use the attribute.
        """
        self.write(batch_size)
        loader = request_train_loader(self.trainer)
        size = loader_batch_size(loader)
        if size is None:
            sampler = type(loader.batch_sampler).__name__
            raise ValueError(
                "the training loader must have a batch size that can be set, got"
                + (" batch_size=None" if loader.batch_sampler is None else f" the batch sampler {sampler}")
                + "; let the DataLoader make the batches, or give the batch sampler a `batch_size` attribute"
            )
        if size != batch_size:
            raise ValueError(
                f"train_dataloader must use `{self.name}`, got a loader of batch size {size} after {self.name} was set"
                f" to {batch_size}; build it with DataLoader(..., batch_size=self.{self.name})"
            )
        return loader


def count_samples(loader: DataLoader[Any]) -> int | None:
    """How many samples an epoch of ``loader`` has on this rank; ``None`` for a stream without a length."""
    if isinstance(loader.dataset, IterableDataset):
        return len(loader.dataset) if isinstance(loader.dataset, Sized) else None
    sampler = loader.sampler if loader.batch_size is not None else getattr(loader.batch_sampler, "sampler", None)
    for sized in (sampler, loader.dataset):
        if isinstance(sized, Sized):
            return len(sized)
    return None


class Samples:
    """A few real samples, drawn once, from which the loader's own ``collate_fn`` makes batches of any size.

    They are drawn in a worker process where one can be forked, or the loader has workers of its own: neither a stream
    nor a file handle nor a generator of the data set's own moves in this process. Elsewhere from a copy of the data
    set.

    Args:
        loader: the training loader.

    Raises:
        ValueError: when the data set has no sample.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        # A method is not copied: its owner would be too, and that is the module or the data module, which are put back
        # anyhow, or the data set, which may be large.
        method = isinstance(loader.collate_fn, types.MethodType)
        self._collate = loader.collate_fn if method else _copy_or_warn(loader.collate_fn, "collate_fn")
        self._samples = _draw(loader)
        if not self._samples:
            raise ValueError("the training data must have at least one sample, got none")

    def batch(self, batch_size: int) -> Any:
        """A collated batch of ``batch_size`` samples, on the host."""
        return self._collate([self._samples[i % len(self._samples)] for i in range(batch_size)])


def _draw(loader: DataLoader[Any]) -> list[Any]:
    # A worker that is spawned instead runs the user's script once more, unless that is guarded against it: only where
    # the loader itself will do the same. The first of all methods is the default, and asking does not fix it.
    start_method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if loader.num_workers or start_method == "fork":
        try:
            return _draw_from(loader, loader.dataset, num_workers=1)
        except Exception as error:  # noqa: BLE001 - whatever a worker cannot do; what is the user's own recurs below
            _log.info("samples for the probes could not be drawn in a worker: %s", error)
    return _draw_from(loader, _copy_or_warn(loader.dataset, "data set"), num_workers=0)


def _copy_or_warn(value: Any, name: str) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - a user's object may refuse to be copied in any way it likes
        rank_zero_warn(f"the {name} cannot be copied: what the probes change in it is not put back")
        return value


def _draw_from(loader: DataLoader[Any], dataset: Any, num_workers: int) -> list[Any]:
    arguments: dict[str, Any] = {"batch_size": _DRAWN_SAMPLES}
    if not isinstance(dataset, IterableDataset):
        arguments["sampler"] = _indices(loader)
    if num_workers:
        arguments["multiprocessing_context"] = loader.multiprocessing_context
        arguments["worker_init_fn"] = loader.worker_init_fn
        arguments["timeout"] = _WORKER_TIMEOUT_SECONDS
    drawing: DataLoader[Any] = DataLoader(
        dataset,
        num_workers=num_workers,
        collate_fn=_uncollated,
        generator=torch.Generator(),  # the worker's seed must not be drawn from the process's own generator
        **arguments,
    )
    drawn: list[Any] = next(iter(drawing), [])
    # out of the shared memory in which a worker hands tensors over, one file descriptor each
    return [apply_to_collection(sample, Tensor, Tensor.clone) for sample in drawn]


def _indices(loader: DataLoader[Any]) -> list[Any]:
    """Which samples to draw: spread over the whole set, or the first ones that a sampler of the user's own names."""
    own_batches = loader.batch_size is None and loader.batch_sampler is not None
    if isinstance(loader.sampler, SequentialSampler | RandomSampler) and not own_batches:
        length = len(loader.sampler.data_source)
        count = min(_DRAWN_SAMPLES, length)
        return [i * length // count for i in range(count)]
    source = loader.batch_sampler if own_batches else loader.sampler
    copied = copy.deepcopy(source, {id(loader.dataset): loader.dataset})  # a copy: it may have a generator of its own
    named = chain.from_iterable(copied) if own_batches else iter(copied)  # type: ignore[arg-type]
    return list(islice(named, _DRAWN_SAMPLES))


def _uncollated(samples: list[Any]) -> list[Any]:
    return samples
