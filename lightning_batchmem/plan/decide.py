"""From everything run so far to the next size to try, or the plan.

Pure: nothing here imports torch or Lightning. The caller's loop is::

    while isinstance(step := decide(trials, bounds), Probe):
        trials.append(measure(step.batch_size))
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lightning_batchmem.plan.fit import find_contradiction, fit_time, lines_through
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import (
    LimitedBy,
    Line,
    MemoryModel,
    NextSize,
    SearchFailed,
    SearchLimits,
    Trial,
    mib,
)
from lightning_batchmem.plan.sizes import (
    MIN_GAIN_WHEN_COSTLY,
    NOTABLE,
    NOTABLE_NOISE,
    SearchState,
    disagreement,
    guaranteed_size,
    largest_within,
    min_gain_share,
    repeatability_of,
    rounded,
    search_state,
    size_range,
    upper_held_bytes,
    without_noise,
    worth_probing,
)

# Source of the figures below: simulated laws, straight and bent, with and without noise; tests/plan/test_decide.py
# checks what they lead to. Larger growth or share overruns more bent laws, smaller ones take more sizes.
FIRST_SIZE = 2  # a batch of one sample breaks BatchNorm and takes other code paths (field notes: Ultralytics PR26224)
MAX_SIZES = 10  # a longer search is trial and error; each size may cost a compilation
SECOND_GROWTH = 4  # at most so many times the first size, where that surely fits
CAUTIOUS_GROWTH = 8  # at most so many times the largest size while no probe has confirmed the lines
CAUTIOUS_SHARE = 1 / 8  # of the room left, likewise
TRUSTED_GROWTH = 48  # lines confirmed over a small span may still bend; more overshoots further, less takes more sizes
AGREEMENT = 0.02  # a probe confirms the lines when it is off by at most this share of its growth, noise aside
HALF_WAY = 2  # where a stop on the way to the end is made: late enough to see a bend ...
FIRST_QUARTER = 4  # ... but where steps repeat themselves badly early, to leave more of them for the end
CLOSE = 0.03  # a good and a failed size this near to each other end the search
THROUGHPUT_SHARE = 0.95  # of the best throughput: beyond, more memory buys next to no speed


def decide(
    trials: Sequence[Trial], search_limits: SearchLimits, repeatability: float = 0.0
) -> NextSize | Plan | SearchFailed:
    """Say which batch size to run next, or which one to use.

    Grows from two samples along the upper bound of the fitted lines, cautiously until a probe has confirmed them, and
    steps down by itself from a size that did not fit. It asks for at most ten sizes, and the planned size has been
    run with its peak within the limit.

    Args:
        trials: everything run so far, in the order in which it was run.
        search_limits: limit in bytes, range of sizes in samples, rounding and objective.
        repeatability: share of the growth by which peaks at one size differ between runs (0 on CUDA), where the
            trials do not say it themselves.

    Returns:
        A probe with the next size, a plan, or a refusal: nothing fits, or the measurements follow no law.

    Example:
        >>> limits = SearchLimits(limit_bytes=1000, min_batch_size=1, max_batch_size=50, max_reason="dataset")
        >>> trials = []
        >>> while isinstance(step := decide(trials, limits), NextSize):
        ...     peak = 100 + 10 * step.batch_size
        ...     trials.append(Trial(step.batch_size, "ok", {"forward": peak}, measured_steps=3))
        >>> step.batch_size, step.limited_by
        (50, 'dataset')
    """
    trials = tuple(trials)
    lowest, highest = size_range(search_limits)
    if lowest > highest:
        return SearchFailed(_empty_range(search_limits), trials)
    if not trials:
        if search_limits.max_reason == "dataset" and highest < FIRST_SIZE:
            return _unsearched_plan(highest, search_limits)
        first = min(max(lowest, rounded(FIRST_SIZE, search_limits, up=True)), highest)
        return NextSize(first, f"{first} samples: the smallest size worth measuring.")
    problem = find_contradiction(trials, repeatability)
    if problem:
        return SearchFailed(problem, trials)
    search = search_state(trials, search_limits, repeatability_of(trials, repeatability), lowest, highest)
    if not search.fitting:
        return _smaller(search)
    if search_limits.objective == "throughput" and trials[-1].batch_size < search.best.batch_size:
        return _throughput_plan(search, trials[-1].batch_size)  # only a probe for throughput goes back below the best
    step = _grow(search) if search.failed_size is None else _step_down(search)
    may_probe = len({trial.batch_size for trial in trials}) < MAX_SIZES
    if isinstance(step, NextSize) and may_probe:
        return step
    settled = _out_of_sizes(search) if isinstance(step, NextSize) else step
    if search_limits.objective == "throughput":
        return _knee(search, settled, may_probe)
    return _plan(search, search.best, *settled)


def _empty_range(search_limits: SearchLimits) -> str:
    wanted = f"no multiple of {search_limits.multiple_of}" if search_limits.multiple_of else "no size"
    smallest = search_limits.min_batch_size
    return f"{wanted} lies within the bounds: min_batch_size is {smallest} and {_ceiling(search_limits)}."


def _ceiling(search_limits: SearchLimits) -> str:
    size = search_limits.max_batch_size
    if search_limits.max_reason == "dataset":
        return f"the data set leaves room for no more than {size} samples"
    if search_limits.max_reason == "host memory":
        return f"with more than {size} samples the loader's workers would fill the host's memory"
    if search_limits.max_reason == "target_batch_size":
        return f"target_batch_size needs no more than {size} samples on a rank"
    return f"max_batch_size is {size} samples"


def _unsearched_plan(size: int, search_limits: SearchLimits) -> Plan:
    """A data set below the smallest probe leaves no choice, so that nothing has to be run."""
    reason = f"{size} samples: {_ceiling(search_limits)}; nothing was run."
    return Plan(size, "dataset", False, search_limits.limit_bytes, None, None, None, (), None, None, reason)


def _smaller(search: SearchState) -> NextSize | SearchFailed:
    failed, too_large, limit = search.failed_size, search.too_large, search.search_limits.limit_bytes
    if failed is not None and search.lowest < failed:
        return NextSize(search.lowest, f"{search.lowest} samples: {failed} did not fit.")
    said = next((f" ({trial.error})" for trial in search.trials if trial.error), "") if too_large is None else ""
    return SearchFailed(
        f"nothing fits: {failed} samples, the smallest size allowed, {_held(too_large)}{said} under a limit of "
        f"{mib(limit)}; a smaller model, smaller samples, lower precision or checkpointed activations would help"
        + (", and min_batch_size=1 lets a single sample be tried." if search.lowest == FIRST_SIZE else "."),
        search.trials,
    )


def _out_of_sizes(search: SearchState) -> tuple[LimitedBy, str]:
    room = _room(search.best, search.search_limits)
    return "memory", f"the largest that fits of the {MAX_SIZES} sizes that were run; {room}."


def _grow(search: SearchState) -> NextSize | tuple[LimitedBy, str]:
    """The next larger size when everything has fitted so far, or why there is none."""
    best, search_limits = search.best, search.search_limits
    size, limit, following = best.batch_size, search_limits.limit_bytes, search.following
    if size >= search.highest:
        return search_limits.max_reason, f"{_ceiling(search_limits)}; {_room(best, search_limits)}."
    known = min(search.highest, guaranteed_size(search))
    model = lines_through(search.fitting, search.repeatability)
    if model is None:
        target = max(following, rounded(min(SECOND_GROWTH * size, known), search_limits))
        return _probe(target, "a second size, to see the growth with each sample", None, limit)
    largest_fitting = rounded(largest_within(model, limit, known, search.highest), search_limits)
    if not worth_probing(search, largest_fitting):
        return "memory", _why_not_more(search, model)
    off = disagreement(search)
    if off <= AGREEMENT:
        growth, share, why = TRUSTED_GROWTH, 1 - 2 * off, "the last probe agreed with the lines"
    else:
        growth, share, why = CAUTIOUS_GROWTH, CAUTIOUS_SHARE, "one step, to see whether the lines hold"
    within = best.held_bytes + share * (limit - best.held_bytes)
    careful = largest_within(model, within, known, search.highest)
    # A step that is not notable would teach nothing, so take at least that.
    target = min(
        largest_fitting, growth * size, max(careful, math.ceil((1 + min_gain_share(search, largest_fitting)) * size))
    )
    # A stop just before the end costs nearly as much as the end, and says no more. Nor go to the end at once where the
    # noise of what was measured so far is what makes it the end: on the way there the lines get sharper. Unless that
    # is next to nothing: where all is noise, small steps lead nowhere.
    hopeful = largest_within(without_noise(model), limit, known, search.highest)
    sharpens = target < largest_fitting or hopeful >= (1 + MIN_GAIN_WHEN_COSTLY) * largest_fitting
    stop = largest_fitting // (HALF_WAY if search.repeatability == 0 else FIRST_QUARTER)
    if sharpens and 2 * size <= stop < target:
        target = stop
    size = max(following, rounded(target, search_limits))
    return _probe(size, why, model, limit, may_be_last=size >= largest_fitting)


def _step_down(search: SearchState) -> NextSize | tuple[LimitedBy, str]:
    """A size between the largest that fitted and the smallest that did not, or why there is none."""
    size, failed, limit = search.best.batch_size, search.failed_size or 0, search.search_limits.limit_bytes
    if search.following >= failed or failed - size <= CLOSE * size:
        return "memory", _why_not_more(search, None)
    lines = lines_through(search.fitting, search.repeatability)
    bold = largest_within(lines, limit, size, failed - 1) if lines else failed - 1
    target = max(search.following, min(bold, math.isqrt(size * failed)))
    # The law is convex: lines through the failed size, where it was measured, are an upper bound below it. Where the
    # device does not repeat itself the next measurement may again lie somewhat higher.
    across = _across(search, search.too_large) if search.too_large else None
    spare = NOTABLE_NOISE * search.repeatability * (limit - search.fitting[0].held_bytes)
    safe = largest_within(across, limit - spare, size, failed - 1) if across else size
    model = across if safe >= target else lines
    target = rounded(max(target, safe), search.search_limits)
    if not worth_probing(search, target):
        return "memory", _why_not_more(search, model)
    why = f"between {size}, which fitted, and {failed}, which did not"
    return _probe(max(search.following, target), why, model, limit, may_be_last=True)


def _across(search: SearchState, too_large: Trial) -> MemoryModel | None:
    """The lines through the sizes that fitted and the one that did not, as far as the latter was measured."""
    if search.repeatability == 0:
        return lines_through([*search.fitting, too_large], 0.0)
    # both ends were measured, and what either may hold in another run is known: between them nothing is added to that
    ends = [
        (one.batch_size, upper_held_bytes(one, search.fitting[0], search.repeatability))
        for one in (search.best, too_large)
    ]
    slope, intercept = statistics.linear_regression(*zip(*ends, strict=True))
    return MemoryModel({"forward": Line(intercept, slope, 0.0, ends[0][0], ends[1][0])})


def _knee(search: SearchState, settled: tuple[LimitedBy, str], may_probe: bool) -> NextSize | Plan:
    """The smallest size within five percent of the best throughput, once the largest size that fits is known.

    Source: with ``T(B) = t0 + c * B`` the throughput ``B / T(B)`` never falls, so it is best at the memory answer
    ``M``; ``B / T(B) = s * M / T(M)`` gives ``B = s * t0 * M / (t0 + c * M * (1 - s))``.
    """
    size, search_limits, time = search.best.batch_size, search.search_limits, fit_time(search.trials)
    if time is None:
        return _plan(search, search.best, *settled)
    t0, c, s = time.line.intercept, time.line.slope, THROUGHPUT_SHARE
    divisor = t0 + c * size * (1 - s)
    wanted = math.ceil(s * t0 * size / divisor) if divisor > 0 else size
    target = min(size, max(search.lowest, rounded(max(FIRST_SIZE, wanted), search_limits, up=True)))
    chosen = min(trial.batch_size for trial in search.fitting if trial.batch_size >= target)
    if may_probe and chosen != target:
        return NextSize(target, f"{target} samples: expected to reach {s:.0%} of the throughput at {size}.")
    return _throughput_plan(search, chosen) if chosen < size else _plan(search, search.best, *settled)


def _throughput_plan(search: SearchState, size: int) -> Plan:
    chosen = next(trial for trial in search.fitting if trial.batch_size == size)
    reached = f"{THROUGHPUT_SHARE:.0%} of the throughput at {search.best.batch_size}, the most that fits"
    return _plan(search, chosen, "throughput", f"enough for {reached}; {_room(chosen, search.search_limits)}.")


def _plan(search: SearchState, chosen: Trial, limited_by: LimitedBy, reason: str) -> Plan:
    size = chosen.batch_size
    smaller = lines_through([trial for trial in search.fitting if trial.batch_size < size], search.repeatability)
    return Plan(
        batch_size=size,
        limited_by=limited_by,
        verified=chosen.full_steps >= 2,
        limit_bytes=search.search_limits.limit_bytes,
        predicted_peak_bytes=round(smaller.predict_bytes(size)) if smaller else None,
        upper_peak_bytes=math.ceil(smaller.upper_bytes(size)) if smaller else None,
        measured_peak_bytes=chosen.held_bytes,
        trials=search.trials,
        memory=lines_through(search.trials, search.repeatability),
        time=fit_time(search.trials),
        reason=f"{size} samples: {reason}",
    )


def _probe(size: int, why: str, model: MemoryModel | None, limit: int, *, may_be_last: bool = False) -> NextSize:
    expected = f"; predicted up to {mib(model.upper_bytes(size))} of {mib(limit)}" if model else ""
    return NextSize(size, f"{size} samples: {why}{expected}.", may_be_last)


def _held(too_large: Trial | None) -> str:
    """What happened at a size that did not fit; ``over`` is its measurement, if it ran through."""
    if too_large is None:
        return "ran out of memory"
    unsure = f" (measured to within {mib(too_large.noise_bytes)})" if too_large.noise_bytes else ""
    return f"held {mib(too_large.held_bytes)}{unsure}"


def _room(trial: Trial, search_limits: SearchLimits) -> str:
    return f"it held {mib(trial.held_bytes)} of the {mib(search_limits.limit_bytes)} limit"


def _why_not_more(search: SearchState, model: MemoryModel | None) -> str:
    room, following = _room(search.best, search.search_limits), search.following
    if model is None:
        return f"{room}, and {search.failed_size} samples {_held(search.too_large)}."
    upper = model.upper_bytes(following)
    if upper > search.search_limits.limit_bytes:
        return f"{room}; the next size, {following}, is predicted to take up to {mib(upper)}."
    gain = min_gain_share(search, math.ceil((1 + NOTABLE) * search.best.batch_size))
    return f"{room}; what would fit beyond is less than {gain:.0%} more, which is not worth another probe."
