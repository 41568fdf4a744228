"""The state of a training in which trials run: the one that needs most memory, or the first one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.trainer_state import (
    call_module_hook,
    callbacks_of,
    in_every_package,
    replaced,
)
from lightning_batchmem.devices.foreign_values import error_text, value_or_none
from lightning_batchmem.plan.options import object_named

Later = Callable[[Trainer, LightningModule], object]
"""A function of the user that makes a later state of the training."""

MOST_EPOCHS = 1000
"""The most epochs for which finetuning callbacks are called."""


class TrainingState:
    """The state of the training in which trials run.

    Finetuning callbacks unfreeze layers in later epochs, and a function of the user may make any
    other state that a training reaches. Both change what the snapshot of the search restores.

    Args:
        trainer: the trainer, whose other callbacks are muted while the state is entered.
        later: the function of the user; ``None`` for none.
        is_first: whether this is the state in which the training starts.

    Attributes:
        frozen_text: a sentence about parameters that may be unfrozen in a way that the search does
            not know; empty without them.
    """

    def __init__(self, trainer: Trainer, later: Later | None, *, is_first: bool = False) -> None:
        self._trainer = trainer
        self._later = later
        self._is_first = is_first
        self._unfreezing = Unfreezing(trainer)
        self.frozen_text = ""

    @property
    def is_later(self) -> bool:
        """Whether this is not the state in which the training starts; known once entered."""
        return not self._is_first and (self._later is not None or self._unfreezing.is_later)

    @property
    def text(self) -> str:
        """What the state is, for the plan; empty for the one in which the training starts."""
        texts = []
        if self._unfreezing.is_later:
            names = self._unfreezing.names
            verb = "unfreezes" if len(names) == 1 else "unfreeze"
            texts.append(f"with the layers that {' and '.join(names)} {verb}")
        if self._later is not None:
            texts.append("in the state that later= makes")
        return " and ".join(texts)

    def prepare(self) -> None:
        """Make the later state of the user: before loaders are requested, and before each trial."""
        if self._later is not None and not self._is_first:
            self._later(self._trainer, self._trainer.lightning_module)

    def begin_epoch(self) -> None:
        """Call the hook of the module at the begin of another epoch of a trial.

        It would undo what the function of the user has made, so it is not called after that.
        """
        if self._later is None or self._is_first:
            call_module_hook(self._trainer, "on_train_epoch_start")

    def unfreeze(self, epochs: float) -> None:
        """Unfreeze what callbacks unfreeze, once the optimizers exist.

        Args:
            epochs: the training has at most this many; ``inf`` if their number is unknown.
        """
        trainer = self._trainer
        kinds = in_every_package("callbacks.BaseFinetuning")
        callbacks = [one for one in callbacks_of(trainer) if isinstance(one, kinds)]
        if self._is_first:
            self._unfreezing.run(callbacks, trainer.current_epoch)
        else:
            self._unfreezing.run_to_most_trained(callbacks, epochs)
        if not callbacks and self._later is None:
            self.frozen_text = value_or_none("The optimizers", frozen_text, trainer) or ""


class Unfreezing:
    """What finetuning callbacks unfreeze, as the epochs of a training would.

    Args:
        trainer: the trainer.

    Attributes:
        is_later: whether more is trained in a later epoch than in the first one.
        names: the classes of the callbacks that unfreeze.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.is_later = False
        self.names: list[str] = []
        self._trainer = trainer
        # The first epoch in which most bytes are trained; None until it is known.
        self._most_trained: int | None = None
        # The epoch in which the callback at a position has failed. What it did before stays.
        self._failed: dict[int, int] = {}

    def run(self, callbacks: Sequence[Any], last_epoch: int) -> None:
        """Let the callbacks unfreeze for all epochs up to this one."""
        for epoch in range(last_epoch + 1):
            for position, callback in enumerate(callbacks):
                self._call(position, callback, epoch)

    def run_to_most_trained(self, callbacks: Sequence[Any], epochs: float) -> None:
        """Let them unfreeze up to the epoch in which most bytes are trained.

        The first call finds this epoch, and may end in the state of a later one.

        Args:
            callbacks: the callbacks.
            epochs: epochs of the training, at most.
        """
        if self._most_trained is not None:
            self.run(callbacks, self._most_trained)
            return
        trainer = self._trainer
        self._most_trained = trainer.current_epoch
        self.run(callbacks, self._most_trained)
        trained_bytes = _trained_bytes(trainer)
        most_bytes = trained_bytes
        num_epochs = int(min(epochs, MOST_EPOCHS)) if callbacks else 0
        for epoch in range(self._most_trained + 1, num_epochs):
            for position, callback in enumerate(callbacks):
                before_bytes = trained_bytes
                self._call(position, callback, epoch)
                trained_bytes = _trained_bytes(trainer)
                name = type(callback).__name__
                if trained_bytes > before_bytes and name not in self.names:
                    self.names.append(name)
            if trained_bytes > most_bytes:
                most_bytes = trained_bytes
                self._most_trained = epoch
                self.is_later = True

    def _call(self, position: int, callback: Any, epoch: int) -> None:
        """Call a callback as Lightning does at the begin of an epoch, with self.log too."""
        if epoch > self._failed.get(position, epoch):
            return
        trainer = self._trainer
        module = trainer.lightning_module
        # It logs the learning rate of each epoch, and a warning of the training comes then.
        callback.verbose = False
        try:
            with (
                warnings.catch_warnings(action="ignore"),
                replaced(module, _current_fx_name="on_train_epoch_start"),
            ):
                for optimizer in trainer.optimizers:
                    callback.finetune_function(module, epoch, optimizer)
        # It may need what only the training has, such as metrics of the epochs before.
        except Exception as error:  # noqa: BLE001
            if position not in self._failed:
                self._failed[position] = epoch
                rank_zero_warn(
                    f"BatchFinder cannot unfreeze layers as {type(callback).__name__} will do in"
                    f" epoch {epoch} ({error_text(error)}), so the size may not fit from then on."
                    " Pass later=."
                )


def later_function(later: object) -> Later | None:
    """The function that the argument ``later`` is or names.

    Raises:
        ValueError: for another value, or a wrong name.
    """
    if later is None:
        return None
    named = later
    if isinstance(later, str):
        try:
            named = object_named(later)
        except ValueError as error:
            raise ValueError(f"later must name a function: {error}") from error
    if not callable(named):
        raise ValueError(
            f"later must be a function of the trainer and the module, got {later!r:.80}"
        )
    function: Later = named
    return function


def most_epochs(trainer: Trainer, fewest_batches: float) -> float:
    """The most epochs that a training may have; ``inf`` if their number is unknown.

    Args:
        trainer: the trainer.
        fewest_batches: batches of an epoch at the largest size.
    """
    epochs = math.inf
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        epochs = trainer.max_epochs
    if trainer.max_steps > 0 and 1 <= fewest_batches < math.inf:
        batches = trainer.max_steps * trainer.accumulate_grad_batches
        epochs = min(epochs, trainer.current_epoch + math.ceil(batches / fewest_batches))
    return epochs


def _trained_bytes(trainer: Trainer) -> int:
    """Bytes of the parameters that get gradients."""
    parameters = trainer.lightning_module.parameters()
    return sum(one.numel() * one.element_size() for one in parameters if one.requires_grad)


def frozen_text(trainer: Trainer) -> str:
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
