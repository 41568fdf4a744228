"""The plan of an earlier run, used again where nothing that matters has changed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_batchmem.plan import sentences
from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import Chosen, Trial
from lightning_batchmem.plan.scaling import rounded, size_range

LIMIT_TOLERANCE = 0.1
"""A plan is used again if the limit differs by at most this share: free memory always varies."""


def load_plan(plan: Plan | str | Path) -> Plan:
    """A plan, or the plan of a file, or the newest readable plan of a fit below a log directory.

    Raises:
        OSError: if there is no such file.
        ValueError: if a file has no plan.
    """
    if isinstance(plan, Plan):
        return plan
    path = Path(plan)
    if path.is_dir():
        found = (file for file in path.rglob("batch_plan*.json") if file.is_file())
        files = sorted(found, key=lambda file: file.stat().st_mtime)
        for file in reversed(files):
            # A run that was killed may leave a part of a file.
            with suppress(OSError, ValueError):
                earlier = Plan.from_json(file.read_text(encoding="utf-8"))
                # The plan of an evaluation has no conditions, and is skipped.
                if earlier.conditions is not None:
                    return earlier
        path = files[-1] if files else path / "batch_plan.json"
    return Plan.from_json(path.read_text(encoding="utf-8"))


def changes_since(
    plan: Plan,
    old_conditions: Mapping[str, Any],
    conditions: Mapping[str, Any],
    *,
    device: str,
    limit_bytes: int,
) -> list[str]:
    """One clause for each difference that may make the size of ``plan`` wrong."""
    changes = []
    if device != plan.device:
        changes.append(sentences.other_device(plan.device, device))
    held_bytes = max(plan.held_peak_bytes or 0, plan.measured_peak_bytes or 0)
    difference_bytes = abs(limit_bytes - plan.limit_bytes)
    if held_bytes > limit_bytes:
        changes.append(sentences.held_too_much(held_bytes, limit_bytes))
    elif difference_bytes > LIMIT_TOLERANCE * plan.limit_bytes:
        changes.append(sentences.other_limit(plan.limit_bytes, limit_bytes))
    changed = [
        name
        for name, value in conditions.items()
        if _has_changed(name, old_conditions.get(name, value), value)
    ]
    return changes + sentences.other_options(old_conditions, conditions, changed)


def _has_changed(name: str, old: Any, new: Any) -> bool:
    """Whether a condition has changed for the worse: shorter samples need less memory."""
    if name == "sample_bytes" and isinstance(old, list):
        # There may be another number of loaders for validation, which come last.
        # Which samples are read depends a little on time.
        pairs = zip(old, new, strict=False)
        return any(isinstance(before, int) and after > 1.05 * before for before, after in pairs)
    return bool(old != new)


def why_not_allowed(plan: Plan, limits: SearchLimits) -> str:
    """Why the size of ``plan`` is not worth a rehearsal; empty if it is."""
    size = plan.batch_size
    lowest, highest = size_range(limits)
    if not lowest <= size <= highest:
        return sentences.outside_range(size, lowest, highest, limits)
    if size in limits.avoided_sizes and rounded(size, limits) != size:
        return sentences.last_batch_of_one(size)
    if plan.limited_by not in ("memory", "throughput") and size != highest:
        return sentences.other_size_limit(plan.limited_by, size, highest)
    return ""


def reused(plan: Plan, trial: Trial, limits: SearchLimits) -> tuple[Chosen, tuple[Trial, ...]]:
    """The size of ``plan`` after ``trial``, a rehearsal that passed, and the trials of both."""
    size = plan.batch_size
    chosen = Chosen(
        size,
        plan.limited_by,
        sentences.passed_again(size, limits),
        fastest_batch_size=plan.fastest_batch_size,
        largest_batch_size=plan.largest_batch_size,
    )
    earlier = [
        # Times of another process cannot be compared with those of this one.
        replace(t, step_seconds=None, fastest_step_seconds=None, samples_per_second=None)
        for t in plan.trials
        if (t.batch_size, t.kind) != (size, "rehearsal")
    ]
    return chosen, (*earlier, trial)
