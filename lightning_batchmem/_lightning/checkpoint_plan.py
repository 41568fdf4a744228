"""The plan in a checkpoint, with which a resumed training continues."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_batchmem.plan.plan import Plan


@dataclass(frozen=True)
class CheckpointPlan:
    """The plan in the state of a BatchFinder.

    Args:
        plan: the plan.
        limit_bytes: the limit now, of the rank with the least.
        changes: how device and limit differ from those of the plan.
    """

    plan: Plan
    limit_bytes: int
    changes: list[str]

    def continued(self, trainer: Trainer, target_batch_size: int | None) -> Plan:
        """The plan for the ranks of this Trainer; a warning has all changes."""
        batch_size = self.plan.batch_size
        ranks = trainer.world_size
        accumulate = self.plan.accumulate_grad_batches
        if target_batch_size is None:
            accumulate = trainer.accumulate_grad_batches
        elif ranks != self.plan.ranks:
            # An optimizer step has as nearly the target as whole batches allow.
            accumulate = max(1, round(target_batch_size / (batch_size * ranks)))
        text = f"BatchFinder continues with batch size {batch_size} of the checkpoint"
        if self.changes:
            rank_zero_warn(
                f"{text}, although {', and '.join(self.changes)}. search_on_resume=True searches"
                " again."
            )
        else:
            rank_zero_info(text)
        return replace(
            self.plan,
            accumulate_grad_batches=accumulate,
            effective_batch_size=batch_size * accumulate * ranks,
            ranks=ranks,
        )
