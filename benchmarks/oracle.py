"""The largest size at which training survives every time, found with few trainings. Pure: it is given the trainings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

AGREEING = 5
"""Trainings, each in a fresh process, that must all survive at the size that counts as the oracle."""

RESOLUTION = 0.02
"""Share of the size to which it is searched."""

GROWTH = 1.5
"""Factor between the sizes until one that survives and one that does not are known: what is known is mostly close."""

FIRST_SIZE = 32
"""Where to begin when nothing is known, in samples."""


def largest_surviving(
    outcomes: Callable[[int, int], list[bool]], *, known: Mapping[int, list[bool]], largest: int
) -> dict[str, Any]:
    """Bracket, bisect with single trainings, then ask for five of five and step down where one fails.

    A size at which one training failed is none at which five of five survive, so that a single failure is enough to go
    below it; a single survival is not enough to stay.

    Args:
        outcomes: (size, count) -> whether training survived in each of at least ``count`` fresh processes.
        known: size -> what is known of trainings at it already.
        largest: the largest size to try, in samples.

    Returns:
        ``batch_size`` (``None`` when nothing survives five of five), and the spread beside it: ``survived_once``, the
        largest size at which any training survived, and ``failed_once``, the smallest at which any failed.
    """
    seen = dict(known)

    def survives(size: int, count: int = 1) -> bool:
        for asked in range(1, count + 1):
            seen[size] = outcomes(size, asked)
            if not all(seen[size]):
                return False
        return True

    below, above = 0, min([size for size, all_of in seen.items() if not all(all_of)] + [largest + 1])
    size = max([size for size in seen if size < above], default=max(1, min(FIRST_SIZE, round(above / GROWTH))))
    while size > below and size < above:
        if survives(size):
            below = size
            size = min(largest, max(size + 1, round(size * GROWTH))) if above > largest else below
        else:
            above = size
            size = max(1, round(size / GROWTH)) if below == 0 and size > 1 else below
    while above - below > max(1, int(RESOLUTION * below)):
        middle = (below + above) // 2
        below, above = (middle, above) if survives(middle) else (below, middle)
    while below > 0 and not survives(below, AGREEING):
        below -= max(1, int(RESOLUTION * below))
    return {
        "batch_size": below or None,
        "survived_once": max((size for size, all_of in seen.items() if any(all_of)), default=None),
        "failed_once": min((size for size, all_of in seen.items() if not all(all_of)), default=None),
    }
