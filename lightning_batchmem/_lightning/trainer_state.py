"""Where the training loop stands, as Lightning's own ``self.log`` sees it. Read in lightning 2.5.0 and 2.6.6."""

from __future__ import annotations

from lightning.pytorch import Trainer


def logging_step(trainer: Trainer) -> int:
    """The step under which Lightning logs the values of the batch that runs: optimizer steps, not micro-batches.

    ``trainer.global_step`` is not it: that counts every optimizer of a manual step.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def logs_now(trainer: Trainer) -> bool:
    """Whether values of ``self.log`` reach the loggers after the batch that ends.

    The condition of ``_LoggerConnector.update_train_step_metrics`` and ``should_update_logs``, the cheap half first.
    """
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set where mypy does not look
    if every == 0:
        return False
    loop = trainer.fit_loop
    if (loop.epoch_loop._batches_that_stepped + 1) % every and not trainer.should_stop:
        return False
    return not (loop.epoch_loop._should_accumulate() and trainer.lightning_module.automatic_optimization)


# The two attributes below are public, and set by functions that type checkers do not follow.


def logs_at_all(trainer: Trainer) -> bool:
    """Whether the Trainer's ``log_every_n_steps`` lets anything reach the loggers."""
    return bool(trainer.log_every_n_steps)  # type: ignore[attr-defined]


def is_fast_dev_run(trainer: Trainer) -> bool:
    """Whether the run is a ``fast_dev_run``, which is to leave no files."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
