"""The seam in Lightning's automatic optimization: closures that can run their batch in parts.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Callback, Trainer
from torch.nn import SyncBatchNorm

# _BatchNorm is private in torch 2.5 to 2.14.
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import LBFGS, Optimizer
from torchmetrics import Metric

from lightning_batchmem._lightning.guard.guarded_closure import GuardedClosure
from lightning_batchmem._lightning.strategies import steps_may_differ
from lightning_batchmem._lightning.trainer_state import callbacks_of
from lightning_batchmem.batches.split import splittable_samples
from lightning_batchmem.devices.tensors import bytes_of, tensors_in

Reduction = Literal["mean", "sum"]


def why_not_guarded(trainer: Trainer) -> str | None:
    """Why the steps of this training cannot run in parts; None if they can."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return "under manual optimization, where training_step itself steps the optimizers"
    if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        return "with LBFGS, which runs each batch several times in one step"
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        return "for a training_step that takes dataloader_iter, because it fetches its batches"
    # The place of an error is found by the code of the functions in its traceback.
    if not hasattr(module.training_step, "__code__"):
        return "for a training_step that is no plain function or method"
    if not steps_may_differ(trainer):
        norm = any(isinstance(part, SyncBatchNorm) for part in module.modules())
        name = "SyncBatchNorm" if norm else type(trainer.strategy).__name__
        return f"with {name}, because each step needs all ranks"
    # Only a wrapper of DDP has this attribute.
    if getattr(trainer.strategy.model, "static_graph", False):
        return "with static_graph of DDP, whose first step cannot run in parts"
    return None


class GuardedSteps:
    """The training steps of a run, whose batches can run in parts.

    Args:
        trainer: the Trainer, in ``on_train_start``.
        owner: the callback that guards. A search removes it from the trainer or replaces it by a
            copy that does nothing, and has to see the errors itself.
        reduction: whether the loss is the mean over the samples, or their sum.
        max_parts: the most parts of a batch.
        on_split: called with the Trainer, the samples and the number of parts after each step in
            parts.
    """

    def __init__(
        self,
        trainer: Trainer,
        owner: Callback,
        reduction: Reduction,
        max_parts: int,
        on_split: Callable[[Trainer, int, int], None],
    ) -> None:
        self.trainer = trainer
        self.reduction = reduction
        self.on_split = on_split
        epoch_loop = trainer.fit_loop.epoch_loop
        self.loop = epoch_loop.automatic_optimization
        self.results = epoch_loop._results
        modules = list(trainer.lightning_module.modules())
        self.metrics = [module for module in modules if isinstance(module, Metric)]
        self.has_batch_norm = any(
            isinstance(module, _BatchNorm) and module.training for module in modules
        )
        self._owner = owner
        self._max_parts = max_parts
        # The bytes of batches that did not fit, and the parts in which they did.
        self._known: list[tuple[int, int]] = []

    def attach(self) -> None:
        """Guard each step from now on."""
        vars(self.loop)["_make_closure"] = self._make_closure

    def detach(self) -> None:
        """Leave the steps to Lightning again."""
        vars(self.loop).pop("_make_closure", None)

    def most_parts(self, samples: int) -> int:
        """The most parts of a batch; BatchNorm cannot compute the variance of one sample."""
        return min(self._max_parts, max(1, samples // 2) if self.has_batch_norm else samples)

    def known_parts(self, batch: object) -> int:
        """The parts in which no smaller batch fitted; 1 if all of them fitted."""
        if not self._known:
            return 1
        batch_bytes = bytes_of(tensors_in(batch))
        return max((parts for size, parts in self._known if size <= batch_bytes), default=1)

    def note_parts(self, batch: object, num_parts: int) -> None:
        """Run batches of at least this size in as many parts from now on."""
        if num_parts > self.known_parts(batch):
            self._known.append((bytes_of(tensors_in(batch)), num_parts))
        self.on_split(self.trainer, splittable_samples(batch) or 0, num_parts)

    def _make_closure(
        self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int
    ) -> Any:
        closure = type(self.loop)._make_closure(self.loop, kwargs, optimizer, batch_idx)
        if not any(callback is self._owner for callback in callbacks_of(self.trainer)):
            return closure
        return GuardedClosure(self, closure, kwargs, optimizer, batch_idx)
