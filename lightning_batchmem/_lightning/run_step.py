"""Run the user's real training step on a batch of our own, in Lightning's own training loop.

Read in lightning 2.5.0 and 2.6.6: ``_TrainingEpochLoop.advance`` takes a data fetcher, and does with its next batch all
that training does: precision plugin, transfer hooks, ``on_train_batch_start``, ``training_step``, backward, clipping,
optimizer step, step-wise schedulers, ``on_train_batch_end``, the logger connector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.progress import _BatchProgress  # private in 2.5.0 to 2.6.6
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.call import _call_lightning_module_hook  # private in 2.5.0 to 2.6.6


class _BatchSource:
    """The part of Lightning's ``_DataFetcher`` that ``advance`` uses: the next batch, and ``done``."""

    done = False

    def __init__(self, make_batch: Callable[[], Any]) -> None:
        self._make_batch = make_batch

    def __next__(self) -> tuple[Any, int, int]:
        return self._make_batch(), 0, 0


class _Nothing:
    """Every attribute, call and item of it is it again: what ``self.logger.experiment`` is to a probing step."""

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> _Nothing:
        return self

    def __getitem__(self, key: object) -> _Nothing:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        """Forget it."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _MutedLogger(DummyLogger):
    """Logs nothing, and still tells where the real logger would."""

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._logger = logger
        self._nothing = _Nothing()

    @property
    def experiment(self) -> Any:
        return self._nothing

    @property
    def name(self) -> Any:
        return self._logger.name

    @property
    def version(self) -> Any:
        return self._logger.version

    @property
    def save_dir(self) -> Any:
        return self._logger.save_dir

    @property
    def log_dir(self) -> Any:
        return getattr(self._logger, "log_dir", self._logger.save_dir)


def mute_callbacks_and_loggers(trainer: Trainer, watcher: Callback) -> None:
    """Let probing steps reach no callback but ``watcher``, no logger and no profiler of the user's.

    ``TrainerState.restore`` undoes it.
    """
    trainer.callbacks = [watcher]  # type: ignore[attr-defined]  # set where mypy does not look
    trainer.loggers = [_MutedLogger(logger) for logger in trainer.loggers]
    trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]
    # 2.6 tells the other ranks of a SIGTERM in every step; a probing step stays on its rank
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def begin_training(trainer: Trainer) -> None:
    """Call the module's own hooks that precede its first batch; a training step may rely on what they set."""
    for hook in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
        _call_lightning_module_hook(trainer, hook)


def begin_epoch(trainer: Trainer, batches: float) -> int:
    """Let the next step be the first of an epoch.

    Gradient accumulation over more than two micro-batches is cut to two: the first, which clears the gradients, and
    the last, which has them from the start and steps. Those between hold no more than the last.

    Args:
        trainer: in a search.
        batches: batches in the epoch; ``inf`` when unknown.

    Returns:
        Micro-batches to an optimizer step, 1 or 2.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.batch_progress = _BatchProgress()
    # what is logged anew may be reduced in another way: alone, or with the other ranks
    epoch_loop._results = type(epoch_loop._results)(training=epoch_loop._results.training)
    trainer.fit_loop.max_batches = batches
    trainer.accumulate_grad_batches = min(2, trainer.accumulate_grad_batches)
    return trainer.accumulate_grad_batches


def run_step(trainer: Trainer, make_batch: Callable[[], Any]) -> None:
    """Run one training step on the batch that ``make_batch`` returns.

    Raises:
        RuntimeError: when the module's ``on_train_batch_start`` skips the first batch of an epoch: no step ever runs.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    try:
        epoch_loop.advance(_BatchSource(make_batch))  # type: ignore[arg-type]
    except StopIteration:  # on_train_batch_start returned -1, which ends an epoch: so begin the next one
        epoch_loop.batch_progress = _BatchProgress()
        try:
            epoch_loop.advance(_BatchSource(make_batch))  # type: ignore[arg-type]
        except StopIteration:
            raise RuntimeError(
                "on_train_batch_start returned -1 for the first batch, so BatchFinder cannot measure a training step;"
                " set the batch size by hand, or return -1 only after training has begun"
            ) from None
    if not epoch_loop._should_accumulate():
        epoch_loop._batches_that_stepped += 1  # as on_advance_end does, which also validates


def drop_batch(trainer: Trainer) -> None:
    """Let go of the batch that a step which was cut short left in the results of the training loop."""
    results = trainer.fit_loop.epoch_loop._results
    results.batch = None
    results.batch_size = None
