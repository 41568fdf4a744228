"""State of the trainer: restored after a search, and read while it trains.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

# Both functions are private in lightning 2.5.0 to 2.6.6.
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import Callback, LightningDataModule, Trainer

# _Loop is private in lightning 2.5.0 to 2.6.6.
from lightning.pytorch.loops.loop import _Loop

from lightning_batchmem._lightning.hooks import keep_learning_rate
from lightning_batchmem._lightning.packages import in_every_package, lightning_name
from lightning_batchmem.devices.tensors import bytes_of

Loop = _Loop


class RandomStates:
    """Random number generators of the process: Python, NumPy, torch and every CUDA device."""

    def __init__(self) -> None:
        self._states = _collect_rng_states()

    def restore(self) -> None:
        _set_rng_states(self._states)


class TrainerState:
    """Attributes of the trainer and its parts before ``loop`` runs.

    The parts are loops, connectors, gradient scaler and schedulers.
    """

    def __init__(self, trainer: Trainer, loop: Loop, schedulers: Iterable[Any] = ()) -> None:
        loops = list(_loops(loop))
        precision: Any = trainer.precision_plugin
        holders: list[Any] = [trainer, trainer.state, trainer._logger_connector, precision, *loops]
        self._kept = [(holder, dict(vars(holder))) for holder in holders]
        # MixedPrecision has a torch.amp.GradScaler, and the search changes a copy of it.
        if getattr(precision, "scaler", None) is not None:
            precision.scaler = copy.deepcopy(precision.scaler)
        # _BaseProgress is private in lightning 2.5.0 to 2.6.6.
        base_progress = lightning_name(trainer, "loops.progress._BaseProgress")
        for one in loops:
            for name, value in list(vars(one).items()):
                if isinstance(value, base_progress):
                    setattr(one, name, copy.deepcopy(value))
                # A prediction loop has None as its results.
                elif name == "_results" and value is not None:
                    vars(one)[name] = type(value)(training=value.training)
        for name, value in list(vars(trainer._logger_connector).items()):
            if isinstance(value, dict):
                setattr(trainer._logger_connector, name, dict(value))
        known = [
            *schedulers,
            *(config.scheduler for config in trainer.strategy.lr_scheduler_configs),
        ]
        self._kept += [(one, dict(vars(one))) for one in {id(one): one for one in known}.values()]
        # A scheduler that was made for the old batch size may end before the search does.
        for scheduler in known:
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
    # mypy does not see attributes that Lightning sets outside the class Trainer.
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def saves_checkpoints(callbacks: Iterable[Callback]) -> bool:
    return any(
        isinstance(callback, in_every_package("callbacks.Checkpoint")) for callback in callbacks
    )


def weight_average_bytes(trainer: Trainer) -> int:
    """Bytes that StochasticWeightAveraging will take on the trainer's device.

    Until then its copy of the weights is on the CPU.
    """
    kinds = in_every_package("callbacks.StochasticWeightAveraging")
    device = trainer.strategy.root_device
    averages: list[Any] = [
        callback for callback in callbacks_of(trainer) if isinstance(callback, kinds)
    ]
    # _device is private in lightning 2.5.0 to 2.6.6. None stands for the device of the module.
    moves = any(
        callback._device is None or callback._device.type == device.type for callback in averages
    )
    return bytes_of(trainer.lightning_module.parameters()) if moves else 0


def datamodules_of(trainer: Trainer) -> list[LightningDataModule]:
    # mypy does not see attributes that Lightning sets outside the class Trainer.
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    return [] if datamodule is None else [datamodule]


def logging_step(trainer: Trainer) -> int:
    """The step under which Lightning logs.

    ``trainer.global_step`` is another number: it counts every optimizer of a manual step.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def logs_now(trainer: Trainer) -> bool:
    """Whether values of ``self.log`` reach the loggers after the current batch.

    The rule is that of Lightning's ``_LoggerConnector``.
    """
    # mypy does not see attributes that Lightning sets outside the class Trainer.
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    epoch_loop = trainer.fit_loop.epoch_loop
    if every == 0 or ((epoch_loop._batches_that_stepped + 1) % every and not trainer.should_stop):
        return False
    return not (epoch_loop._should_accumulate() and trainer.lightning_module.automatic_optimization)


def logs_at_all(trainer: Trainer) -> bool:
    """Whether ``log_every_n_steps`` lets any value reach the loggers."""
    # mypy does not see attributes that Lightning sets outside the class Trainer.
    return bool(trainer.log_every_n_steps)  # type: ignore[attr-defined]


def is_fast_dev_run(trainer: Trainer) -> bool:
    # mypy does not see attributes that Lightning sets outside the class Trainer.
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
