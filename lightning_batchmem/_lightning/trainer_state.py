"""What a Trainer is doing, has and logs.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer

from lightning_batchmem._lightning.packages import in_every_package
from lightning_batchmem.devices.tensors import bytes_of


def callbacks_of(trainer: Trainer) -> list[Callback]:
    # mypy does not see attributes that Lightning sets outside the class Trainer.
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def weight_average_bytes(trainer: Trainer) -> int:
    """Bytes that StochasticWeightAveraging will take on the trainer's device.

    Until then its copy of the weights is on the CPU.
    """
    kinds = in_every_package("callbacks.StochasticWeightAveraging")
    device = trainer.strategy.root_device
    # _device is private in lightning 2.5.0 to 2.6.6. None stands for the device of the module.
    moves = any(
        torch.device(callback._device or device).type == device.type
        for callback in callbacks_of(trainer)
        if isinstance(callback, kinds)
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


def logs_now(trainer: Trainer, step: int) -> bool:
    """Whether values of ``self.log`` reach the loggers after the current batch.

    The step is that of :func:`logging_step`.

    The rule is that of ``update_train_step_metrics`` and ``should_update_logs`` in Lightning's
    ``_LoggerConnector``. It is written out because it is needed in every step.
    """
    # mypy does not see attributes that Lightning sets outside the class Trainer.
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if not interval or ((step + 1) % interval and not trainer.should_stop):
        return False
    is_manual = not trainer.lightning_module.automatic_optimization
    return is_manual or not trainer.fit_loop._should_accumulate()


def logs_at_all(trainer: Trainer) -> bool:
    """Whether ``log_every_n_steps`` lets any value reach the loggers."""
    # mypy does not see attributes that Lightning sets outside the class Trainer.
    return bool(trainer.log_every_n_steps)  # type: ignore[attr-defined]


def is_fast_dev_run(trainer: Trainer) -> bool:
    # mypy does not see attributes that Lightning sets outside the class Trainer.
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
