"""The rules of a search: from everything that was run to the next size, or to the chosen one.

The search has two parts. A *ladder* of probes runs small sizes, whose lines predict the size that
fills the limit. Then *rehearsals* bisect between the largest size that ran and the smallest one
that failed. Where an overrun is no error that can be caught, one size is rehearsed, further away
from the limit. All that a search knows is the list of its trials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_batchmem.plan import sentences
from lightning_batchmem.plan.fit import dropped_sizes, fit_memory, ran_through
from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Chosen, LimitedBy, NextSize, SearchFailed, Speed, Trial
from lightning_batchmem.plan.sizes import rounded, size_range
from lightning_batchmem.plan.throughput import fastest, measured_speeds, num_flat_sizes

FRAGMENTED_RATIO = 1.15
"""From this ratio of reserved to requested bytes on, a note advises expandable segments."""


@dataclass(frozen=True)
class TrialsSoFar:
    """What the trials of a search show; sizes in samples.

    Args:
        trials: everything that was run, in the order in which it was run; at least one.
        limits: limit in bytes, range of sizes, and the user's options.
        policy: the numbers that steer the search.
    """

    trials: Sequence[Trial]
    limits: SearchLimits
    policy: SearchPolicy

    @cached_property
    def passed(self) -> int:
        """The largest size that passed a rehearsal; 0 if none did."""
        sizes = [t.batch_size for t in self.trials if t.kind == "rehearsal" and t.outcome == "ok"]
        return max(sizes, default=0)

    @cached_property
    def failed(self) -> list[Trial]:
        """The trials that failed above every size that passed."""
        return [t for t in self.trials if t.outcome != "ok" and t.batch_size > self.passed]

    @cached_property
    def smallest_failed(self) -> float:
        """The smallest size that failed; ``inf`` if none did."""
        return min((trial.batch_size for trial in self.failed), default=math.inf)

    @cached_property
    def ran(self) -> list[Trial]:
        """The trials that ran, below every size that failed; the smallest size first."""
        ran = [t for t in self.trials if t.outcome == "ok" and t.batch_size < self.smallest_failed]
        return sorted(ran, key=lambda trial: trial.batch_size)

    @property
    def largest_ran(self) -> int:
        """The largest size that ran; 0 if none did."""
        return self.ran[-1].batch_size if self.ran else 0

    @property
    def largest_probed(self) -> int:
        """The largest size whose probe ran, even if its rehearsal failed."""
        return max(t.batch_size for t in self.trials if t.kind == "probe" and t.outcome == "ok")

    @property
    def num_errors(self) -> int:
        """How many rehearsals ran out of memory."""
        return sum(
            trial.outcome == "out_of_memory" and trial.kind == "rehearsal" for trial in self.trials
        )

    @property
    def has_rehearsed(self) -> bool:
        """Whether the ladder has ended."""
        return any(trial.kind == "rehearsal" for trial in self.trials)

    @cached_property
    def size_at_limit(self) -> float:
        """The size that fills the limit, as the probes predict it.

        Without lines, all memory that does not last is expected to grow in proportion to the size,
        which is an upper bound of what larger sizes need.

        Source: the peak is a maximum of ``a + b * size`` with ``a >= fixed``, and for each of these
        ``a + b * k * size <= fixed + k * (a - fixed + b * size)``.
        """
        probes = [trial for trial in self.trials if trial.kind == "probe"]
        memory = fit_memory([trial.with_set_aside() for trial in probes])
        if memory is not None:
            return memory.size_at(self.limits.limit_bytes)
        return max(
            trial.batch_size
            * (self.limits.limit_bytes - trial.set_aside_bytes - trial.fixed_bytes)
            / trial.growing_bytes
            for trial in self.ran
            if trial.kind == "probe"
        )

    @property
    def first_rehearsal_share(self) -> float:
        """The share of the size that fills the limit at which the first rehearsal is."""
        if self.limits.is_host:
            return self.policy.host_share
        if self.limits.steps_are_collective:
            return self.policy.collective_share
        return self.policy.rehearsal_share

    @cached_property
    def speeds(self) -> list[Speed]:
        """The throughput of each size that ran, the smallest size first."""
        return measured_speeds(self.ran)


def decide(
    trials: Sequence[Trial], limits: SearchLimits, policy: SearchPolicy | None = None
) -> NextSize | Chosen | SearchFailed:
    """Choose the next batch size to run, or the size to train with.

    The chosen size has passed a rehearsal, unless the data set leaves no choice.

    Args:
        trials: everything that was run, in the order in which it was run.
        limits: limit in bytes, range of sizes in samples, and the user's options.
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
    lowest, highest = size_range(limits)
    if lowest > highest:
        return SearchFailed(sentences.empty_range(limits))
    if limits.missing_bytes > 0:
        return SearchFailed(sentences.fixed_part_does_not_fit(limits))
    if not trials:
        return _first_size(limits, policy, lowest, highest)
    known = TrialsSoFar(trials, limits, policy)
    if not known.ran:
        if lowest < known.smallest_failed:
            return NextSize(lowest, "probe")
        could_be_one = lowest == policy.first_size
        reason = sentences.nothing_fits(trials[-1], limits, could_be_one=could_be_one)
        return SearchFailed(reason)
    is_for_throughput = limits.options.objective == "throughput"
    if not known.has_rehearsed:
        rung = _next_doubling(known) if is_for_throughput else _next_rung(known)
        if rung is not None:
            return NextSize(rung, "probe")
    size = _next_fast_size(known) if is_for_throughput else _next_rehearsal(known)
    if size is not None:
        return NextSize(size, "rehearsal")
    return _choose(known)


