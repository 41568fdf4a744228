"""Get at the training loader, set its batch size, and make Lightning build it anew.

Read in lightning 2.5.0 and 2.6.6: ``fit_loop._data_source`` says where the loader comes from; ``fit_loop.setup_data``
builds it once and keeps it in ``_combined_loader`` and ``_data_fetcher``.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader  # private in 2.5.0 to 2.6.6
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader


def loaders_passed_to_fit(trainer: Trainer) -> bool:
    """Whether ``trainer.fit`` was given loaders, instead of taking them from a ``train_dataloader`` hook."""
    return not trainer.fit_loop._data_source.is_module()


def request_train_loader(trainer: Trainer) -> DataLoader[Any]:
    """The user's training loader, from its hook or as it was passed to ``fit``.

    Raises:
        ValueError: when it is not a single :class:`~torch.utils.data.DataLoader`.
    """
    requested = _request_dataloader(trainer.fit_loop._data_source)
    if not isinstance(requested, DataLoader):
        raise ValueError(
            f"the training data must be one torch DataLoader for BatchFinder, got {type(requested).__name__};"
            " with several loaders, or one inside a collection, set the batch size by hand"
        )
    return requested


def loader_batch_size(loader: DataLoader[Any]) -> int | None:
    """The batch size that ``loader`` will use; ``None`` when it does no batching, or its sampler does not tell."""
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def set_loader_batch_size(loader: DataLoader[Any], batch_size: int) -> None:
    """Set the batch size of an existing loader in place, which works for subclasses with arguments of their own too."""
    if hasattr(loader.batch_sampler, "batch_size"):
        loader.batch_sampler.batch_size = batch_size  # type: ignore[union-attr]
    if loader.batch_size is not None:
        vars(loader)["batch_size"] = batch_size  # DataLoader.__setattr__ refuses it (torch 2.5.1 to 2.13)


def pretend_loaded(trainer: Trainer, loader: DataLoader[Any], batches: float) -> None:
    """Let the trainer's questions about its data have answers during the search, without starting a worker.

    Args:
        trainer: in a search.
        loader: the training loader.
        batches: batches in an epoch; ``inf`` when unknown.
    """
    trainer.fit_loop._combined_loader = CombinedLoader(loader)
    trainer.fit_loop.max_batches = batches
    if trainer.enable_validation:
        trainer.fit_loop.epoch_loop.val_loop.setup_data()  # builds the validation loaders, and no iterator


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
