"""From trials to lines: peak memory of each phase over the batch size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from lightning_batchmem.plan.records import MIB, PHASES, Line, MemoryModel, Trial

ON_ONE_LINE_SHARE = 0.005
"""Sizes lie on one line if no residual is above this share of the growth.

Live bytes are exact, so only rounding is left.
"""

FLAT_SHARE = 0.05
FLAT_BYTES = 64 * MIB
"""Live bytes are flat if they grow by less than this share of the growth of needed bytes.

The needed bytes have to grow by several segments of the allocator. Under CUDA graphs a replay
allocates nothing.
"""


def ran_through(trials: Iterable[Trial]) -> list[Trial]:
    """One trial for each size whose steps ran to their end, smallest size first.

    Repetitions of a size are combined into the worst of them.
    """
    by_size: dict[int, list[Trial]] = {}
    for trial in trials:
        if trial.outcome != "out_of_memory" and trial.memory.phase_peak_bytes:
            by_size.setdefault(trial.batch_size, []).append(trial)
    worst = {size: t[0] if len(t) == 1 else Trial.worst_of(t) for size, t in by_size.items()}
    return [worst[size] for size in sorted(worst)]


def fit_memory(trials: Iterable[Trial]) -> MemoryModel | None:
    """Fit one line of peak bytes over samples to each phase; ``None`` with fewer than two sizes.

    At any moment of a step the live bytes are ``a + b * batch_size``, so the peak of a phase is a
    maximum of lines: convex, and never falling. The largest sizes therefore predict larger ones
    best. A line is fitted to the longest run of the largest sizes that lies on one line, and goes
    through the last two sizes where no three do. Trials of one size count as the worst of them;
    sizes with a higher peak than a larger size are left out, because a library may take a larger
    workspace at a smaller size.

    Source: least squares as in :func:`statistics.linear_regression`.
    """
    ran = ran_through(trials)
    ran = [
        trial
        for place, trial in enumerate(ran)
        if all(later.memory.peak_bytes >= trial.memory.peak_bytes for later in ran[place:])
    ]
    if len(ran) < 2:
        return None
    if _is_flat(ran):
        needed_bytes = {trial.batch_size: trial.memory.needed_bytes for trial in ran}
        return MemoryModel({"forward": _line(needed_bytes, ON_ONE_LINE_SHARE)})
    # The resident set does not count live bytes exactly, so its bend is noise.
    is_exact = all(trial.memory.is_exact for trial in ran)
    largest_residual_share = ON_ONE_LINE_SHARE if is_exact else math.inf
    lines = {}
    for phase in PHASES:
        peaks = {
            trial.batch_size: trial.memory.phase_peak_bytes[phase]
            for trial in ran
            if phase in trial.memory.phase_peak_bytes
        }
        if peaks:
            lines[phase] = _line(peaks, largest_residual_share)
    return MemoryModel(lines)


def _is_flat(ran: Sequence[Trial]) -> bool:
    """Whether live bytes stay flat in every phase while needed bytes grow, as under CUDA graphs.

    Where an optimizer step has the highest peak, the phases below it may grow all the same.
    """
    smallest_peaks = ran[0].memory.phase_peak_bytes
    grown_bytes = max(
        peak_bytes - smallest_peaks.get(phase, 0)
        for phase, peak_bytes in ran[-1].memory.phase_peak_bytes.items()
    )
    grown_needed_bytes = ran[-1].memory.needed_bytes - ran[0].memory.needed_bytes
    is_growing = grown_needed_bytes > FLAT_BYTES
    return is_growing and grown_bytes < FLAT_SHARE * grown_needed_bytes


def _line(points: Mapping[int, int], largest_residual_share: float) -> Line:
    """The line through the longest run of the largest sizes that lies on one line."""
    sizes = sorted(points)
    # With one size only, no fixed part is known, so all of it may grow with the batch.
    if len(sizes) == 1:
        return Line(0.0, points[sizes[0]] / sizes[0], sizes[0], sizes[0])
    grown_bytes = max(0, points[sizes[-1]] - points[sizes[0]])
    # One byte is rounding.
    largest_residual = 1 + largest_residual_share * max(1, grown_bytes)
    for first in range(len(sizes) - 1):
        run = sizes[first:]
        values = [points[size] for size in run]
        slope, intercept = statistics.linear_regression(run, values)
        # A phase below the highest one may fall with the size, but memory as a whole never does.
        if slope < 0:
            slope = 0.0
            intercept = float(max(values))
        residual = max(
            abs(value - intercept - slope * size) for size, value in zip(run, values, strict=True)
        )
        if len(run) == 2 or residual <= largest_residual:
            break
    return Line(intercept, slope, run[0], run[-1])
