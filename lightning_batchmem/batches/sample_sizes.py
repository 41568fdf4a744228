"""Sizes of samples, and which samples make the batches of a search; numbers only, no samples."""

from __future__ import annotations

import random
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest

import numpy as np

from lightning_batchmem.plan.policy import ReadingPolicy


@dataclass(frozen=True)
class SampleSizes:
    """Sizes of the samples that were measured, and bytes of the few that are available.

    The available samples are known here by their position. The first are spread over the data set;
    after them come the longest of each part, unless these are among the others.
    """

    # Every measured sample has a size: its bytes in a batch.
    measured: list[float]
    # Bytes of each available sample in a batch.
    bytes_each: list[int]
    # Whether the measured sizes differ.
    is_ragged: bool = False
    # Whether all samples of the data set were measured.
    is_complete: bool = False
    # A sentence about samples that could not be read; empty if all could.
    left_out: str = ""
    # Bytes of each available sample, and the lengths of its tensors.
    parts: Sequence[tuple[int, ...]] = ()

    @property
    def difference(self) -> str:
        """A sentence about samples that differ in size."""
        sizes = self.measured
        if max(sizes) == statistics.median(sizes):
            return f"Samples differ in shape: {len(sizes):,} were read."
        return (
            f"Samples differ in size: of {len(sizes):,} the largest has {max(sizes):,.0f} bytes in"
            f" a batch and the median {statistics.median(sizes):,.0f}."
        )

    def typical_count(self, count: int) -> int:
        """How many random samples padded to one length take what ``count`` of the longest take.

        Source: the mean of the largest of n draws from sorted sizes is the sum of each size times
        its share, (i / m) ** n - ((i - 1) / m) ** n for the i-th of m sizes.
        """
        sizes = np.sort(np.asarray(self.measured, dtype=float))
        ranks = np.arange(len(sizes) + 1) / len(sizes)

        def exceeds(number: int) -> bool:
            mean_of_largest = float(np.sum(sizes * np.diff(ranks**number)))
            # Beside an error of rounding.
            return number * mean_of_largest > (1 + 1e-9) * count * float(sizes[-1])

        # For one draw, the mean of the largest is the mean of all sizes.
        most = max(count, int(count * sizes[-1] / sizes.mean()))
        return bisect_left(range(most + 1), True, lo=count, key=exceeds) - 1

    @property
    def by_bytes(self) -> list[int]:
        """Positions of the available samples, from the smallest one to the largest one."""
        return sorted(range(len(self.bytes_each)), key=self.bytes_each.__getitem__)

    @property
    def longest(self) -> list[int]:
        """Positions of the largest sample, and of the longest of each part, as audio and text.

        A sample that is the longest in several ways is there once.
        """
        order = self.by_bytes[::-1]
        columns = zip_longest(*self.parts, fillvalue=0)
        longest = [max(order, key=column.__getitem__) for column in columns]
        return [*dict.fromkeys([order[0], *longest])]


class TypicalSamples:
    """Batches have the available samples in turn."""

    def __init__(self, sizes: SampleSizes) -> None:
        self.sizes = sizes
        self.longest_bytes = max(sizes.bytes_each)

    def positions(self, count: int) -> list[int]:
        """Positions of the samples in a batch of ``count`` samples."""
        available = len(self.sizes.bytes_each)
        return [position % available for position in range(count)]

    def other_positions(self, count: int, index: int) -> list[int]:
        """Positions of the samples in the ``index``-th other batch, which is hardly larger."""
        return self.positions(count)

    def _drawn(self, count: int, index: int) -> list[int]:
        """Positions of random samples, as a training draws them."""
        # The random choice protects no secret.
        generator = random.Random(index)  # noqa: S311
        available = range(len(self.sizes.bytes_each))
        is_repeated = count > len(available)
        return (generator.choices if is_repeated else generator.sample)(available, k=count)

    def batch_bytes(self, count: int, longest_bytes: int) -> int:
        """Bytes of a batch; ``longest_bytes``: of the longest sample on any rank."""
        return count * longest_bytes