def _first_size(
    limits: SearchLimits, policy: SearchPolicy, lowest: int, highest: int
) -> NextSize | Chosen:
    first = policy.first_size
    if limits.max_reason == "dataset" and limits.max_batch_size < first:
        reason = sentences.too_small_to_run(highest, limits)
        return Chosen(highest, "dataset", reason, is_verified=False)
    size = min(max(lowest, rounded(first, limits, up=True)), highest)
    return NextSize(size, "probe")


# The ladder.


def _next_rung(known: TrialsSoFar) -> int | None:
    """The next small size to probe; ``None`` if the lines of the probes are known.

    The second size is four times the first if that is certain to fit. The third one is a jump to
    half of the size of the first rehearsal, by steps of four times the size where no error can be
    caught. If it fails, sizes between follow, until a size that ran and one that failed are as
    close as the first two.
    """
    policy = known.policy
    last = known.largest_ran
    growth = policy.ladder_growth
    highest = size_range(known.limits)[1]
    if len(known.ran) == 1:
        size = int(min(growth * last, _largest_second_size(known)))
    else:
        share = policy.probe_share * known.first_rehearsal_share
        size = int(min(share * known.size_at_limit, highest))
        if not known.limits.catches_errors:
            # Small sizes may hide what grows behind a larger part that does not.
            size = min(size, growth * last)
        if size < policy.least_growth * last:
            size = 0
    if size >= known.smallest_failed:
        size = 0
    if size == 0 and growth * last < known.smallest_failed < math.inf:
        size = math.isqrt(last * int(known.smallest_failed))
    size = rounded(size, known.limits)
    # A size that needs less than this may be rehearsed at once.
    return size if last < size < min(highest, known.smallest_failed) else None


def _largest_second_size(known: TrialsSoFar) -> float:
    """The largest size to run after the first one, when there is no line yet."""
    following = rounded(known.largest_ran + 1, known.limits, up=True)
    # Where an error is caught, the next size is tried even if it is not certain to fit.
    if known.limits.catches_errors:
        return max(known.size_at_limit, following)
    certain = known.first_rehearsal_share * known.size_at_limit
    # Gradients may be most of what seems to grow, so the next size is often much smaller.
    is_next_safe = following <= known.policy.probe_share * known.size_at_limit
    return max(certain, following) if is_next_safe else certain


def _next_doubling(known: TrialsSoFar) -> int | None:
    """The next size to time: twice the last one, until throughput no longer rises."""
    policy = known.policy
    last = known.largest_ran
    if known.failed or num_flat_sizes(known.speeds, policy) >= policy.flat_sizes:
        return None
    most = known.first_rehearsal_share * known.size_at_limit
    if len(known.ran) == 1:
        most = _largest_second_size(known)
    size = min(rounded(int(min(2 * last, most)), known.limits), size_range(known.limits)[1])
    return size if size >= policy.least_growth * last else None


