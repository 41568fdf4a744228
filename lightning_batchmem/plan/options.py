"""What a user asks of a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from lightning_batchmem.plan.records import Objective

WorstCase = Literal["typical", "longest"] | Callable[[Any], float] | None

UNBOUNDED_MAX_BATCH_SIZE = 2**20
"""Largest size to try if neither the data nor the user sets a maximum, as for a stream without a length."""


@dataclass(frozen=True)
class SearchOptions:
    """The arguments of :class:`~lightning_batchmem.BatchFinder`, under the same names."""

    objective: Objective = "memory"
    memory_limit: int | float | str | None = None
    max_batch_size: int | None = None
    min_batch_size: int | None = None
    multiple_of: int | None = None
    eval_batch_arg_name: str | None = None
    worst_case: WorstCase = None
    target_batch_size: int | None = None
    lr_scaling: Literal["linear", "sqrt"] | None = None
    base_batch_size: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The wishes in plain JSON types; a callable by its name."""
        worst_case = self.worst_case
        named = getattr(worst_case, "__qualname__", type(worst_case).__name__) if callable(worst_case) else worst_case
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "worst_case": named}
