"""From trials to lines: peak memory of each phase, and wall time of a step, over the batch size.

Pure: nothing here imports torch or Lightning.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lightning_batchmem.plan.records import PHASES, Line, MemoryModel, SearchFailed, TimeModel, Trial, mib

ROUNDING_BYTES = 1
"""A measurement is a whole number of bytes, the law behind it is not."""

FLOAT_SHARE = 1e-12
"""Share of a value that double precision may lose in a least-squares fit: 1 byte of a terabyte."""


def worst_per_size(trials: Iterable[Trial]) -> list[Trial]:
    """One trial for each batch size that ran through, the worst of its repetitions, smallest size first.

    Args:
        trials: any trials; those that ran out of memory are left out.

    Returns:
        Merged trials: the highest peaks and the longest time of a size. The noise of a merged trial also covers how
        far the repetitions lie apart.
    """
    by_size: dict[int, Trial] = {}
    for trial in trials:
        if trial.outcome == "ok":
            other = by_size.get(trial.batch_size)
            by_size[trial.batch_size] = _worse(other, trial) if other else trial
    return [by_size[size] for size in sorted(by_size)]


def find_contradiction(trials: Sequence[Trial], repeatability: float = 0.0) -> str | None:
    """What in these trials no memory law can explain.

    The peak is the maximum over time of ``a + b * batch_size`` with ``b >= 0``: it never falls as the batch grows.
    Only the highest phase is held to that. A lower phase may fall (a library picks another algorithm): it gets a flat
    line with its own residuals as the noise, and the peak does not depend on it.

    Args:
        trials: everything that was run.
        repeatability: share of the growth by which peaks at one size differ between runs (0 on CUDA).

    Returns:
        One sentence that names sizes and MiB, or ``None`` when the trials can be trusted.
    """
    ok = worst_per_size(trials)
    failed = min((trial.batch_size for trial in trials if trial.outcome == "out_of_memory"), default=None)
    if failed is not None and ok and ok[-1].batch_size >= failed:
        return (
            f"{ok[-1].batch_size} samples ran ({mib(ok[-1].peak_bytes)}) although {failed} had run out of memory: "
            "something else is using the memory."
        )
    highest: Trial | None = None
    for trial in ok:
        if not trial.phase_peak_bytes:
            return f"no peak was measured at {trial.batch_size} samples."
        if highest is None or trial.peak_bytes >= highest.peak_bytes:
            highest = trial
            continue
        lasting = min(ok[0].fixed_bytes or ok[0].peak_bytes, ok[0].peak_bytes)
        growth = highest.peak_bytes - lasting  # what comes and goes in a step, where that is known
        noise: float = highest.noise_bytes + trial.noise_bytes
        if repeatability:  # two steps at a size may agree by chance where those of another differed
            noise = 2 * max(other.noise_bytes for other in ok) + repeatability * growth
        if highest.peak_bytes - trial.peak_bytes > noise + ROUNDING_BYTES:
            return (
                f"the peak fell from {mib(highest.peak_bytes)} at {highest.batch_size} samples to "
                f"{mib(trial.peak_bytes)} at {trial.batch_size}, by more than the noise ({mib(noise)}): "
                "no line can be trusted; caches or other work on the device may disturb the measurement."
            )
    return None


def fit_memory(trials: Sequence[Trial], repeatability: float = 0.0) -> MemoryModel | SearchFailed:
    """Fit one line of peak bytes over samples to each phase.

    The law of a phase is convex and piecewise linear, so the largest sizes tell most about larger ones: a line is
    fitted to the longest run of the largest sizes that lies on one line within the noise, and goes through the last
    two sizes where no three do.

    Args:
        trials: what was run; several trials of one size count as the worst of them.
        repeatability: share of the growth by which peaks at one size differ between runs (0 on CUDA, where the
            allocator counts exactly; host memory differs from process to process).

    Returns:
        The lines in bytes, or a refusal: fewer than two sizes, a peak that falls by more than the noise, or a size
        that ran although a smaller or equal one had run out of memory.

    Source: least squares as in :func:`statistics.linear_regression`; convexity: the peak is the maximum over the
    moments of a step of (fixed bytes + bytes for each sample * samples).
    """
    problem = find_contradiction(trials, repeatability)
    if problem:
        return SearchFailed(problem, tuple(trials))
    if (model := lines_through(trials, repeatability)) is None:
        ok = worst_per_size(trials)
        seen = f"only {ok[0].batch_size} samples ({mib(ok[0].peak_bytes)})" if ok else "no size"
        return SearchFailed(f"a line needs two batch sizes that ran, got {seen}.", tuple(trials))
    return model


def lines_through(trials: Sequence[Trial], repeatability: float = 0.0) -> MemoryModel | None:
    """The lines of :func:`fit_memory` through trials that contradict nothing; ``None`` with fewer than two sizes.

    Args:
        trials: as of :func:`fit_memory`.
        repeatability: likewise; it may be less than that with which the trials were found to agree.
    """
    ok = worst_per_size(trials)
    if len(ok) < 2 or not all(trial.phase_peak_bytes for trial in ok):
        return None
    names = {phase for trial in ok for phase in trial.phase_peak_bytes}
    ordered = [*(phase for phase in PHASES if phase in names), *sorted(names.difference(PHASES))]
    lines = {phase: _phase_line(ok, phase, repeatability) for phase in ordered}
    return MemoryModel(lines, _reserved_ratio(ok))


def fit_time(trials: Sequence[Trial]) -> TimeModel | None:
    """Fit the wall time of a step, ``step_seconds = t0 + c * batch_size``, to the trials that were timed.

    Args:
        trials: what was run; trials that ran out of memory or have no ``step_seconds`` are left out.

    Returns:
        The line in seconds over samples, neither of whose parts is negative (a step takes time, and more samples never
        take less), with the largest residual as its noise; ``None`` with fewer than two timed sizes.

    Source: a step costs a fixed launch overhead ``t0`` plus ``c`` for each sample: the start-up time and the asymptotic
    rate of Hockney and Jesshope, Parallel Computers 2, 1988 (n-half and r-infinity); least squares as in
    :func:`statistics.linear_regression`.
    """
    points = [(t.batch_size, t.step_seconds) for t in trials if t.outcome == "ok" and t.step_seconds is not None]
    sizes, seconds = [size for size, _ in points], [value for _, value in points]
    if len(set(sizes)) < 2:
        return None
    slope, intercept = statistics.linear_regression(sizes, seconds)
    if slope < 0:
        slope, intercept = 0.0, statistics.fmean(seconds)
    elif intercept < 0:
        slope, intercept = statistics.linear_regression(sizes, seconds, proportional=True)
    noise = max(abs(value - intercept - slope * size) for size, value in points)
    return TimeModel(Line(intercept, slope, noise, min(sizes), max(sizes)))


def _worse(a: Trial, b: Trial) -> Trial:
    phases = {**a.phase_peak_bytes, **b.phase_peak_bytes}
    peaks = {p: max(a.phase_peak_bytes.get(p, 0), b.phase_peak_bytes.get(p, 0)) for p in phases}
    apart = (abs(a.phase_peak_bytes[p] - b.phase_peak_bytes[p]) for p in a.phase_peak_bytes if p in b.phase_peak_bytes)
    reserved = [r for r in (a.peak_reserved_bytes, b.peak_reserved_bytes) if r is not None]
    seconds = [s for s in (a.step_seconds, b.step_seconds) if s is not None]
    return replace(
        a,
        phase_peak_bytes=peaks,
        noise_bytes=max(a.noise_bytes, b.noise_bytes, *apart),
        peak_reserved_bytes=max(reserved, default=None),
        step_seconds=max(seconds, default=None),
        measured_steps=max(a.measured_steps, b.measured_steps),
        fixed_bytes=min(a.fixed_bytes, b.fixed_bytes),
        loose_share=max((s for s in (a.loose_share, b.loose_share) if s is not None), default=None),
    )


def _reserved_ratio(ok: Sequence[Trial]) -> float:
    for trial in reversed(ok):
        if trial.peak_reserved_bytes is not None and trial.peak_bytes > 0:
            return max(1.0, trial.peak_reserved_bytes / trial.peak_bytes)
    return 1.0


def _phase_line(trials: Sequence[Trial], phase: str, repeatability: float) -> Line:
    points = {trial.batch_size: trial.phase_peak_bytes[phase] for trial in trials if phase in trial.phase_peak_bytes}
    noise = {trial.batch_size: trial.noise_bytes for trial in trials}
    sizes = sorted(points)
    if len(sizes) == 1:  # seen at one size only: nothing fixed is known, so all of it may grow with the batch
        size = sizes[0]
        return Line(0.0, points[size] / size, float(noise[size] + ROUNDING_BYTES), size, size)
    for first in range(len(sizes) - 1):
        run = sizes[first:]
        intercept, slope, residuals = _least_squares(run, points)
        off = max(noise[size] for size in run) + ROUNDING_BYTES + FLOAT_SHARE * points[run[-1]]
        grown = points[run[-1]] - points[sizes[0]]  # sizes that differ by what the device cannot repeat are on one line
        if len(run) == 2 or max(map(abs, residuals)) <= off + repeatability * max(0, grown):
            break
    return Line(intercept, slope, _line_noise(residuals, off), run[0], run[-1], repeatability)


def _least_squares(sizes: Sequence[int], points: Mapping[int, int]) -> tuple[float, float, list[float]]:
    values = [points[size] for size in sizes]
    slope, intercept = statistics.linear_regression(sizes, values)
    if slope < 0:  # memory never falls as the batch grows: what looks so is noise, and shows in the residuals
        slope, intercept = 0.0, statistics.fmean(values)
    return intercept, slope, [value - intercept - slope * size for size, value in zip(sizes, values, strict=True)]


def _line_noise(residuals: Sequence[float], off: float) -> float:
    """The noise with which ``Line.upper`` is not exceeded by the next measurement, if the law goes on straight.

    Two measurements of one size differ by at most ``off``, so a true value lies within ``off / 2`` of its
    measurement. The steepest law through the first and the last point then gives a next measurement of at most
    ``line + r_last + off + (r_last - r_first + off) * beyond / span``; ``Line.upper`` has one noise for both terms.
    """
    first, last = residuals[0], residuals[-1]
    return max(max(map(abs, residuals)), off + max(0.0, last, last - first))
