"""The JSON of a plan, in which the fields of its parts stand side by side."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_batchmem.plan.plan import Plan

# The names of fields in a part, by their names in JSON.
_CHOSEN = {
    "batch_size": "batch_size",
    "limited_by": "limited_by",
    "verified": "is_verified",
    "reason": "reason",
    "fastest_batch_size": "fastest_batch_size",
    "largest_batch_size": "largest_batch_size",
}
_STEP = {
    "accumulate_grad_batches": "accumulate_grad_batches",
    "effective_batch_size": "effective_batch_size",
    "learning_rate": "learning_rate",
    "learning_rate_before": "learning_rate_before",
}
# The names until version 0.4.
_TRIAL = {"peak_held_bytes": "held_peak_bytes", "reserve_bytes": "set_aside_bytes"}


def side_by_side(plan: Plan) -> dict[str, Any]:
    """Everything in a plan, and for other readers what follows from its trials."""
    data = asdict(plan)
    chosen = data.pop("chosen")
    step = data.pop("step")
    return {
        **{name: chosen[field] for name, field in _CHOSEN.items()},
        **{name: step[field] for name, field in _STEP.items()},
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "measured_peak_bytes": plan.measured_peak_bytes,
        "held_peak_bytes": plan.held_peak_bytes,
        "memory": None if plan.memory is None else asdict(plan.memory),
        **data,
    }


def in_parts(data: Any) -> Any:
    """The data of a plan, from JSON of this version or of an earlier one."""
    if not isinstance(data, dict):
        return data
    parts: dict[str, Any] = {
        "chosen": {"reason": "", **_named(data, _CHOSEN)},
        "step": _named(data, _STEP),
    }
    if isinstance(trials := data.get("trials"), list):
        parts["trials"] = [
            {**trial, **_named(trial, _TRIAL)} if isinstance(trial, dict) else trial
            for trial in trials
        ]
    return {**data, **parts}


def _named(data: dict[str, Any], fields: dict[str, str]) -> dict[str, Any]:
    return {field: data[name] for name, field in fields.items() if name in data}
