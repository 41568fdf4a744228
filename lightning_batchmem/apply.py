"""Make a run that has been searched the run it would have been with the chosen size hard-coded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.loaders import forget_train_loader
from lightning_batchmem._lightning.state import KeptModule, KeptTrainer, RandomStates, configure_optimizers_again
from lightning_batchmem._lightning.step import quieten
from lightning_batchmem.data import BatchSizeHome
from lightning_batchmem.measure import StepWatcher


@contextmanager
def no_trace(
    trainer: Trainer, module: LightningModule, home: BatchSizeHome, random: RandomStates, watcher: StepWatcher
) -> Iterator[KeptTrainer]:
    """Lend trainer and module to probing steps; put back everything on the way out, whatever happened.

    Args:
        trainer: in ``on_fit_start``.
        module: the module that is trained.
        home: where the batch size lives; it gets its old value back.
        random: the generators' states to rewind to.
        watcher: the only callback that the steps reach.
    """
    forget_train_loader(trainer)  # built already if configure_optimizers asked for estimated_stepping_batches
    with ExitStack() as undo:  # in the reverse order, each of them whatever became of the others
        undo.callback(random.rewind)
        size_of_passed_loader = home.size_of_passed_loader()
        if size_of_passed_loader is not None:
            undo.callback(home.write_passed_loader, size_of_passed_loader)
        schedulers = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
        data = [trainer.datamodule]  # type: ignore[attr-defined]  # set where mypy does not look
        kept_module = KeptModule(module, [one for one in (*data, *trainer.optimizers, *schedulers) if one is not None])
        undo.callback(kept_module.put_back)  # with the batch size, where an attribute holds it
        kept_trainer = KeptTrainer(trainer)
        undo.callback(kept_trainer.put_back)
        if kept_module.passed_over:
            what = "; ".join(kept_module.passed_over[:10])
            rank_zero_warn(f"should a training step change it, BatchFinder does not put it back: {what}")
        quieten(trainer, watcher)
        yield kept_trainer


def apply_batch_size(trainer: Trainer, home: BatchSizeHome, batch_size: int) -> None:
    """Set ``batch_size`` and let optimizers and schedulers be configured as if it had always been there.

    Args:
        trainer: in ``on_fit_start``, its generators where they were before ``configure_optimizers`` first ran.
        home: where the batch size lives.
        batch_size: samples for each rank.
    """
    home.write_for_good(batch_size)
    forget_train_loader(trainer)
    configure_optimizers_again(trainer)