class LongestSample(TypicalSamples):
    """Batches repeat the longest sample, since a batch is as long as its longest sample.

    Samples that are equally long take turns. The longest of each part, such as audio and text,
    are there too, as far as a batch has room. Where no batch of a training can exceed the largest
    samples together, batches have these, each of them once.

    Args:
        sizes: the samples.
        joins: whether a batch can have samples of several sizes.
        is_sorted: whether the loader may choose samples of about one size for a batch.
        has_largest: whether the largest samples of a training are among those that were measured.
    """

    # What the batches are, as words after "batches".
    text = "of the largest samples only"

    def __init__(
        self, sizes: SampleSizes, *, joins: bool, is_sorted: bool, has_largest: bool
    ) -> None:
        super().__init__(sizes)
        self._is_random = joins and not is_sorted
        self._order = sizes.by_bytes[::-1]
        in_order = [sizes.bytes_each[position] for position in self._order]
        self._longest = sizes.longest if joins else self._order[:1]
        if len(self._longest) > 1:
            self.text = "of the largest samples, with the longest of each tensor"
        # Samples of equally many bytes may have several shapes.
        self._num_longest = in_order.count(self.longest_bytes) if joins else 1
        self._num_distinct = self._num_longest
        if joins and has_largest:
            # Not all samples that were measured are available.
            pairs = zip(in_order, sorted(sizes.measured, reverse=True), strict=False)
            self._num_distinct = sum(1 for _ in takewhile(lambda pair: pair[0] >= pair[1], pairs))

    def positions(self, count: int) -> list[int]:
        if count <= self._num_distinct:
            return [*dict.fromkeys(self._longest + self._order)][:count]
        repeated = [self._order[number % self._num_longest] for number in range(count)]
        return (self._longest + repeated)[:count]

    def other_positions(self, count: int, index: int) -> list[int]:
        if self._is_random:
            return self._drawn(count, index)
        (position,) = self._drawn(1, index)
        if count > self._num_distinct:
            return [position] * count
        begin = min(self._order.index(position), len(self._order) - count)
        return self._order[begin : begin + count]


class LargestSum(TypicalSamples):
    """Batches are as large as the largest of many random ones, for samples that are concatenated.

    The size of such a batch is the sum of the sizes of its samples.
    """

    def __init__(self, sizes: SampleSizes, policy: ReadingPolicy) -> None:
        super().__init__(sizes)
        self._policy = policy
        self._by_bytes = sizes.by_bytes
        self._largest_sums: dict[int, int] = {}
        self._positions: dict[int, list[int]] = {}
        self.text = f"as large as the largest of {policy.max_draws:,} random ones"

    def positions(self, count: int) -> list[int]:
        if count not in self._positions:
            positions = self._with_largest_sum(count, is_repeated=count > len(self._by_bytes))
            if self._sum(positions) < self._largest_sum(count):
                positions = self._with_largest_sum(count, is_repeated=True)
            self._positions[count] = positions
        return self._positions[count]

    def other_positions(self, count: int, index: int) -> list[int]:
        return min(self._drawn(count, index), self.positions(count), key=self._sum)

    def _with_largest_sum(self, count: int, *, is_repeated: bool) -> list[int]:
        bytes_each = self.sizes.bytes_each
        positions = []
        missing_bytes = self._largest_sum(count)
        available = self._by_bytes.copy()
        # Each pass adds the smallest sample that is at least as large as the missing samples are on
        # average.
        for missing in range(count, 0, -1):
            rank = bisect_left(available, missing_bytes / missing, key=bytes_each.__getitem__)
            rank = min(rank, len(available) - 1)
            position = available[rank] if is_repeated else available.pop(rank)
            positions.append(position)
            missing_bytes -= bytes_each[position]
        return positions

    def batch_bytes(self, count: int, longest_bytes: int) -> int:
        return self._largest_sum(count)

    def _sum(self, positions: list[int]) -> int:
        return sum(self.sizes.bytes_each[position] for position in positions)

    def _largest_sum(self, count: int) -> int:
        """Bytes of the largest of many random batches of ``count`` samples."""
        if count not in self._largest_sums:
            generator = np.random.default_rng(0)
            measured = np.asarray(self.sizes.measured)
            # Not all samples are measured, so there may be more of one size.
            is_repeated = count > len(measured) or not self.sizes.is_complete
            draws = max(1, min(self._policy.max_draws, self._policy.max_drawn_sizes // count))
            sums = [
                generator.choice(measured, count, replace=is_repeated).sum() for _ in range(draws)
            ]
            self._largest_sums[count] = int(max(sums))
        return self._largest_sums[count]
