"""Calls at the start of a run, and the callback of a search.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# _optimizers_to_device is private in lightning 2.5.0 to 2.6.6.
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.devices.peaks import PhasePeaks
from lightning_batchmem.devices.tensors import bytes_of, tensors_in


def call_before(owner: Any, method: str, call: Callable[[], None]) -> Callable[[], object]:
    """Run ``call`` once before the next ``owner.method()``; returns a function that cancels it."""
    original = getattr(owner, method)
    own = vars(owner)
    # The project may have replaced the method of the class already.
    before = {method: own[method]} if method in own else {}
    # It is empty after the first call.
    calls = [call]

    def cancel() -> None:
        # Another wrapper around this one may call it again.
        calls.clear()
        if own.get(method) is calling:
            del own[method]
            own.update(before)

    def calling(*arguments: Any) -> None:
        due = calls.copy()
        cancel()
        for one in due:
            one()
        original(*arguments)

    own[method] = calling
    return cancel


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give ``owner`` other attributes for a while; methods of its class are replaced too."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


def configure_optimizers_again(trainer: Trainer) -> None:
    """Make new optimizers and schedulers, as ``Strategy.setup`` does."""
    strategy = trainer.strategy
    strategy.setup_optimizers(trainer)
    strategy.setup_precision_plugin()
    _optimizers_to_device(strategy.optimizers, strategy.root_device)


class SearchCallback(Callback):
    """Marks the phases of a step and measures its batch.

    It is the only callback whose hooks a search calls.

    Args:
        phases: where the phases of each step are marked.

    Attributes:
        largest_batch_bytes: bytes of the largest training batch so far, as the module gets it.
        losses: the losses that were kept, as Lightning divides them under accumulation.
    """

    def __init__(self, phases: PhasePeaks) -> None:
        self._phases = phases
        self.largest_batch_bytes = 0
        self.losses: list[Tensor] | None = None

    def keep_losses(self) -> None:
        """Keep each further loss, which takes memory of a step."""
        self.losses = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure the batch after the hooks of its transfer."""
        batch_bytes = value_or_none("The size of a batch", lambda: bytes_of(tensors_in(batch)))
        self.largest_batch_bytes = max(self.largest_batch_bytes, batch_bytes or 0)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """End forward."""
        if self.losses is not None:
            self.losses.append(loss.detach())
        self._phases.enter("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End backward; clipping and the optimizer follow."""
        self._phases.enter("optimizer_step")
