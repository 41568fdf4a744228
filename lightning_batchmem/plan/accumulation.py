"""Gradient accumulation: divide an optimizer step into micro batches that fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class MicroBatch:
    """Division of an optimizer step: samples per rank, micro batches, and samples in all."""

    batch_size: int
    accumulate_grad_batches: int
    effective_batch_size: int
    rounding: str = ""


def micro_batch(target_batch_size: int, *, largest: int, ranks: int = 1, multiple_of: int | None = None) -> MicroBatch:
    """Divide ``target_batch_size`` into micro batches of at most ``largest`` samples per rank.

    Up to twice as many micro batches as needed are accepted where they make exactly the target. Otherwise: as few as
    possible, of the size nearest to the target.

    Example:
        >>> micro_batch(1024, largest=300)
        MicroBatch(batch_size=256, accumulate_grad_batches=4, effective_batch_size=1024, rounding='')
    """
    unit = multiple_of or 1
    fewest = math.ceil(target_batch_size / (ranks * (largest // unit * unit)))
    exact = (k for k in range(fewest, 2 * fewest + 1) if target_batch_size % (k * ranks * unit) == 0)
    accumulate = next(exact, fewest)
    # To the nearest, half a unit up. Never above `largest`: at `fewest` the share is at most the largest multiple.
    step_unit = accumulate * ranks * unit
    batch_size = unit * ((2 * target_batch_size + step_unit) // (2 * step_unit))
    effective = batch_size * accumulate * ranks
    rounding = ""
    if effective != target_batch_size:
        on_ranks = f" on each of {ranks} ranks" if ranks > 1 else ""
        rounding = (
            f"{effective:,} samples per optimizer step instead of {target_batch_size:,}:"
            f" {accumulate:,} x {batch_size:,}{on_ranks}"
        )
    return MicroBatch(batch_size, accumulate, effective, rounding)


@cache
def micro_batches(target_batch_size: int, ranks: int, multiple_of: int | None) -> dict[int, MicroBatch]:
    """Every size that divides the target exactly or nearly so, largest first."""
    found: dict[int, MicroBatch] = {}
    largest = target_batch_size // ranks
    while largest >= (multiple_of or 1):
        micro = micro_batch(target_batch_size, largest=largest, ranks=ranks, multiple_of=multiple_of)
        found[micro.batch_size] = micro
        largest = micro.batch_size - 1
    return found
