"""The plan in a checkpoint, with which a resumed training continues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.reuse import changes_since


@dataclass(frozen=True)
class CheckpointPlan:
    """The plan in the state of a BatchFinder.

    Args:
        state: the state, from the checkpoint.
        device: the name of the device now.
        limit_bytes: the limit now, of the rank with the least.
    """

    state: dict[str, Any]
    device: str
    limit_bytes: int

    def changes_of_device(self) -> list[str]:
        """How device and limit differ from those of the plan."""
        return self._changes({}, {})

    def continued(self, trainer: Trainer, options: SearchOptions) -> Plan:
        """The plan for the ranks of this Trainer; a warning has all changes."""
        plan = self._plan
        ranks = trainer.world_size
        # Version 0.1.0 stored the options as "wishes", and no ranks.
        old_ranks = self.state["plan"].get("ranks", ranks)
        old_options = self.state.get("options", self.state.get("wishes", {}))
        changes = self._changes(
            {**old_options, "ranks": old_ranks}, {**options.as_json(), "ranks": ranks}
        )
        accumulate = plan.accumulate_grad_batches
        if options.target_batch_size is None:
            accumulate = trainer.accumulate_grad_batches
        elif ranks != old_ranks:
            # An optimizer step has as nearly the target as whole batches allow.
            accumulate = max(1, round(options.target_batch_size / (plan.batch_size * ranks)))
        if (accumulate, ranks) != (plan.accumulate_grad_batches, old_ranks):
            plan = replace(
                plan,
                accumulate_grad_batches=accumulate,
                effective_batch_size=plan.batch_size * accumulate * ranks,
                ranks=ranks,
            )
        text = f"BatchFinder continues with batch size {plan.batch_size} of the checkpoint"
        if changes:
            rank_zero_warn(
                f"{text}, although {', and '.join(changes)}. search_on_resume=True searches again."
            )
        else:
            rank_zero_info(text)
        return plan

    @property
    def _plan(self) -> Plan:
        return Plan.from_json(json.dumps(self.state["plan"]))

    def _changes(
        self, old_conditions: Mapping[str, Any], conditions: Mapping[str, Any]
    ) -> list[str]:
        return changes_since(
            self._plan,
            old_conditions,
            conditions,
            device=self.device,
            limit_bytes=self.limit_bytes,
        )
