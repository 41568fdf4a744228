"""OomGuard: a batch that does not fit runs in parts."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.guard.guarded_steps import (
    GuardedSteps,
    Reduction,
    why_not_guarded,
)
from lightning_batchmem._lightning.trainer_state import callbacks_of
from lightning_batchmem.plan.plan import Plan

# So many batches may lie between two that ran in parts, if a smaller batch size is to be advised.
_NEAR_BATCHES = 100


class OomGuard(Callback):
    """Lets a training continue where a batch runs out of memory.

    If forward or backward of a batch raises an out-of-memory error, what the step held is released,
    and the batch is split along its first dimension into 2 parts, or 4, 8 and so on until they fit.
    Each part runs forward and backward with its share of the loss, then the optimizer steps once:
    gradients, ``self.log``, clipping, accumulation, schedulers and progress are those of one step.
    Later batches of at least as many bytes run in as many parts at once.

    A step without an error runs unchanged. See docs/oom-guard.md for what a step in parts cannot
    reproduce (BatchNorm, losses over pairs of samples), and for DDP.

    It does nothing, with a warning when training starts, under manual optimization, with LBFGS, and
    where every step needs all ranks (FSDP, DeepSpeed, SyncBatchNorm).

    Args:
        reduction: what ``training_step`` returns: ``"mean"``, the mean over the samples of the
            batch, or ``"sum"``, their sum.
        max_parts: the most parts of a batch; if it does not fit in so many, the error is raised.

    Attributes:
        oom_splits: batches of this ``fit`` so far that ran in parts on this rank; ``None`` where
            the guard does nothing. A MemoryProfiler in the same Trainer has them in its CSV file
            and its summary.

    Raises:
        ValueError: if ``reduction`` or ``max_parts`` is invalid.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_batchmem import OomGuard
        >>> guard = OomGuard()
        >>> trainer = Trainer(callbacks=[guard], logger=False, enable_checkpointing=False)
    """

    def __init__(self, *, reduction: Reduction = "mean", max_parts: int = 16) -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r:.80}')
        is_whole = isinstance(max_parts, int) and not isinstance(max_parts, bool)
        if not is_whole or max_parts < 2:
            raise ValueError(f"max_parts must be a whole number from 2, got {max_parts!r:.80}")
        self.oom_splits: int | None = None
        self._reduction: Reduction = reduction
        self._max_parts = max_parts
        self._steps: GuardedSteps | None = None
        # The number of the last batch that ran in parts.
        self._last_batch: int | None = None
        self._has_advised = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the counts of an earlier run."""
        self.oom_splits = None
        self._last_batch = None
        self._has_advised = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Guard the steps from now on, or warn that this is not possible."""
        reason = why_not_guarded(trainer)
        if reason is not None:
            rank_zero_warn(f"OomGuard does nothing {reason}.")
            return
        self._steps = GuardedSteps(
            trainer, self, self._reduction, self._max_parts, self._note_split
        )
        if self._steps.has_batch_norm:
            rank_zero_warn(
                "OomGuard: BatchNorm normalizes each part of a batch by itself, so a step in parts"
                " is not the same as the whole step. LayerNorm and GroupNorm have no such limit."
            )
        self._steps.attach()
        self.oom_splits = 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the steps to Lightning again."""
        if self._steps is not None:
            self._steps.detach()
            self._steps = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the steps to Lightning when a run ends early."""
        self.on_train_end(trainer, pl_module)

    def _note_split(self, trainer: Trainer, samples: int, num_parts: int) -> None:
        """Count a batch that ran in parts, and warn of the first one and of frequent ones."""
        batch = trainer.fit_loop.total_batch_idx
        rank = f" on rank {trainer.global_rank}" if trainer.world_size > 1 else ""
        self.oom_splits = (self.oom_splits or 0) + 1
        if self.oom_splits == 1:
            # One rank may run out of memory alone, so each of them may warn.
            warnings.warn(
                f"OomGuard: memory ran out in training batch {batch}{rank}, whose {samples:,}"
                f" samples then ran in {num_parts} parts. A loss over pairs of samples lacks the"
                " pairs between two parts.",
                stacklevel=2,
            )
        is_frequent = self._last_batch is not None and batch - self._last_batch < _NEAR_BATCHES
        self._last_batch = batch
        if is_frequent and not self._has_advised:
            self._has_advised = True
            warnings.warn(
                f"OomGuard: {self.oom_splits} training batches{rank} ran in parts, which takes"
                f" longer than a batch size that fits. {_advice(trainer)}",
                stacklevel=2,
            )


def _advice(trainer: Trainer) -> str:
    plans: list[Any] = [vars(callback).get("plan") for callback in callbacks_of(trainer)]
    if any(isinstance(plan, Plan) for plan in plans):
        return "Lower memory_limit of BatchFinder."
    return "Lower the batch size, or let BatchFinder compute it."
