"""How large a sample is, for probes that are to hold the largest ones."""

from __future__ import annotations

import math
import statistics
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_batchmem.measure.breakdown import copied
from lightning_batchmem.plan.options import WorstCase

_RAGGED_RATIO = 1.5
"""Largest over median sample above which the memory of a batch is said to depend on which samples are in it."""

_NUMBER_TYPES = frozenset({int, float, bool})

_NAME_CHARACTERS = 256
"""Where a sample's texts are no longer than this in all they may be names and paths, whose lengths cost no memory."""


def element_count(sample: Any) -> int:
    """What ``"longest"`` compares: how many elements a sample has, before it is collated.

    A tensor or array counts its elements, a text or bytes its length, a single number one. Mappings (their values),
    sequences, sets and dataclasses are walked, so that a list of numbers counts its length. All else counts nothing.
    """
    return sum(_elements_and_characters(sample))


def _elements_and_characters(sample: Any) -> tuple[int, int]:
    if isinstance(sample, str | bytes | bytearray):
        return 0, len(sample)
    if isinstance(sample, Tensor):
        return sample.numel(), 0
    if isinstance(sample, np.ndarray):
        return sample.size, 0
    if isinstance(sample, Number | np.generic):
        return 1, 0
    inside: Iterable[Any] = ()
    if isinstance(sample, Mapping):
        inside = sample.values()
    elif isinstance(sample, Sequence | Set):
        if _NUMBER_TYPES.issuperset(map(type, sample)):  # in one go: thousands of samples of hundreds of tokens are met
            return len(sample), 0
        inside = sample
    elif is_dataclass(sample) and not isinstance(sample, type):
        inside = [getattr(sample, one.name) for one in fields(sample)]
    counts = [_elements_and_characters(one) for one in inside]
    return sum(elements for elements, _ in counts), sum(characters for _, characters in counts)


class Seen(NamedTuple):
    """What :class:`KeepLargest` hands on of some samples.

    Attributes:
        samples: how many there were.
        larger: the largest of them, where it is larger than all before; or the one that could not be measured.
        size: of the largest so far.
        error: traceback of what the measure raised; empty when it raised nothing.
    """

    samples: int
    larger: list[Any]
    size: float
    error: str = ""


class KeepLargest:
    """A ``collate_fn`` that hands on the largest sample it has seen, when it meets it, and drops the others.

    Args:
        worst_case: ``"longest"``, or what measures a sample.
    """

    def __init__(self, worst_case: WorstCase) -> None:
        self._measure: Callable[[Any], Any] = worst_case if callable(worst_case) else element_count
        self._largest = -math.inf

    def __call__(self, samples: list[Any]) -> Seen:
        """Look at some samples."""
        larger: list[Any] = []
        for sample in samples:
            try:
                size = self.size_of(sample)
            except Exception:  # noqa: BLE001 - a user's callable may fail in any way; it is called again where it can be seen
                return Seen(len(samples), [sample], self._largest, error=traceback.format_exc())
            if size > self._largest:
                self._largest, larger = size, [sample]
        return Seen(len(samples), [copied(sample) for sample in larger], self._largest)

    def size_of(self, sample: Any) -> float:
        """How large one sample is.

        Raises:
            ValueError: when the measure returns something else than a number.
            Exception: whatever a user's measure raises.
        """
        size = self._measure(sample)
        try:
            number = float(size)
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number):
            raise ValueError(f"worst_case must return a number for a sample, got {size!r}")
        return number


def warn_if_ragged(samples: Sequence[Any]) -> bool:
    """Warn when the largest of ``samples`` is much larger than their median.

    Returns:
        Whether it warned.
    """
    counts = [_elements_and_characters(sample) for sample in samples]
    elements = [count for count, _ in counts]
    both = [sum(count) for count in counts]
    if _is_ragged(elements):
        sizes = elements
    elif max(characters for _, characters in counts) > _NAME_CHARACTERS and _is_ragged(both):
        sizes = both
    else:
        return False
    rank_zero_warn(
        f"samples differ in size: the largest of {len(sizes)} that were drawn has {max(sizes):,} elements, the median"
        f" {statistics.median_low(sizes):,}, so the memory of a batch depends on which samples are in it; to find a"
        ' size that holds for the largest, pass BatchFinder(worst_case="longest")'
    )
    return True


def _is_ragged(sizes: Sequence[int]) -> bool:
    return max(sizes) > _RAGGED_RATIO * max(1, statistics.median_low(sizes))
