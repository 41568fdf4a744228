"""The state of a training in which trials run: the one that needs most memory, or the first one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.packages import in_every_package
from lightning_batchmem._lightning.trainer_state import callbacks_of
from lightning_batchmem.devices.foreign_values import add_note, error_text, value_or_none
from lightning_batchmem.devices.tensors import bytes_of
from lightning_batchmem.plan.options import object_named

Later = Callable[[Trainer, LightningModule], object]
"""A function of the user that makes a later state of the training."""

MOST_EPOCHS = 1000
"""Epochs for which finetuning callbacks are asked where ``max_epochs`` has no number."""


class TrainingState:
    """The state of the training in which trials run.

    Finetuning callbacks unfreeze layers in later epochs, and a function of the user may make any
    other state that a training reaches. Both change what the snapshot of the search restores.

    Args:
        trainer: the trainer, whose other callbacks are muted copies while the state is entered.
        later: the function of the user; ``None`` for none.
        is_first: whether this is the state in which the training starts.
    """

    def __init__(self, trainer: Trainer, later: Later | None, *, is_first: bool = False) -> None:
        self._trainer = trainer
        self._later = None if is_first else later
        # The epoch in which most bytes are trained; None until it is known.
        self._epoch: int | None = trainer.current_epoch if is_first else None
        # The bytes of what is trained in the first epoch, and in that one.
        self._first_bytes = 0
        self._most_bytes = 0
        # The names of the callbacks that unfreeze.
        self._names: list[str] = []
        # The names of those that cannot be asked before the training.
        self._failed: set[str] = set()
        self._frozen_note = ""

    @property
    def is_later(self) -> bool:
        """Whether this is not the state in which the training starts; known once entered."""
        return self._later is not None or self._most_bytes > self._first_bytes

    @property
    def text(self) -> str:
        """What the state is, for the plan; empty for the one in which the training starts."""
        texts = []
        if self._most_bytes > self._first_bytes:
            verb = "unfreezes" if len(self._names) == 1 else "unfreeze"
            texts.append(f"with the layers that {' and '.join(self._names)} {verb}")
        if self._later is not None:
            texts.append("in the state that later= makes")
        return " and ".join(texts)

    @property
    def notes(self) -> tuple[str, ...]:
        """A note about parameters that may be unfrozen in a way that the search does not know."""
        return (self._frozen_note,) if self._frozen_note else ()

    def prepare(self) -> None:
        """Make the later state of the user before loaders are requested and samples are read."""
        if self._later is not None:
            try:
                self._later(self._trainer, self._trainer.lightning_module)
            except Exception as error:
                add_note(error, "BatchFinder called the function that later= names.")
                raise

    def enter(self) -> None:
        """Make the state before the first step, once the optimizers exist."""
        kinds = in_every_package("callbacks.BaseFinetuning")
        callbacks = [one for one in callbacks_of(self._trainer) if isinstance(one, kinds)]
        if self._epoch is None:
            self._epoch = self._hungriest_epoch(callbacks)
        else:
            for epoch in range(self._epoch + 1):
                self._unfreeze(callbacks, epoch)
        self.prepare()
        if not callbacks and self._later is None:
            self._frozen_note = value_or_none("The optimizers", frozen_note, self._trainer) or ""

    def _hungriest_epoch(self, callbacks: list[Any]) -> int:
        """Unfreeze for all epochs, and return the first one in which most bytes are trained."""
        trainer = self._trainer
        first_epoch = trainer.current_epoch
        last_epoch = trainer.max_epochs or 0
        if last_epoch <= 0:
            last_epoch = MOST_EPOCHS
        hungriest = first_epoch
        for epoch in range(last_epoch if callbacks else 0):
            self._unfreeze(callbacks, epoch)
            trained_bytes = _trained_bytes(trainer)
            if epoch <= first_epoch:
                self._first_bytes = self._most_bytes = trained_bytes
            elif trained_bytes > self._most_bytes:
                self._most_bytes = trained_bytes
                hungriest = epoch
        return hungriest

    def _unfreeze(self, callbacks: list[Any], epoch: int) -> None:
        """Let the callbacks unfreeze what they unfreeze in this epoch."""
        trainer = self._trainer
        for callback in callbacks:
            name = type(callback).__name__
            if name in self._failed:
                continue
            before_bytes = _trained_bytes(trainer)
            # It logs the learning rate of each epoch, and a warning of the training comes then.
            callback.verbose = False
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    for optimizer in trainer.optimizers:
                        callback.finetune_function(trainer.lightning_module, epoch, optimizer)
            # It may need what only the training has, such as metrics of the epochs before.
            except Exception as error:  # noqa: BLE001
                self._failed.add(name)
                rank_zero_warn(
                    f"BatchFinder cannot unfreeze layers as {name} will do in epoch {epoch}"
                    f" ({error_text(error)}), so the size may not hold from then on. Pass later=."
                )
            if _trained_bytes(trainer) > before_bytes and name not in self._names:
                self._names.append(name)


def later_function(later: object) -> Later | None:
    """The function that the argument ``later`` is or names.

    Raises:
        ValueError: for another value, or a wrong name.
    """
    if later is None:
        return None
    named = object_named(later) if isinstance(later, str) else later
    if not callable(named):
        raise ValueError(
            f"later must be a function of the trainer and the module, got {later!r:.80}"
        )
    function: Later = named
    return function


def _trained_bytes(trainer: Trainer) -> int:
    """Bytes of the parameters that get gradients."""
    parameters = trainer.lightning_module.parameters()
    return bytes_of(parameter for parameter in parameters if parameter.requires_grad)


def frozen_note(trainer: Trainer) -> str:
    """A note about frozen parameters that an optimizer has; empty where there are none.

    The frozen parameters of LoRA are in no optimizer, and stay frozen.
    """
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    parameters = list(trainer.lightning_module.parameters())
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    if not any(id(parameter) in held for parameter in frozen):
        return ""
    return (
        f"{sum(one.numel() for one in frozen):,} of {sum(one.numel() for one in parameters):,}"
        " parameters are frozen. If they are unfrozen later, pass later=."
    )
