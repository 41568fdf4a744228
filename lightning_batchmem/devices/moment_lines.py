"""Live bytes over samples at each moment of a step, from the same step at two sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_batchmem.devices.module_memory import ModuleStorages, Moment


class MomentLine(NamedTuple):
    """Live bytes over samples, through one moment of the step at both sizes.

    Attributes:
        small: the moment at the smaller size.
        large: the same moment at the larger size.
        small_size: the smaller size, in samples.
        large_size: the larger size.
    """

    small: Moment
    large: Moment
    small_size: int
    large_size: int

    @property
    def sample_bytes(self) -> int:
        """Bytes that each sample adds."""
        return self.sample_bytes_of(self.small.live_bytes, self.large.live_bytes)

    @property
    def fixed_bytes(self) -> int:
        """Bytes at 0 samples."""
        return self.fixed_bytes_of(self.small.live_bytes, self.large.live_bytes)

    def sample_bytes_of(self, small_bytes: int, large_bytes: int) -> int:
        """Bytes that each sample adds to a part with these bytes at both sizes."""
        return round((large_bytes - small_bytes) / (self.large_size - self.small_size))

    def fixed_bytes_of(self, small_bytes: int, large_bytes: int) -> int:
        """Bytes at 0 samples of a part with these bytes at both sizes."""
        grown_bytes = large_bytes - small_bytes
        shared_bytes = round(self.small_size * grown_bytes / (self.large_size - self.small_size))
        return small_bytes - shared_bytes


def moment_lines(
    phase: str, small: ModuleStorages, large: ModuleStorages, sizes: tuple[int, int]
) -> list[MomentLine]:
    """Return the lines through the moments of a phase; none if it did not run.

    At each moment of a step the live bytes are a line over samples. The peak of the phase is the
    highest of these lines.

    Args:
        phase: the phase.
        small: the step at the smaller size.
        large: the step at the larger size.
        sizes: both sizes, in samples.
    """
    small_moments = [moment for moment in small.moments() if moment.phase == phase]
    large_moments = [moment for moment in large.moments() if moment.phase == phase]
    if not small_moments or not large_moments:
        return []
    lines: list[MomentLine] = []
    # The forward pass begins with a batch, for which each sample is copied. So moments belong
    # together if they are equally far from the end of the phase.
    for pair in zip(reversed(small_moments), reversed(large_moments), strict=False):
        line = MomentLine(*pair, *sizes)
        if line.small.operator is not line.large.operator:
            break
        lines.append(line)
    peak = MomentLine(_highest(small_moments), _highest(large_moments), *sizes)
    small_events = {line.small.num_events for line in lines}
    large_events = {line.large.num_events for line in lines}
    if peak.small.num_events in small_events and peak.large.num_events in large_events:
        return lines
    # The step runs other operators at the other size.
    return [peak]


def _highest(moments: Sequence[Moment]) -> Moment:
    return max(moments, key=lambda moment: moment.live_bytes)
