"""Sizes of samples, and which samples make the batches of a search; numbers only, no samples."""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

from lightning_batchmem.plan.policy import ReadingPolicy


@dataclass
class SampleSizes:
    """Sizes of the samples that were measured, and bytes of the few of them that are available.

    The available samples are known here by their position. The first ones are spread over the data
    set; one more is the largest sample, unless it is among them.
    """

    # Every measured sample has a size: its bytes in a batch, or the value of the user's callable.
    measured: list[float] = field(default_factory=list)
    # Bytes of the available samples in a batch.
    sample_bytes: list[int] = field(default_factory=list)
    spread_count: int = 0
    # The position of the largest available sample.
    largest: int = 0
    # Whether the measured sizes differ.
    is_ragged: bool = False
    # Whether all samples of the data set were measured.
    is_complete: bool = False
    # The time after which no more samples were read; None if no more of them were needed.
    scan_seconds: float | None = None

    @property
    def by_bytes(self) -> list[int]:
        """Positions of the available samples, from the smallest one to the largest one."""
        return sorted(range(len(self.sample_bytes)), key=self.sample_bytes.__getitem__)


class TypicalSamples:
    """Batches have the available samples in turn."""

    def __init__(self, sizes: SampleSizes) -> None:
        self.sizes = sizes
        self.longest_bytes = sizes.sample_bytes[sizes.largest]

    def positions(self, count: int) -> list[int]:
        """Positions of the samples in a batch of ``count`` samples."""
        available = len(self.sizes.sample_bytes)
        return [position % available for position in range(count)]

    def other_positions(self, count: int, index: int) -> list[int]:
        """Positions of the samples in the ``index``-th batch that is no larger."""
        return self.positions(count)

    def batch_bytes(self, count: int, longest_bytes: int) -> int:
        """Bytes of a batch; ``longest_bytes`` are those of the longest sample on any rank."""
        return count * longest_bytes


class LongestSample(TypicalSamples):
    """Batches repeat the longest sample, since a batch is as long as its longest sample."""

    def positions(self, count: int) -> list[int]:
        return [self.sizes.largest] * count

    def other_positions(self, count: int, index: int) -> list[int]:
        return [index % len(self.sizes.sample_bytes)] * count


class LargestSum(TypicalSamples):
    """Batches are as large as the largest of many random ones, for samples that are concatenated.

    The size of such a batch is the sum of the sizes of its samples.
    """

    def __init__(self, sizes: SampleSizes, policy: ReadingPolicy) -> None:
        super().__init__(sizes)
        self._policy = policy
        self._by_bytes = sizes.by_bytes
        self._largest_sums: dict[int, int] = {}

    def positions(self, count: int) -> list[int]:
        sample_bytes = self.sizes.sample_bytes
        positions = []
        missing_bytes = self._largest_sum(count)
        # Each pass adds the smallest sample that is at least as large as the missing samples are on
        # average.
        for missing in range(count, 0, -1):
            rank = bisect_left(
                self._by_bytes, missing_bytes / missing, key=sample_bytes.__getitem__
            )
            position = self._by_bytes[min(rank, len(self._by_bytes) - 1)]
            positions.append(position)
            missing_bytes -= sample_bytes[position]
        return positions

    def other_positions(self, count: int, index: int) -> list[int]:
        # The random choice protects no secret.
        choices = random.Random(index).choices(range(self.sizes.spread_count), k=count)  # noqa: S311
        largest = self.positions(count)
        return min(choices, largest, key=self._sum)

    def batch_bytes(self, count: int, longest_bytes: int) -> int:
        return self._largest_sum(count)

    def _sum(self, positions: list[int]) -> int:
        return sum(self.sizes.sample_bytes[position] for position in positions)

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
