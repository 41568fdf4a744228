"""OomGuard: a batch that does not fit runs in parts."""

from __future__ import annotations

import warnings

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.guarded_steps import GuardedSteps, Reduction
from lightning_batchmem._lightning.parts_check import why_not_in_parts


class OomGuard(Callback):
    """Lets a training continue where a batch runs out of memory.

    If forward or backward of a batch raises an out-of-memory error, what the step took is released,
    and the batch is split along its first dimension into 2 parts, or 4, 8 and so on until they fit.
    Each part runs forward and backward with its share of the loss, then the optimizer steps once.
    The gradients and the logged values are those of the whole batch up to rounding, if the loss and
    the values are means (or sums) over samples. A step without an error runs unchanged.

    Where parts could not equal the whole step, it does nothing, with a warning that has the reason:
    for example with BatchNorm, hooks on gradients, metrics that ``training_step`` updates, manual
    optimization, or several ranks. See "When memory is short" in the documentation for the
    whole list, and for what it cannot see.

    Args:
        reduction: what ``training_step`` returns: ``"mean"``, the mean over the samples of the
            batch, or ``"sum"``, their sum.

    Attributes:
        oom_splits: batches of this ``fit`` so far that ran in parts; ``None`` where the guard does
            nothing.

    Raises:
        ValueError: if ``reduction`` is invalid.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_batchmem import OomGuard
        >>> guard = OomGuard()
        >>> trainer = Trainer(callbacks=[guard], logger=False, enable_checkpointing=False)
    """

    def __init__(self, *, reduction: Reduction = "mean") -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r:.80}')
        self.oom_splits: int | None = None
        self._reduction: Reduction = reduction
        self._steps: GuardedSteps | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Guard the steps from now on, or warn that this is not possible."""
        reason = why_not_in_parts(trainer)
        if reason is not None:
            self._do_nothing(reason)
            return
        self.oom_splits = 0
        self._steps = GuardedSteps(
            trainer, self, self._reduction, on_split=self._count, on_refusal=self._do_nothing
        )
        self._steps.attach()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the steps to Lightning again."""
        self._detach()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the steps to Lightning when a run ends early."""
        self._detach()

    def _detach(self) -> None:
        if self._steps is not None:
            self._steps.detach()
            self._steps = None

    def _do_nothing(self, reason: str) -> None:
        self._detach()
        self.oom_splits = None
        rank_zero_warn(
            f"OomGuard does nothing, because {reason}; use a batch size that always fits."
        )

    def _count(self, batch_number: int, samples: int, num_parts: int) -> None:
        self.oom_splits = (self.oom_splits or 0) + 1
        if self.oom_splits == 1:
            warnings.warn(
                f"OomGuard: memory ran out in training batch {batch_number}, whose {samples:,}"
                f" samples then ran in {num_parts} parts. Use a smaller batch size if this happens"
                " often, because parts take longer.",
                stacklevel=2,
            )
