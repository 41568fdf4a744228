"""Conditions that changed since a plan was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import mib

# a limit may differ by this share, because the free memory of a host always differs a little
_LIMIT_TOLERANCE = 0.1


def changes_since(
    plan: Plan, old_options: Mapping[str, Any], options: Mapping[str, Any], *, device: str, limit_bytes: int
) -> list[str]:
    """One clause for each difference in device, limit or options that may make the size of ``plan`` wrong."""
    changes = []
    if device != plan.device:
        changes.append(f"it was found on {plan.device} and this is {device}")
    if plan.measured_peak_bytes is not None and plan.measured_peak_bytes > limit_bytes:
        changes.append(f"it held {mib(plan.measured_peak_bytes)} and the limit is {mib(limit_bytes)}")
    elif abs(limit_bytes - plan.limit_bytes) > _LIMIT_TOLERANCE * plan.limit_bytes:
        changes.append(f"the limit was {mib(plan.limit_bytes)} and is {mib(limit_bytes)}")
    changed = [name for name, value in options.items() if old_options.get(name, value) != value]
    return changes + [f"{name} was {old_options[name]!r} and is {options[name]!r}" for name in changed]
