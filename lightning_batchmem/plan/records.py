"""The vocabulary: what a probe measured, the lines fitted to it, and what bounds a search.

Everything here is plain data in bytes, seconds and samples. Nothing imports torch or Lightning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MIB = 2**20
"""Bytes in a mebibyte, the unit in which memory is shown to people."""

PHASES = ("forward", "backward", "optimizer_step", "evaluation")
"""The parts of a step whose peaks are measured and fitted apart, in the order in which they run."""

Outcome = Literal["ok", "out_of_memory"]
SizeLimit = Literal["dataset", "max_batch_size", "target_batch_size", "host memory"]
LimitedBy = Literal["memory", "throughput", "dataset", "max_batch_size", "target_batch_size", "host memory"]
Objective = Literal["memory", "throughput"]


def mib(count_bytes: float) -> str:
    """Bytes as a person reads them, e.g. ``"1,536.0 MiB"``; three decimals below one MiB."""
    return f"{count_bytes / MIB:,.{1 if abs(count_bytes) >= MIB else 3}f} MiB"


@dataclass(frozen=True)
class Trial:
    """What real training steps at one batch size used.

    Args:
        batch_size: samples in each step, on this rank.
        outcome: ``"ok"``, or ``"out_of_memory"`` when a step ran out of memory (the peaks are then incomplete).
        phase_peak_bytes: highest allocated bytes in each phase that ran (keys from :data:`PHASES`), the worst of the
            measured steps. On the host: the resident set.
        noise_bytes: by how much the peak of one and the same phase differed between the measured steps, without one
            that found nothing cached.
        peak_reserved_bytes: highest bytes that the allocator held from the device; ``None`` where it reserves none.
        step_seconds: median wall time of a measured step (of a micro-batch under gradient accumulation), with the
            making of the batch from samples that are at hand; ``None`` when none was completed.
        measured_steps: how many full steps the peaks are taken from (a warm-up is not counted).
        full_steps: how many full steps ran through at this size, the warm-up too.
        samples_run: samples that went through training steps, warm-up included.
        worker_bytes: what the loader's workers hold at this size; on the host the peaks include it.
        fixed_bytes: what is in use at every moment of a step, whatever its size: what lasts from one step to the next,
            but for gradients. 0 where it is not known.
        loose_share: share of what the steps added to the memory that was in no block when forward ended, as holes in
            the host's heap: that part differs from run to run. ``None`` where it is not known, or nothing is loose.
        error: first line of the error that was taken for out of memory; empty otherwise.
    """

    batch_size: int
    outcome: Outcome
    phase_peak_bytes: Mapping[str, int]
    noise_bytes: int = 0
    peak_reserved_bytes: int | None = None
    step_seconds: float | None = None
    measured_steps: int = 0
    full_steps: int = 0
    samples_run: int = 0
    worker_bytes: int = 0
    fixed_bytes: int = 0
    loose_share: float | None = None
    error: str = ""

    @property
    def peak_bytes(self) -> int:
        """Highest allocated bytes inside a step, over all phases; 0 when nothing was measured."""
        return max(self.phase_peak_bytes.values(), default=0)

    @property
    def held_bytes(self) -> int:
        """What the device had to give: reserved bytes where the allocator reserves, else allocated bytes."""
        return max(self.peak_bytes, self.peak_reserved_bytes or 0)


@dataclass(frozen=True)
class Line:
    """A straight line over the batch size, with what is known of its error.

    Args:
        intercept: value at batch size 0 (bytes or seconds).
        slope: growth with each sample (bytes or seconds).
        noise: largest distance by which a measurement may be off the line (same unit as ``intercept``): the larger of
            the residuals and the noise of the measurement itself.
        first_batch_size: smallest batch size that the line was fitted to.
        last_batch_size: largest batch size that the line was fitted to.
        repeatability: share of the growth since ``first_batch_size`` by which another run may differ (0.0 where the
            device repeats itself exactly).
    """

    intercept: float
    slope: float
    noise: float
    first_batch_size: int
    last_batch_size: int
    repeatability: float = 0.0

    def at(self, batch_size: float) -> float:
        """The value that the line expects at ``batch_size`` samples."""
        return self.intercept + self.slope * batch_size

    def upper(self, batch_size: float) -> float:
        """The value not exceeded at ``batch_size`` if every measurement was off by at most ``noise``.

        Inside the measured range that is the line plus the noise; beyond it the slope too may be off by
        ``noise / (last_batch_size - first_batch_size)``. What the device cannot repeat comes on top.
        """
        span = self.last_batch_size - self.first_batch_size
        beyond = max(0.0, batch_size - self.last_batch_size)
        grown = self.slope * max(0.0, batch_size - self.first_batch_size)
        return self.at(batch_size) + self.noise * (1.0 + (beyond / span if span else 0.0)) + self.repeatability * grown


@dataclass(frozen=True)
class MemoryModel:
    """Peak memory of a step as a function of the batch size: the highest of one line per phase.

    Args:
        lines: phase -> line in allocated bytes over samples.
        reserved_ratio: reserved over allocated bytes as measured at the largest size (1.0 where nothing is reserved).
    """

    lines: Mapping[str, Line]
    reserved_ratio: float = 1.0

    def predict_bytes(self, batch_size: float) -> float:
        """Expected peak, in bytes of the kind that the limit counts (reserved where there is such a thing)."""
        return self.reserved_ratio * max(line.at(batch_size) for line in self.lines.values())

    def upper_bytes(self, batch_size: float) -> float:
        """Upper bound of the peak, in the same bytes as :meth:`predict_bytes`."""
        return self.reserved_ratio * max(line.upper(batch_size) for line in self.lines.values())

    def phase_at(self, batch_size: float) -> str:
        """The phase in which the peak is expected at ``batch_size`` samples."""
        return max(self.lines, key=lambda phase: self.lines[phase].at(batch_size))


@dataclass(frozen=True)
class TimeModel:
    """Wall time of a step as a function of the batch size: ``step_seconds = t0 + c * batch_size``.

    Args:
        line: seconds over samples; the intercept ``t0`` is what a step costs whatever its size, the slope ``c`` the
            work for each sample.
    """

    line: Line

    def step_seconds(self, batch_size: float) -> float:
        """Expected wall time of one step, in seconds."""
        return self.line.at(batch_size)

    def samples_per_second(self, batch_size: float) -> float:
        """Expected throughput; ``inf`` where the line says that a step takes no time."""
        seconds = self.step_seconds(batch_size)
        return batch_size / seconds if seconds > 0 else math.inf


@dataclass(frozen=True)
class SearchLimits:
    """What a search has to respect.

    Args:
        limit_bytes: what this process may hold.
        min_batch_size: smallest size worth trying, in samples.
        max_batch_size: largest size worth trying, in samples.
        max_reason: what set ``max_batch_size``: the data set, the user, the samples wanted for each optimizer step, or
            what loader workers may hold beside a device.
        multiple_of: sizes are rounded down to a multiple of it; ``None``: sizes of 64 and more to a multiple of 8.
        objective: ``"memory"`` for the largest size that fits, ``"throughput"`` for the smallest that is as good as
            the fastest.
        target_batch_size: samples wanted for each optimizer step over all ranks; sizes are then those of which a whole
            number makes the target. ``None``: not wanted.
        ranks: processes that train together.
    """

    limit_bytes: int
    min_batch_size: int
    max_batch_size: int
    max_reason: SizeLimit
    multiple_of: int | None = None
    objective: Objective = "memory"
    target_batch_size: int | None = None
    ranks: int = 1


@dataclass(frozen=True)
class NextSize:
    """The next size to try, and why.

    Args:
        batch_size: samples to run.
        reason: one sentence for the person who watches.
        may_be_last: whether this is the answer if it fits as predicted, so that steps at it are worth most.
    """

    batch_size: int
    reason: str
    may_be_last: bool = False


@dataclass(frozen=True)
class SearchFailed:
    """No size can be named, and why.

    Args:
        reason: one sentence: what was seen, and what would help.
        trials: what had been run by then.
    """

    reason: str
    trials: tuple[Trial, ...] = ()
