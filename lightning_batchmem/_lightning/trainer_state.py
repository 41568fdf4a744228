"""State of the trainer: restored after a search, and read while it trains. Read in lightning 2.5.0 and 2.6.6."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states  # private in 2.5.0 to 2.6.6
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loops.loop import _Loop  # private in 2.5.0 to 2.6.6

from lightning_batchmem._lightning.hooks import keep_learning_rate
from lightning_batchmem._lightning.strategies import in_every_package, lightning_name
from lightning_batchmem.devices.tensors import bytes_of

Loop = _Loop


class RandomStates:
    """Random number generators of the process: Python, NumPy, torch and every CUDA device."""

    def __init__(self) -> None:
        self._states = _collect_rng_states()

    def restore(self) -> None:
        _set_rng_states(self._states)


class TrainerState:
    """Attributes of the trainer, its loops, connectors, gradient scaler and schedulers, before ``loop`` runs."""

    def __init__(self, trainer: Trainer, loop: Loop, schedulers: Iterable[Any] = ()) -> None:
        loops = list(_loops(loop))
        precision: Any = trainer.precision_plugin
        holders: list[Any] = [trainer, trainer.state, trainer._logger_connector, precision, *loops]
        self._kept = [(holder, dict(vars(holder))) for holder in holders]
        if getattr(precision, "scaler", None) is not None:  # torch.amp.GradScaler of MixedPrecision
            precision.scaler = copy.deepcopy(precision.scaler)
        base_progress = lightning_name(trainer, "loops.progress._BaseProgress")  # private in 2.5.0 to 2.6.6
        for one in loops:
            for name, value in list(vars(one).items()):
                if isinstance(value, base_progress):
                    setattr(one, name, copy.deepcopy(value))
                elif name == "_results" and value is not None:  # None in a prediction loop
                    vars(one)[name] = type(value)(training=value.training)
        for name, value in list(vars(trainer._logger_connector).items()):
            if isinstance(value, dict):
                setattr(trainer._logger_connector, name, dict(value))
        known = [*schedulers, *(config.scheduler for config in trainer.strategy.lr_scheduler_configs)]
        self._kept += [(one, dict(vars(one))) for one in {id(one): one for one in known}.values()]
        for scheduler in known:  # made for the old size, it may end before the search does
            vars(scheduler)["step"] = keep_learning_rate

    def restore(self) -> None:
        for holder, attributes in self._kept:
            vars(holder).clear()
            vars(holder).update(attributes)


def _loops(loop: Loop) -> Iterator[Loop]:
    yield loop
    for value in vars(loop).values():
        if isinstance(value, lightning_name(loop, "loops.loop._Loop")):
            yield from _loops(value)


def callbacks_of(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set where mypy does not look
    return callbacks


def saves_checkpoints(callbacks: Iterable[Callback]) -> bool:
    return any(isinstance(callback, in_every_package("callbacks.Checkpoint")) for callback in callbacks)


def weight_average_bytes(trainer: Trainer) -> int:
    """Bytes that StochasticWeightAveraging will take on the trainer's device; until then its copy is on the CPU."""
    kinds, device = in_every_package("callbacks.StochasticWeightAveraging"), trainer.strategy.root_device
    averages: list[Any] = [callback for callback in callbacks_of(trainer) if isinstance(callback, kinds)]
    # `_device` is private in 2.5.0 to 2.6.6; None is the device of the module
    moves = any(callback._device is None or callback._device.type == device.type for callback in averages)
    return bytes_of(trainer.lightning_module.parameters()) if moves else 0


def datamodules_of(trainer: Trainer) -> list[LightningDataModule]:
    datamodule = trainer.datamodule  # type: ignore[attr-defined]  # as above
    return [] if datamodule is None else [datamodule]


def logging_step(trainer: Trainer) -> int:
    """The step under which Lightning logs; ``trainer.global_step`` counts every optimizer of a manual step."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def logs_now(trainer: Trainer) -> bool:
    """Whether values of ``self.log`` reach the loggers after the current batch, as in ``_LoggerConnector``."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set where mypy does not look
    epoch_loop = trainer.fit_loop.epoch_loop
    if every == 0 or ((epoch_loop._batches_that_stepped + 1) % every and not trainer.should_stop):
        return False
    return not (epoch_loop._should_accumulate() and trainer.lightning_module.automatic_optimization)


def logs_at_all(trainer: Trainer) -> bool:
    """Whether ``log_every_n_steps`` lets any value reach the loggers."""
    return bool(trainer.log_every_n_steps)  # type: ignore[attr-defined]  # as above


def is_fast_dev_run(trainer: Trainer) -> bool:
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]  # as above
