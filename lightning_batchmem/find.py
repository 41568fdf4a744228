"""The search without a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_batchmem._lightning.hooks import call_before, mute_callbacks_and_loggers
from lightning_batchmem._lightning.module_state import ModuleState
from lightning_batchmem._lightning.packages import end_of_tuning, lightning_name
from lightning_batchmem._lightning.trainer_state import RandomStates, TrainerState, callbacks_of
from lightning_batchmem.batch_finder import BatchFinder
from lightning_batchmem.batches.loaders import keep_sizes, state_of
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
    finder = _SearchOnly(callbacks_of(trainer), options)
    loaders = [*_loaders(trainer, train_dataloaders), *_loaders(trainer, val_dataloaders)]
    others = (one for one in (datamodule, train_dataloaders) if _is_datamodule(trainer, one))
    # The callbacks run in reverse order, each of them even where another one fails.
    with ExitStack() as undo:
        undo.callback(RandomStates().restore)
        # A compiled model wraps the module.
        module = getattr(model, "_orig_mod", model)
        undo.callback(ModuleState(module, [state_of(loaders), *others]).restore)
        undo.callback(keep_sizes(loaders))
        undo.callback(TrainerState(trainer, trainer.fit_loop).restore)
        undo.callback(setattr, trainer.strategy, "optimizers", [])
        undo.callback(setattr, trainer.strategy, "lr_scheduler_configs", [])
        mute_callbacks_and_loggers(trainer, finder)
        cancel = call_before(
            trainer.strategy,
            "setup_environment",
            lambda: finder.mute_callbacks_of_model(trainer),
        )
        undo.callback(cancel)
        trainer.fit(model, train_dataloaders, val_dataloaders, datamodule)
    if finder.plan is None:
        raise ValueError(
            "trainer must be one that trains in this process for find_batch_size, got fast_dev_run,"
            " no batches or epochs, or a strategy that starts other processes"
        )
    return finder.plan


class _SearchOnly(BatchFinder):
    """A BatchFinder that ends ``fit`` after the search."""

    def __init__(self, callbacks: list[Callback], options: dict[str, Any]) -> None:
        super().__init__(**options)
        self._callbacks = callbacks

    def mute_callbacks_of_model(self, trainer: Trainer) -> None:
        """Remove the callbacks that ``configure_callbacks`` of the module has added."""
        added = [one for one in callbacks_of(trainer) if one is not self]
        self._callbacks = [*self._callbacks, *added]
        # mypy does not see that the trainer has this attribute.
        trainer.callbacks = [self]  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search with the callbacks of the training in place, because some of them need memory."""
        # mypy does not see that the trainer has this attribute.
        trainer.callbacks = self._callbacks  # type: ignore[attr-defined]
        try:
            super().on_fit_start(trainer, pl_module)
        finally:
            # mypy does not see that the trainer has this attribute.
            trainer.callbacks = [self]  # type: ignore[attr-defined]
        # The exception is private in lightning 2.5.0 to 2.6.6.
        raise end_of_tuning(trainer)

    def _report(self, trainer: Trainer, plan: Plan) -> None:
        """Print nothing: the plan is returned."""


def _is_datamodule(trainer: Trainer, data: Any) -> bool:
    return isinstance(data, lightning_name(trainer, "core.LightningDataModule"))


def _loaders(trainer: Trainer, loaders: Any) -> Iterator[DataLoader[Any]]:
    if not (loaders is None or _is_datamodule(trainer, loaders)):
        combined = lightning_name(trainer, "utilities.CombinedLoader")
        if not isinstance(loaders, combined):
            loaders = combined(loaders, "sequential")
        yield from (loader for loader in loaders.flattened if isinstance(loader, DataLoader))
