"""The project's own batch size beside the chosen one: which is faster, and what cannot change."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.options import Objective
from lightning_batchmem.plan.records import Speed

SLOWER_SHARE = 0.15
"""A size is slower, or faster, than another one from this share of throughput on.

Source: the ratio of the medians of five steps is wrong by up to 11 % in nine of ten cases, on a
shared machine.
"""

COPIES = (2, 8)
"""The losses of this many copies of one sample are compared."""

# With dropout the losses of copies differ by less.
_SAME_LOSS_RATIO = 1.5

# A sum of 8 equal losses is four times that of 2. In-batch negatives have log(8) / log(2), or 3.
_LEAST_SUM_RATIO = 3.5


def takes_own_size(objective: Objective, own: Speed, other: Speed) -> bool:
    """Whether the size of the project is taken instead of the other one, because of the speeds.

    Args:
        objective: what the search looks for.
        own: the throughput at the size of the project.
        other: that at the size that was found.
    """
    ratio = other.samples_per_second / own.samples_per_second
    if objective == "auto":
        return ratio < 1 - SLOWER_SHARE
    return objective == "throughput" and ratio <= 1 + SLOWER_SHARE


def slower_note(speeds: Sequence[Speed], batch_size: int, limits: SearchLimits) -> str:
    """A sentence about a chosen size that is slower than the project's; empty for any other."""
    if len(speeds) < 2:
        return ""
    own, other = speeds
    ratio = other.samples_per_second / own.samples_per_second
    if batch_size != other.batch_size or ratio >= 1 - SLOWER_SHARE:
        return ""
    return (
        f"{limits.unit.size(batch_size)} are slower than your {own.batch_size:,}:"
        f" {ratio:.0%} of the {limits.unit.items} a second."
        ' objective="throughput" looks for the fastest size.'
    )


def loss_note(losses: Sequence[float | None]) -> str:
    """A sentence about a loss with which accumulation does not go; empty for any other.

    Copies of a sample show it: the mean of their losses is the same for any number of them.

    Args:
        losses: the losses of :data:`COPIES`; ``None`` where one is not known.
    """
    few, many = losses
    if not few or not many or 1 / _SAME_LOSS_RATIO < many / few < _SAME_LOSS_RATIO:
        return ""
    if many / few >= _LEAST_SUM_RATIO:
        return (
            "Your loss is a sum over the batch, and Lightning divides it by the number of"
            " accumulated batches, so the gradients are smaller than with your own size. Return the"
            " mean, or multiply the learning rate by that number."
        )
    return (
        "Your loss compares the samples of a batch with each other, and accumulation does not: each"
        " of its batches has fewer of them than your own size."
    )
