"""From trials to lines: peak memory of each phase, and wall time of a step, over the batch size."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from lightning_batchmem.plan.records import MIB, PHASES, Line, MemoryModel, TimeModel, Trial

# Sizes count as on one line up to this largest residual, as a share of the growth. Live bytes are
# exact, so sizes on one line leave only rounding, and a bend between two sizes leaves more.
_ON_ONE_LINE = 0.005
# Under CUDA graphs a replay allocates nothing: live bytes stay flat while the pool behind the
# graphs grows. Live bytes count as flat if they grow by less than this share of the growth of held
# bytes.
_FLAT_SHARE = 0.05
# Held bytes must have grown by more than this, which is more than a few segments of the allocator.
_FLAT_BYTES = 64 * MIB


def ran_through(trials: Iterable[Trial]) -> list[Trial]:
    """One trial for each size whose steps ran to their end, smallest size first.

    Repetitions of a size are combined into the worst of them.
    """
    by_size: dict[int, list[Trial]] = {}
    for trial in trials:
        if trial.outcome != "out_of_memory" and trial.phase_peak_bytes:
            by_size.setdefault(trial.batch_size, []).append(trial)
    return [Trial.worst_of(by_size[size]) for size in sorted(by_size)]


def dropped_sizes(trials: Iterable[Trial]) -> list[int]:
    """Sizes whose peak lies above that of a larger size.

    A library may take a larger workspace at a smaller size.
    """
    ran = ran_through(trials)
    return [
        trial.batch_size
        for i, trial in enumerate(ran)
        if any(t.peak_bytes < trial.peak_bytes for t in ran[i:])
    ]


def fit_memory(trials: Sequence[Trial]) -> MemoryModel | None:
    """Fit one line of peak bytes over samples to each phase; ``None`` with fewer than two sizes.

    At any moment of a step the live bytes are ``a + b * batch_size``, so the peak of a phase is a
    maximum of lines: convex, and never falling. The largest sizes therefore predict larger ones
    best. A line is fitted to the longest run of the largest sizes that lies on one line, and goes
    through the last two sizes where no three do. Trials of one size count as the worst of them;
    sizes with a higher peak than a larger size are left out.

    Source: least squares as in :func:`statistics.linear_regression`.
    """
    left_out = dropped_sizes(trials)
    ran = [trial for trial in ran_through(trials) if trial.batch_size not in left_out]
    if len(ran) < 2:
        return None
    if _is_flat(ran):
        held = {trial.batch_size: trial.held_bytes for trial in ran}
        return MemoryModel({"forward": _line(held, is_exact=True)})
    is_exact = all(trial.is_exact for trial in ran)
    lines = {}
    for phase in PHASES:
        peaks = {
            trial.batch_size: trial.phase_peak_bytes[phase]
            for trial in ran
            if phase in trial.phase_peak_bytes
        }
        if peaks:
            lines[phase] = _line(peaks, is_exact=is_exact)
    return MemoryModel(lines)


def fit_time(trials: Sequence[Trial]) -> TimeModel | None:
    """Fit the wall time of a step, ``step_seconds = t0 + c * batch_size``, to the timed trials.

    Neither part of the line is negative. ``None`` with fewer than two timed sizes.

    Source: a step costs a fixed launch overhead ``t0`` plus ``c`` for each sample: the start-up
    time and the asymptotic rate of Hockney and Jesshope, Parallel Computers 2, 1988 (n-half and
    r-infinity); least squares as in :func:`statistics.linear_regression`.
    """
    points = [
        (t.batch_size, t.step_seconds)
        for t in trials
        if t.outcome != "out_of_memory" and t.step_seconds is not None
    ]
    sizes = [size for size, _ in points]
    seconds = [value for _, value in points]
    if len(set(sizes)) < 2:
        return None
    slope, intercept = statistics.linear_regression(sizes, seconds)
    if slope < 0:
        slope = 0.0
        intercept = statistics.fmean(seconds)
    elif intercept < 0:
        slope, intercept = statistics.linear_regression(sizes, seconds, proportional=True)
    return TimeModel(Line(intercept, slope, min(sizes), max(sizes)))


def _is_flat(ran: Sequence[Trial]) -> bool:
    grown_bytes = ran[-1].peak_bytes - ran[0].peak_bytes
    grown_held_bytes = ran[-1].held_bytes - ran[0].held_bytes
    return grown_held_bytes > _FLAT_BYTES and grown_bytes < _FLAT_SHARE * grown_held_bytes


def _line(points: Mapping[int, int], *, is_exact: bool) -> Line:
    sizes = sorted(points)
    # With one size only, no fixed part is known, so all of it may grow with the batch.
    if len(sizes) == 1:
        return Line(0.0, points[sizes[0]] / sizes[0], sizes[0], sizes[0])
    grown = max(0, points[sizes[-1]] - points[sizes[0]])
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
        if not is_exact or len(run) == 2 or residual <= _ON_ONE_LINE * grown + 1:
            break
    return Line(intercept, slope, run[0], run[-1])
