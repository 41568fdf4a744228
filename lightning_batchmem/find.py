"""The search without a training."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_batchmem._lightning.clean_start import isolated
from lightning_batchmem._lightning.hooks import call_before
from lightning_batchmem._lightning.packages import end_of_tuning, in_every_package
from lightning_batchmem._lightning.recorded_state import RecordedState
from lightning_batchmem._lightning.trainer_state import callbacks_of
from lightning_batchmem.batch_finder import BatchFinder
from lightning_batchmem.plan.plan import Plan


def find_batch_size(
    trainer: Trainer,
    model: LightningModule,
    datamodule: LightningDataModule | None = None,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    **options: Any,
) -> Plan:
    """Compute the batch size without a training, and without a change of anything else.

    The search is that of :class:`~lightning_batchmem.BatchFinder` in ``trainer.fit``. The hooks
    ``prepare_data``, ``setup`` and ``teardown`` run; callbacks and loggers of the trainer do not.
    Afterwards the model, the data, the trainer and all random states are as before, so set the size
    yourself.

    Args:
        trainer: the Trainer of the later training.
        model: the module to train.
        datamodule: the data to train with.
        train_dataloaders: loaders to train with, instead of a datamodule.
        val_dataloaders: loaders of validation, with ``train_dataloaders``.
        **options: arguments of :class:`~lightning_batchmem.BatchFinder`.

    Returns:
        The plan; ``plan.batch_size`` is in samples for each rank.

    Raises:
        ValueError: for an argument out of range, a trainer that would not train, and a project
            whose batch size cannot be set.
        RuntimeError: when no size fits.

    Example:
        >>> from lightning_batchmem import find_batch_size
        >>> plan = find_batch_size(trainer, model, memory_limit=0.9)  # doctest: +SKIP
        >>> model.batch_size = plan.batch_size  # doctest: +SKIP
    """
    finder = SearchOnly(**options)
    finder.search(trainer, model, datamodule, train_dataloaders, val_dataloaders)
    if finder.plan is None:
        raise ValueError(
            "trainer must be one that trains in this process for find_batch_size, got fast_dev_run,"
            " no batches or epochs, or a strategy that starts other processes"
        )
    return finder.plan


class SearchOnly(BatchFinder):
    """A BatchFinder that ends ``fit`` after the search."""

    # These are the callbacks of the training.
    callbacks: list[Callback]

    def search(
        self,
        trainer: Trainer,
        model: LightningModule,
        datamodule: LightningDataModule | None,
        train_dataloaders: Any,
        val_dataloaders: Any,
    ) -> None:
        """Call ``fit`` up to the end of the search, and restore everything."""
        self.callbacks = callbacks_of(trainer)
        data = [datamodule, *_flat(train_dataloaders), *_flat(val_dataloaders)]
        loaders = [item for item in data if isinstance(item, DataLoader)]
        kinds = in_every_package("core.LightningDataModule")
        # A compiled model wraps the module.
        recorded = RecordedState(
            getattr(model, "_orig_mod", model),
            loaders,
            [item for item in data if isinstance(item, kinds)],
        )
        strategy = trainer.strategy
        with isolated(trainer, recorded, [self]):
            cancel = call_before(
                strategy, "setup_environment", lambda: self.mute_callbacks_of_model(trainer)
            )
            try:
                trainer.fit(model, train_dataloaders, val_dataloaders, datamodule)
            finally:
                cancel()
                strategy.optimizers = []
                strategy.lr_scheduler_configs = []

    def mute_callbacks_of_model(self, trainer: Trainer) -> None:
        """Remove the callbacks that ``configure_callbacks`` of the module has added."""
        self.callbacks = [*self.callbacks, *callbacks_of(trainer)]
        # mypy does not see that the trainer has this attribute.
        trainer.callbacks = [self]  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search with the callbacks of the training in place, because some of them need memory."""
        # mypy does not see that the trainer has this attribute.
        trainer.callbacks = self.callbacks  # type: ignore[attr-defined]
        try:
            super().on_fit_start(trainer, pl_module)
        finally:
            # mypy does not see that the trainer has this attribute.
            trainer.callbacks = [self]  # type: ignore[attr-defined]
        raise end_of_tuning(trainer)

    def _report(self, trainer: Trainer, plan: Plan) -> None:
        """Print nothing: the plan is returned."""


def _flat(loaders: Any) -> list[Any]:
    """The loaders in a collection, or in Lightning's CombinedLoader."""
    return tree_leaves(getattr(loaders, "flattened", loaders))
