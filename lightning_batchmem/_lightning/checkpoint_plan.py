"""The plan in a checkpoint, with which a resumed training continues."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_batchmem._lightning.apply import settings_in_batches
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.search.earlier_plan import changes_since


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
        plan = self.plan
        settings = plan.recipe.trainer_settings
        batch_size = plan.batch_size
        ranks = trainer.world_size
        accumulate = trainer.accumulate_grad_batches
        before = plan.project_recipe or plan.recipe
        has_changed = plan.accumulate_grad_batches != before.accumulate_grad_batches
        is_kept = has_changed and target_batch_size is None
        if target_batch_size is not None or has_changed:
            # An optimizer step has as nearly the same samples as whole batches allow.
            accumulate = max(1, round(plan.accumulate_grad_batches * plan.ranks / ranks))
        ratio = Fraction(accumulate, before.batches_of_step) if is_kept else Fraction(1)
        text = f"BatchFinder continues with batch size {batch_size} of the checkpoint"
        if self.changes:
            rank_zero_warn(
                f"{text}, although {', and '.join(self.changes)}. search_on_resume=True searches"
                " again."
            )
        else:
            rank_zero_info(text)
        recipe = replace(
            plan.recipe,
            batch_size=batch_size,
            accumulate_grad_batches=accumulate,
            ranks=ranks,
            effective_batch_size=batch_size * accumulate * ranks,
            # The Trainer may have other limits than that of the checkpoint.
            trainer_settings=settings_in_batches(
                trainer,
                ratio,
                # The length of an epoch is not known, but it has at least as many batches.
                max(
                    settings.get("val_check_interval", 0),
                    int((getattr(trainer, "val_check_interval", 0) - 1) * ratio) + 1,
                ),
                follows_validation="limit_val_batches" in settings,
            ),
        )
        return replace(plan, recipe=recipe)


def plan_to_continue(
    state: dict[str, Any], devices_and_limits: Sequence[tuple[str, int]], *, may_search_again: bool
) -> CheckpointPlan | None:
    """The plan of a checkpoint; ``None`` if it belongs to another device and may be replaced.

    Args:
        state: the state of a BatchFinder.
        devices_and_limits: the device of each rank, and its limit in bytes.
        may_search_again: whether another device or limit is a reason for a new search.

    Raises:
        ValueError: if the plan is damaged.
    """
    try:
        plan = Plan.from_json(json.dumps(state["plan"]))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the plan of BatchFinder in the checkpoint cannot be read ({error})."
            " search_on_resume=True searches again."
        ) from error
    # One rank may differ, and the limit in a plan is that of the rank with the least.
    devices, limits_bytes = zip(*devices_and_limits, strict=True)
    limit_bytes = min(limits_bytes)
    changes = changes_since(plan, devices[0], limit_bytes)
    if may_search_again and changes:
        rank_zero_info(f"BatchFinder searches again: {', and '.join(changes)}")
        return None
    return CheckpointPlan(plan, limit_bytes, changes)
