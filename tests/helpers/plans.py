"""Plans with other fields."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import Trial


def plan_with(plan: Plan, **changes: Any) -> Plan:
    """The plan with other fields, of itself or of one of its parts."""
    changes = {"is_verified" if name == "verified" else name: v for name, v in changes.items()}
    own = {field.name for field in fields(plan)}
    parts = {
        part: replace(
            getattr(plan, part),
            **{
                field.name: changes.pop(field.name)
                for field in fields(getattr(plan, part))
                if field.name in changes and field.name not in own
            },
        )
        for part in ("chosen", "recipe")
        if part not in changes
    }
    return replace(plan, **parts, **changes)


def training_notes(plan: Plan) -> tuple[str, ...]:
    """The notes about what a size changes in the training."""
    return tuple(note.text for note in plan.notes if note.kind == "training")


def trial_with(trial: Trial, **changes: Any) -> Trial:
    """The trial with other fields of its memory."""
    return replace(trial, memory=replace(trial.memory, **changes))


def search_notes(plan: Plan) -> tuple[str, ...]:
    """All other notes."""
    return tuple(note.text for note in plan.notes if note.kind != "training")