# The rehearsals.


def _next_rehearsal(known: TrialsSoFar) -> int | None:
    """The next size to rehearse on the way to the largest; ``None`` if the last pass is enough."""
    policy = known.policy
    limits = known.limits
    lowest, highest = size_range(limits)
    low = known.largest_ran
    first = min(known.first_rehearsal_share * known.size_at_limit, highest)
    size = highest if first == highest else int(first)
    if not (limits.catches_errors or known.has_rehearsed):
        # A larger size that was probed is too near to the limit for a training.
        return size if size == highest else max(lowest, rounded(size, limits))
    most = policy.most_share * known.size_at_limit if limits.catches_errors else size + 1
    high = min(most, known.smallest_failed, highest + 1)
    is_narrow = high <= (1 + policy.gap_share) * low
    if known.passed:
        is_enough = is_narrow or known.num_errors >= policy.max_errors
        if is_enough or not limits.catches_errors:
            return None
    if known.has_rehearsed or not low < size < high:
        size = low if is_narrow else _size_between(low, high, known)
    size = size if size == highest else rounded(size, limits)
    if size <= low:
        following = rounded(low + 1, limits, up=True)
        size = following if following < high and not is_narrow else low
    # A size that was only probed is rehearsed too.
    return None if size == known.passed else size


def _size_between(low: int, high: float, known: TrialsSoFar) -> int:
    """A size nearer to the one that failed; the geometric mean of sizes that are far apart.

    Where a probe ran at the size that failed, the largest size is not far below it.
    """
    policy = known.policy
    if high > policy.ladder_growth * max(low, known.largest_probed):
        return math.isqrt(low * int(high))
    return int(low + policy.between_share * (high - low))


def _next_fast_size(known: TrialsSoFar) -> int | None:
    """The fastest size to rehearse; ``None`` if it passed."""
    near_best = fastest(known.speeds, known.policy)
    size = known.largest_ran if near_best is None else near_best.batch_size
    return None if size <= known.passed else size


# The choice.


def _choose(known: TrialsSoFar) -> Chosen:
    """The size that passed a rehearsal last, with what limits it."""
    policy = known.policy
    limits = known.limits
    highest = size_range(limits)[1]
    trial = next(t for t in reversed(known.trials) if t.batch_size == known.passed)
    largest_size = known.passed
    limited_by: LimitedBy = "memory"
    if known.passed == highest:
        limited_by = limits.max_reason
    fastest_size = None
    if limits.options.objective == "throughput":
        near_best = fastest(known.speeds, policy)
        fastest_size = None if near_best is None else near_best.batch_size
        largest_size = known.largest_ran
        if not known.failed:
            most = min(known.first_rehearsal_share * known.size_at_limit, highest)
            most = highest if most == highest else rounded(int(most), limits)
            largest_size = max(largest_size, most)
        if largest_size > policy.least_growth * known.passed:
            limited_by = "throughput"
    if limited_by == "throughput":
        reason = sentences.near_best_throughput(known.passed, limits, policy.near_best_share)
    elif limited_by == "memory":
        reason = sentences.limited_by_memory(
            known.passed, largest_size, known.failed, limits, policy.host_share
        )
    else:
        reason = sentences.limited_by_size(known.passed, limits)
    notes = [
        sentences.dropped_from_fit(size, limits)
        for size in dropped_sizes(ran_through(known.trials))
    ]
    is_fragmented = trial.held_bytes > FRAGMENTED_RATIO * trial.peak_bytes
    could_expand = not (limits.is_host or limits.has_expandable_segments)
    if limited_by == "memory" and is_fragmented and could_expand:
        notes.append(sentences.fragmented(trial))
    return Chosen(
        known.passed,
        limited_by,
        reason,
        tuple(notes),
        # For the largest size single steps were timed, whose times vary too much.
        fastest_batch_size=fastest_size,
        largest_batch_size=largest_size,
    )
