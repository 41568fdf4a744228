"""A plan of an earlier run, used again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import NextSize, SearchLimits, Trial
from lightning_batchmem.plan.scaling import size_range
from lightning_batchmem.plan.sentences import outcome_text, size_limit_text


def load_plan(plan: Plan | str | Path) -> Plan:
    """A plan, or the plan of a file, or the newest plan of a fit below a log directory.

    Without a plan there, OSError or ValueError is raised.
    """
    if isinstance(plan, Plan):
        return plan
    path = Path(plan)
    if path.is_dir():
        found = sorted(
            path.rglob("batch_plan*.json"), key=lambda one: one.stat().st_mtime, reverse=True
        )
        for one in found:
            earlier = Plan.from_json(one.read_text(encoding="utf-8"))
            # The plan of an evaluation has no conditions, and is skipped.
            if earlier.conditions is not None:
                return earlier
        path = found[0] if found else path / "batch_plan.json"
    return Plan.from_json(path.read_text(encoding="utf-8"))


def reuse(plan: Plan, trials: Sequence[Trial], limits: SearchLimits) -> NextSize | Plan | str:
    """The rehearsal at the size of ``plan``, and after it the new plan.

    If a search is needed instead, the result is a text with the reason.
    """
    size = plan.batch_size
    lowest, highest = size_range(limits)
    if trials:
        if trials[-1].outcome != "ok":
            return f"{size} samples {outcome_text(trials[-1])}"
        earlier = [one for one in plan.trials if (one.batch_size, one.kind) != (size, "rehearsal")]
        return replace(
            plan,
            verified=True,
            limit_bytes=limits.limit_bytes,
            measured_peak_bytes=trials[-1].peak_bytes,
            held_peak_bytes=trials[-1].peak_held_bytes,
            trials=(*earlier, trials[-1]),
            reason=f"{size} samples: the size of an earlier plan, which passed a rehearsal again.",
            notes=(),
            # Validation has a separate search, which adds its plan afterwards.
            evaluation=None,
        )
    if not lowest <= size <= highest:
        return (
            f"it has {size} samples, and sizes from {lowest} to {highest} are allowed:"
            f" {size_limit_text(limits)}"
        )
    if plan.limited_by not in ("memory", "throughput") and size != highest:
        limited_by = plan.limited_by.replace("_", " ")
        return f"its size was limited by {limited_by} to {size} and may now be {highest}"
    return NextSize(size, "rehearsal")
