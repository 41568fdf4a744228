"""Calls at the start of a run, and muted callbacks and loggers.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

# _optimizers_to_device is private in lightning 2.5.0 to 2.6.6.
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor

from lightning_batchmem.devices.peaks import PhasePeaks


def call_before(owner: Any, method: str, call: Callable[[], None]) -> Callable[[], object]:
    """Run ``call`` once before the next ``owner.method()``; returns a function that cancels it."""
    original = getattr(owner, method)

    # Without the attribute of the instance, the method of the class is used again.
    cancel = partial(vars(owner).pop, method, None)

    def calling(*arguments: Any) -> None:
        cancel()
        call()
        original(*arguments)

    vars(owner)[method] = calling
    return cancel


def configure_optimizers_again(trainer: Trainer) -> None:
    """Make new optimizers and schedulers, as ``Strategy.setup`` does."""
    strategy = trainer.strategy
    strategy.setup_optimizers(trainer)
    strategy.setup_precision_plugin()
    _optimizers_to_device(strategy.optimizers, strategy.root_device)


def freeze(schedulers: Iterable[Any]) -> None:
    """Keep the learning rate in steps of a search."""
    for scheduler in schedulers:
        vars(scheduler)["step"] = lambda *_, **__: None


class _MutedExperiment:
    """Accepts any chain of attributes, calls and items.

    Lightning's DummyExperiment accepts one call only.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    __getitem__ = __setitem__ = __call__

    def __iter__(self) -> Any:
        return iter(())


class _MutedLogger(DummyLogger):
    """Logs nothing; its directories and names are those of the real logger."""

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._logger = logger
        self._experiment: Any = _MutedExperiment()

    name = property(lambda self: self._logger.name)
    version = property(lambda self: self._logger.version)
    save_dir = property(lambda self: self._logger.save_dir)
    log_dir = property(lambda self: self._logger.log_dir)


class PhaseCallback(Callback):
    """Marks where the phases of a step begin; the only callback that steps of a search reach."""

    def __init__(self, phases: PhasePeaks) -> None:
        self._phases = phases

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """End forward."""
        self._phases.enter("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End backward; clipping and the optimizer follow."""
        self._phases.enter("optimizer_step")


def mute_callbacks_and_loggers(trainer: Trainer, callback: Callback) -> None:
    """Leave ``callback`` as the only callback, and no logger or profiler."""
    # mypy does not see attributes that Lightning sets outside the class Trainer.
    trainer.callbacks = [callback]  # type: ignore[attr-defined]
    trainer.loggers = [_MutedLogger(logger) for logger in trainer.loggers]
    trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]
    # Lightning 2.6 broadcasts SIGTERM in every step, but a step of the search may run on one rank
    # only. mypy does not allow the replacement of a method.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
