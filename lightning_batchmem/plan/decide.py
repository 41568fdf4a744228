"""From everything that was run to the next size to run, or the size to train with."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_batchmem.plan import sentences
from lightning_batchmem.plan.fit import dropped_sizes
from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import (
    Chosen,
    LimitedBy,
    NextSize,
    SearchFailed,
    Trial,
)
from lightning_batchmem.plan.rules import decide_on_device
from lightning_batchmem.plan.scaling import rounded
from lightning_batchmem.plan.search_state import SearchState
from lightning_batchmem.plan.throughput import (
    fastest,
    num_flat_sizes,
    num_refinements,
    size_between,
    size_to_time_again,
)

_MEMORY: LimitedBy = "memory"


def decide(
    trials: Sequence[Trial], limits: SearchLimits, policy: SearchPolicy | None = None
) -> NextSize | Chosen | SearchFailed:
    """Choose the next batch size to run, or the size to train with.

    Probes a ladder of small sizes, predicts the largest size that fits, and rehearses sizes on the
    way to it. For throughput, the sizes on the ladder are compared instead, and the fastest is
    rehearsed. The chosen size has passed a rehearsal, unless the data set leaves no choice. The
    rules of a device, where an error can be caught, are those of :func:`.decide_on_device`.

    Args:
        trials: everything that was run, in the order in which it was run.
        limits: limit in bytes, range of sizes in samples, rounding and objective.
        policy: the numbers that steer the search.

    Returns:
        The next size, the size to train with, or the reason why there is none.

    Example:
        >>> limits = SearchLimits(1000, min_batch_size=1, max_batch_size=50, max_reason="dataset")
        >>> trials = []
        >>> while isinstance(step := decide(trials, limits), NextSize):
        ...     peak_bytes = 100 + 10 * step.batch_size
        ...     trials.append(Trial(step.batch_size, "ok", {"forward": peak_bytes}, step.kind))
        >>> step.batch_size, step.limited_by, [trial.batch_size for trial in trials]
        (50, 'dataset', [2, 8, 40, 50])
    """
    policy = policy or SearchPolicy()
    if not limits.overrun_kills:
        return decide_on_device(trials, limits, policy)
    state = SearchState(tuple(trials), limits, policy)
    if state.lowest > state.highest:
        return SearchFailed(sentences.empty_range(limits))
    if not trials:
        return _first_size(state)
    step = _next_step(state)
    if isinstance(step, SearchFailed):
        return step
    if not isinstance(step, NextSize):
        return _choose(state, step)
    if step.kind == "probe" or step.batch_size in state.tried or state.sizes_left > 0:
        return step
    if state.passed:
        return _choose(state, _MEMORY)
    # A size that was probed costs no further size, so it is the last try.
    return NextSize(state.largest.batch_size, "rehearsal")


def _next_step(state: SearchState) -> NextSize | LimitedBy | SearchFailed:
    if not state.fitting:
        return _smallest_size(state)
    if state.is_for_throughput:
        return _next_size_for_throughput(state)
    return _next_size_for_memory(state)


# The sizes that show the memory line.


def _first_size(state: SearchState) -> NextSize | Chosen:
    limits = state.limits
    first = state.policy.first_size
    if limits.max_reason == "dataset" and limits.max_batch_size < first:
        reason = sentences.too_small_to_run(state.highest, limits)
        return Chosen(state.highest, "dataset", reason, is_verified=False)
    return NextSize(min(max(state.lowest, rounded(first, limits, up=True)), state.highest), "probe")


def _smallest_size(state: SearchState) -> NextSize | SearchFailed:
    if state.lowest < state.failed_size:
        return NextSize(state.lowest, "probe")
    could_be_one = state.lowest == state.policy.first_size
    return SearchFailed(
        sentences.nothing_fits(state.failed[-1], state.limits, could_be_one=could_be_one)
    )


def _second_size(state: SearchState) -> NextSize | LimitedBy:
    """A second size before there is a line: one that fits for certain, if there is one."""
    size = state.largest.batch_size
    highest = min(state.highest, state.failed_size - 1)
    following = rounded(size + 1, state.limits, up=True)
    if following > highest:
        return _MEMORY if state.passed else NextSize(size, "rehearsal")
    largest = min(state.policy.ladder_growth * size, state.guaranteed_size())
    second = state.rounded(int(min(largest, highest)))
    if state.failed:
        second = min(second, state.between_fit_and_failure())
    if second > size:
        return NextSize(second, "rehearsal" if second == state.highest else "probe")
    if not state.passed:
        # The next size may not fit.
        return NextSize(size, "rehearsal")
    return _MEMORY


def _next_rung(state: SearchState) -> int | None:
    """The next size of the ladder: below the candidate, and sure to fit."""
    if state.passed or state.failed:
        return None
    is_timed = state.is_for_throughput
    is_compiled = state.is_compiled and not is_timed
    if is_compiled and len(state.tried) >= state.policy.ladder_sizes_compiled:
        return None
    size = state.largest.batch_size
    candidate = state.candidate()
    largest = state.guaranteed_size()
    rung = state.rounded(state.policy.ladder_growth * size)
    if is_timed:
        # The last size is closer, because throughput may still rise.
        # A rehearsal keeps more room free than a probe needs.
        largest = min(largest, int(state.policy.climb[-1] * candidate))
        rung = min(rung, state.rounded(min(candidate, largest)))
        return rung if rung >= state.policy.least_gap * size else None
    # The first rehearsal measures how many bytes are held, and no probe goes beyond it.
    largest = min(largest, state.first_rehearsal_size())
    return rung if size < rung < min(candidate, largest + 1) else None


# The largest size.


def _next_size_for_memory(state: SearchState) -> NextSize | LimitedBy:
    """The next size, or what limits the size if no other one is worth a try."""
    if state.passed and state.passed[-1].batch_size >= state.highest:
        return state.limits.max_reason
    if state.memory is None:
        return _second_size(state)
    rung = _next_rung(state)
    if rung is not None:
        return NextSize(rung, "probe")
    return _climb(state, state.candidate())


def _climb(state: SearchState, candidate: int) -> NextSize | LimitedBy:
    """Approach the candidate in stages where exceeding the limit ends the process."""
    if not state.is_compiled:
        # Small sizes hardly show how many bytes a much larger one holds for each live byte.
        furthest = state.rounded(state.policy.ladder_growth * state.largest.batch_size)
        candidate = min(candidate, max(furthest, state.lowest))
    gain = 1 + state.policy.min_gain_when_killed
    least = gain * state.passed[-1].batch_size if state.passed else 0.0
    if state.passed and candidate < min(state.highest, least):
        return _MEMORY
    if state.failed:
        return NextSize(candidate, "rehearsal")
    stages = state.policy.climb[1:] if state.is_compiled else state.policy.climb
    for share in stages[len(state.passed) :]:
        fits = state.unrounded_predicted_size(1.0, 10**9)
        # A rehearsal below the candidate measures how many bytes are held. Probes do not.
        target = max(state.lowest, state.rounded(int(share * fits)), state.largest.batch_size)
        if least < target <= candidate / gain:
            return NextSize(target, "rehearsal")
    return NextSize(candidate, "rehearsal")


# The fastest size.


def _next_size_for_throughput(state: SearchState) -> NextSize | LimitedBy:
    """The next size to time or to rehearse, or what limits the fastest size."""
    limited_by: LimitedBy = "throughput"
    if num_flat_sizes(state.speeds, state.policy) < state.policy.flat_sizes:
        # Once sizes near the best one were run, only a failure leads to other sizes.
        if state.failed or not state.has_compared_speeds:
            step = _next_size_for_memory(state)
            if isinstance(step, NextSize) and _is_worth_timing(state, step):
                return step
        limited_by = _MEMORY
        if state.largest.batch_size == state.highest:
            limited_by = state.limits.max_reason
    size = _refinement(state)
    if size is not None:
        return NextSize(size, "probe")
    if not (state.is_compiled or state.failed):
        size = size_to_time_again(state.speeds, state.trials, state.policy)
        if size is not None:
            return NextSize(size, "timing")
    speed = fastest(state.speeds, state.policy)
    if speed is None:
        return limited_by
    if speed.batch_size not in state.passed_sizes:
        return NextSize(speed.batch_size, "rehearsal")
    return limited_by if speed.batch_size >= state.candidate() else "throughput"


def _is_worth_timing(state: SearchState, step: NextSize) -> bool:
    """Whether a step for the largest size may show a much higher throughput."""
    if step.kind == "probe" or not state.speeds:
        return True
    # A rehearsal near the limit is expensive, and less than four times the last size.
    is_far = step.batch_size >= state.policy.next_gap * state.largest.batch_size
    return is_far and num_flat_sizes(state.speeds, state.policy) == 0


def _refinement(state: SearchState) -> int | None:
    """A size next to the best one that is timed in addition."""
    if state.is_compiled or num_refinements(state.trials) >= state.policy.refinements:
        return None
    between = size_between(state.speeds, state.policy)
    if between is None:
        return None
    size = state.rounded(between)
    return size if size >= state.lowest and size not in state.tried else None


# The choice.


def _choose(state: SearchState, limited_by: LimitedBy) -> Chosen:
    """The largest size that passed; for throughput, the fastest of those that passed."""
    trial = state.passed[-1]
    largest_size = trial.batch_size
    if state.is_for_throughput and state.memory is not None:
        largest_size = max(largest_size, state.candidate())
        passed = [speed for speed in state.speeds if speed.batch_size in state.passed_sizes]
        speed = fastest(passed, state.policy)
        if speed is not None:
            trial = next(t for t in state.passed if t.batch_size == speed.batch_size)
    size = trial.batch_size
    if limited_by == "throughput":
        reason = sentences.near_best_throughput(size, state.limits, state.policy.near_best_share)
    elif limited_by == "memory":
        reason = sentences.limited_by_memory(size, state.failed, state.limits)
    else:
        reason = sentences.limited_by_size(size, state.limits)
    notes = [
        sentences.dropped_from_fit(dropped, state.limits) for dropped in dropped_sizes(state.ran)
    ]
    near_best = fastest(state.speeds, state.policy)
    notes += _slower_note(state, size)
    return Chosen(
        size,
        limited_by,
        reason,
        tuple(notes),
        fastest_batch_size=None if near_best is None else near_best.batch_size,
        largest_batch_size=largest_size,
    )


def _slower_note(state: SearchState, batch_size: int) -> list[str]:
    """A note if a smaller size is much faster than the chosen one."""
    chosen = next((s for s in state.speeds if s.batch_size == batch_size), None)
    largest_smaller = batch_size / state.policy.least_gap
    smaller = [speed for speed in state.speeds if speed.batch_size <= largest_smaller]
    near_best = fastest(smaller, state.policy)
    if chosen is None or near_best is None:
        return []
    best = max(speed.samples_per_second for speed in smaller)
    if chosen.samples_per_second >= (1 - state.policy.slower_share) * best:
        return []
    return [sentences.slower(chosen, near_best, state.limits)]
