"""The plan of an earlier run, if all ranks may use it again."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch.nn import Module

from lightning_batchmem.plan import sentences
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.reuse import changes_since, load_plan
from lightning_batchmem.search.ranks import Ranks


def find_earlier_plan(
    given: Plan | str | Path | None,
    conditions: Mapping[str, Any],
    *,
    device: str,
    limit_bytes: int,
    ranks: Ranks,
) -> tuple[Plan | None, list[str]]:
    """The plan to use again, or ``None`` and a note why not; the first rank decides for all.

    Args:
        given: a plan, its file, or a log directory; ``None``: there is none, and no note.
        conditions: what has to match, in plain JSON types.
        device: the name of the device.
        limit_bytes: the limit of this rank.
        ranks: the processes that search together.
    """
    if given is None:
        return None, []
    plan = None
    limit_bytes = min(ranks.exchange(limit_bytes))
    try:
        plan = load_plan(given)
    except (OSError, ValueError) as error:
        # The first run of a sweep usually has no file, so this is no error.
        changes = [sentences.unreadable(error)]
    else:
        changes = changes_since(
            plan,
            plan.conditions or {},
            conditions,
            device=device,
            limit_bytes=limit_bytes,
        )
        if plan.conditions is None or not plan.verified:
            changes.append(sentences.not_verified())
    plan, changes = ranks.exchange((plan, changes))[0]
    if changes:
        return None, [sentences.earlier_plan_not_used(*changes)]
    return plan, []


def parameters_text(module: Module) -> str:
    """The number of parameters, and a digest of their names, shapes and types."""
    parameters = list(module.named_parameters())
    shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in parameters]
    total = sum(parameter.numel() for _, parameter in parameters)
    digest = sha256(repr(shapes).encode()).hexdigest()[:12]
    return f"{total:,} in {len(shapes)} tensors ({digest})"
