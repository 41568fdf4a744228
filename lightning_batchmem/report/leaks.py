"""Does what is in use when a step begins rise from step to step? Pure, and constant in size over all of them."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise
from typing import NamedTuple

from lightning_batchmem.plan.records import MIB


class Growth(NamedTuple):
    """A floor that rises steadily, between two of its lowest values."""

    bytes_per_step: float
    first_step: int
    first_bytes: int
    last_step: int
    last_bytes: int


_Floor = tuple[int, int]
"""Number of a step, and the bytes in use when it began."""

_MOST_FLOORS, _COMPARED, _JUDGED, _GROUP = 64, 16, 32, 4
"""How many floors are kept; the latest of them are judged, in groups, and compared with those just before."""

_LEAK_BYTES, _LEAK_SHARE = 16 * MIB, 0.02
"""The least rise that is worth a word: bytes, and share of the floor."""

_LEAK_OVER_SPREAD = 4.0
"""The least rise as a multiple of the spread inside a group. Without noise a steady rise has 6.75 or more, which are 27
distances between floors over 4. Noise around a constant can rise by its range at most, of which four values seldom
fill less than a quarter, and half the groups of four hardly ever."""

_LEAK_STEADINESS = 0.8
"""The least pace as a multiple of the one just before: 1 for a steady rise, less for one that slows down, as that of a
heap which fills up (over spans that double 0.5 for a logarithm, 0.71 for a square root)."""


class LeakDetector:
    """What was in use at the begin of some steps, evenly over all steps so far, in constant memory.

    When 64 floors are there, the lower of each two is kept and from then on half as many are taken. A floor is taken at
    a random step of its stretch: at a fixed one, whatever repeats itself (epochs, accumulation) could look like a rise.

    Attributes:
        due: the step from which on the next floor is wanted.
    """

    def __init__(self) -> None:
        self.due = 0.0
        self._floors: list[_Floor] = []
        self._stride, self._stretch_start = 1, 0
        self._random = random.Random(0)  # noqa: S311 - nothing secret; its own, so that no draw of the run is taken

    def add(self, number: int, allocated_bytes: int) -> None:
        """Keep the floor of step ``number``."""
        if len(self._floors) == _MOST_FLOORS:
            pairs = zip(self._floors[::2], self._floors[1::2], strict=True)
            self._floors = [min(pair, key=_bytes_of) for pair in pairs]
            self._stride *= 2
        self._floors.append((number, allocated_bytes))
        self._stretch_start = max(self._stretch_start + self._stride, number + 1)
        self.due = self._stretch_start + self._random.randrange(self._stride)

    def growth(self, resolution_bytes: int) -> Growth | None:
        """The steady rise of the latest 32 floors; judged at every 16th, ``None`` in between.

        Of each group of four the lowest counts, which no burst can raise. All eight of them have to rise, each by more
        than ``resolution_bytes``: by chance that happens once in 40,320.
        """
        if len(self._floors) < _COMPARED + _JUDGED or len(self._floors) % _COMPARED:
            return None
        judged = _groups(self._floors[-_JUDGED:])
        lowest = [min(group, key=_bytes_of) for group in judged]
        spread_bytes = statistics.median(
            max(group, key=_bytes_of)[1] - low[1] for group, low in zip(judged, lowest, strict=True)
        )
        (first_step, first_bytes), (last_step, last_bytes) = lowest[0], lowest[-1]
        rise_bytes = last_bytes - first_bytes
        if any(after[1] - before[1] <= resolution_bytes for before, after in pairwise(lowest)):
            return None
        if rise_bytes < max(_LEAK_BYTES, _LEAK_SHARE * first_bytes, _LEAK_OVER_SPREAD * spread_bytes):
            return None
        compared = [min(group, key=_bytes_of) for group in _groups(self._floors[-_COMPARED - _JUDGED : -_JUDGED])]
        bytes_per_step = _slope(lowest)
        if bytes_per_step < _LEAK_STEADINESS * _slope(compared):
            return None
        return Growth(bytes_per_step, first_step, first_bytes, last_step, last_bytes)


def _bytes_of(floor: _Floor) -> int:
    return floor[1]


def _groups(floors: list[_Floor]) -> list[list[_Floor]]:
    return [floors[start : start + _GROUP] for start in range(0, len(floors), _GROUP)]


def _slope(floors: list[_Floor]) -> float:
    numbers, values = zip(*floors, strict=True)
    return statistics.linear_regression(numbers, values).slope
