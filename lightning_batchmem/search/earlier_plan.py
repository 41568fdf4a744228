"""An earlier plan and the conditions under which it was found."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_batchmem.devices import device_name
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.plan.options import SearchOptions, changes_since
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.reuse import load_plan
from lightning_batchmem.plan.sentences import not_used_text
from lightning_batchmem.search.budget import memory_limit_bytes
from lightning_batchmem.search.ranks import Ranks


def earlier_plan(
    trainer: Trainer,
    device_memory: DeviceMemory,
    options: SearchOptions,
    given: Plan | str | Path | None,
) -> tuple[Plan | None, tuple[str, ...]]:
    """The plan to use again, or a note why not; the first rank decides for all."""
    if given is None:
        return None, ()
    ranks = Ranks(trainer)
    plan = None
    limit_bytes = min(ranks.exchange(memory_limit_bytes(trainer, device_memory, options)))
    try:
        plan = load_plan(given)
    except (OSError, ValueError) as error:
        # The first run of a sweep usually has no file, so this is no error.
        changes = [f"it cannot be read ({error})"]
    else:
        device = device_name(trainer.strategy.root_device)
        now = search_conditions(trainer, options)
        changes = changes_since(
            plan, plan.conditions or {}, now, device=device, limit_bytes=limit_bytes
        )
        if plan.conditions is None or not plan.verified:
            changes.append("it was not verified by a fit of this version")
    plan, changes = ranks.exchange((plan, changes))[0]
    return (None, (not_used_text(", and ".join(changes)),)) if changes else (plan, ())


def search_conditions(trainer: Trainer, options: SearchOptions) -> dict[str, Any]:
    """Conditions that have to match before a plan is used again, in plain JSON types."""
    parameters = list(trainer.lightning_module.named_parameters())
    shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in parameters]
    total = sum(p.numel() for _, p in parameters)
    digest = sha256(repr(shapes).encode()).hexdigest()[:12]
    text = f"{total:,} in {len(shapes)} tensors ({digest})"
    return {
        **options.as_json(),
        "ranks": trainer.world_size,
        "precision": str(trainer.precision),
        "parameters": text,
    }
