"""What a user asks of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_batchmem.records import Objective
from lightning_batchmem.worst_case import WorstCase


@dataclass(frozen=True)
class Wishes:
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
