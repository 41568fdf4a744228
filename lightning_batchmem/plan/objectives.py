"""What a search looks for: the largest size that fits, or the fastest one.

An objective chooses the probes, the rehearsals and the size in the end. :func:`.decide` calls it,
and has no rule of an objective itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lightning_batchmem.plan.limits import ProjectStep
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.recipe import SLOWER_SHARE
from lightning_batchmem.plan.records import Chosen, LimitedBy, Speed, mib
from lightning_batchmem.plan.sizes import rounded, size_range
from lightning_batchmem.plan.trials_so_far import TrialsSoFar

# No size above this is predicted.
_MOST_PREDICTED = 2**20


class SearchObjective(Protocol):
    """What a search looks for. Its methods get the trials so far; at least one of them ran."""

    @property
    def needs_times(self) -> bool:
        """Whether the times of all probes count, and not only their memory."""

    def takes_project_size(self, own: Speed, other: Speed) -> bool:
        """Return whether the project's size is taken instead of the other one that was found."""

    def next_probe(self, known: TrialsSoFar) -> int | None:
        """Return the next size to probe; None if the rehearsals can begin."""

    def next_rehearsal(self, known: TrialsSoFar) -> int | None:
        """Return the next size to rehearse; None if the last pass is enough."""

    def choose(self, known: TrialsSoFar) -> Chosen:
        """Return the size that passed a rehearsal last, with what limits it."""


@dataclass(frozen=True)
class Largest:
    """The largest size that fits.

    Args:
        avoids_slower: whether the project's size is taken if the largest one is slower.
    """

    avoids_slower: bool = False
    needs_times = False

    def takes_project_size(self, own: Speed, other: Speed) -> bool:
        """Return whether the project's size is taken instead of the other one that was found."""
        ratio = other.samples_per_s / own.samples_per_s
        return self.avoids_slower and ratio < 1 - SLOWER_SHARE

    def next_probe(self, known: TrialsSoFar) -> int | None:
        """Return the next small size to probe; None if the lines of the probes are known.

        The second size is the project's, or four times the first where the project has no
        larger one that is certain to fit. The third one is a jump to half of the size of the first
        rehearsal, by steps of four times the size where no error can be caught. If it fails, sizes
        between follow, until a size that ran and one that failed are as close as the first two.
        """
        policy = known.policy
        last = known.largest_ran
        growth = policy.ladder_growth
        highest = size_range(known.limits)[1]
        if len(known.ran) == 1:
            size = _second_size(known)
        else:
            size = int(min(policy.rehearsal.probe_share * known.predicted_size, highest))
            if known.limits.is_host:
                size = min(size, int(known.certain_size))
            if not known.limits.catches_errors:
                # Small sizes may hide what grows behind a larger part that does not.
                size = min(size, growth * last)
            if size < known.least_next_size:
                size = 0
        if size >= known.smallest_failed:
            size = 0
        if size == 0 and growth * last < known.smallest_failed < math.inf:
            size = math.isqrt(last * int(known.smallest_failed))
        size = rounded(size, known.limits)
        # A size that needs less than this may be rehearsed at once.
        return size if last < size < min(highest, known.smallest_failed) else None

    def next_rehearsal(self, known: TrialsSoFar) -> int | None:
        """Return the next size to rehearse; None if the last pass is enough."""
        policy = known.policy
        limits = known.limits
        lowest, highest = size_range(limits)
        low = known.largest_ran
        first = min(known.first_rehearsal_size, highest)
        size = highest if first == highest else int(first)
        has_failed = size >= known.smallest_failed
        if not (limits.catches_errors or known.has_rehearsed or has_failed):
            # A larger size that was probed is too near to the limit for a training.
            return size if size == highest else max(lowest, rounded(size, limits))
        most: float = size + 1
        if limits.catches_errors:
            most = policy.rehearsal.most_share * known.size_at_limit
        high = min(most, known.smallest_failed, highest + 1)
        is_narrow = high <= (1 + policy.rehearsal.gap_share) * low
        if known.passed:
            is_enough = is_narrow or known.num_errors >= policy.rehearsal.max_errors
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

    def choose(self, known: TrialsSoFar) -> Chosen:
        """Return the largest size that passed a rehearsal."""
        largest_size = known.passed
        limits = known.limits
        is_bounded = limits.max_reason == "recipe" and largest_size == size_range(limits)[1]
        # Where equal steps differ, the lines of small sizes promise too much.
        is_bounded = is_bounded and not any(trial.memory.differing_bytes for trial in known.trials)
        # A single size, or a line that hardly grows, predicts no size.
        if is_bounded and known.memory and known.first_rehearsal_size < _MOST_PREDICTED:
            of_any_step = replace(limits, step=ProjectStep())
            predicted = rounded(int(known.first_rehearsal_size), of_any_step)
            largest_size = max(largest_size, predicted)
        return _within_limits(known, largest_size=largest_size, fastest_size=None)


class Fastest:
    """The smallest size near the best throughput."""

    needs_times = True

    def takes_project_size(self, own: Speed, other: Speed) -> bool:
        """Return whether the other size, which was found, is not clearly faster."""
        return other.samples_per_s / own.samples_per_s <= 1 + SLOWER_SHARE

    def next_probe(self, known: TrialsSoFar) -> int | None:
        """Return the next size to time: twice the last one, until throughput no longer rises."""
        policy = known.policy
        last = known.largest_ran
        if known.failed or num_flat_sizes(known.speeds, policy) >= policy.flat_sizes:
            return None
        most = known.first_rehearsal_size
        if len(known.ran) == 1:
            most = _largest_second_size(known)
        size = min(rounded(int(min(2 * last, most)), known.limits), size_range(known.limits)[1])
        return size if size >= known.least_next_size else None

    def next_rehearsal(self, known: TrialsSoFar) -> int | None:
        """Return the fastest size; None if it passed."""
        near_best = fastest(known.speeds, known.policy)
        size = known.largest_ran if near_best is None else near_best.batch_size
        return None if size <= known.passed else size

    def choose(self, known: TrialsSoFar) -> Chosen:
        """Return the size that passed a rehearsal: the fastest, or one that ran below it."""
        policy = known.policy
        limits = known.limits
        near_best = fastest(known.speeds, policy)
        fastest_size = None if near_best is None else near_best.batch_size
        largest_size = known.largest_ran
        if not known.failed:
            highest = size_range(limits)[1]
            most = min(known.first_rehearsal_size, highest)
            most = highest if most == highest else rounded(int(most), limits)
            largest_size = max(largest_size, most)
        if largest_size <= policy.rehearsal.least_growth * known.passed:
            return _within_limits(known, largest_size=largest_size, fastest_size=fastest_size)
        return Chosen(
            known.passed,
            "throughput",
            f"the smallest size with at least {policy.near_best_share:.0%} of the best throughput"
            " that was measured.",
            fastest_batch_size=fastest_size,
            largest_batch_size=largest_size,
        )


def objective_of(options: SearchOptions) -> SearchObjective:
    """Return the objective that the user has named."""
    if options.objective == "throughput":
        return Fastest()
    return Largest(avoids_slower=options.objective == "auto")


# No formula predicts a throughput. On the host it falls where the C library begins to map blocks in
# every step, and on a GPU it changes where a library takes another kernel.


def fastest(speeds: Sequence[Speed], policy: SearchPolicy) -> Speed | None:
    """The smallest size near the best throughput; ``None`` if nothing was timed."""
    best = max((speed.samples_per_s for speed in speeds), default=0.0)
    near_best = (s for s in speeds if s.samples_per_s >= policy.near_best_share * best)
    return next(near_best, None)


def num_flat_sizes(speeds: Sequence[Speed], policy: SearchPolicy) -> int:
    """How many of the largest sizes in a row did not raise the throughput."""
    best = 0.0
    flat_sizes = 0
    for speed in speeds:
        flat_sizes += 1
        if policy.near_best_share * speed.samples_per_s >= best:
            flat_sizes = 0
        best = max(best, speed.samples_per_s)
    return flat_sizes


def _second_size(known: TrialsSoFar) -> int:
    """The second size to probe where the largest size is looked for."""
    larger = known.policy.ladder_growth * known.largest_ran
    most = _largest_second_size(known)
    project_size = known.limits.step.batch_size or 0
    is_rung = larger < project_size < size_range(known.limits)[1]
    if is_rung and (known.limits.catches_errors or project_size <= most):
        return project_size
    return int(min(larger, most))


def _largest_second_size(known: TrialsSoFar) -> float:
    """The largest size to run after the first one, when there is no line yet."""
    following = rounded(known.largest_ran + 1, known.limits, up=True)
    # Where an error is caught, the next size is tried even if it is not certain to fit.
    if known.limits.catches_errors:
        return max(known.size_at_limit, following)
    if known.predicted_size >= following and not known.limits.is_host:
        return known.predicted_size
    # Gradients may be most of what seems to grow, so the next size may fit where none seems to.
    return min(max(known.predicted_size, following), known.certain_size)


def _size_between(low: int, high: float, known: TrialsSoFar) -> int:
    """A size nearer to the one that failed; the geometric mean of sizes that are far apart.

    Where a probe ran at the size that failed, the largest size is not far below it.
    """
    policy = known.policy
    if high > policy.ladder_growth * max(low, known.largest_probed):
        return math.isqrt(low * int(high))
    return int(low + policy.rehearsal.between_share * (high - low))


def _within_limits(known: TrialsSoFar, *, largest_size: int, fastest_size: int | None) -> Chosen:
    """The size that passed, limited by memory, or by the largest size that is allowed."""
    limits = known.limits
    size = known.passed
    limited_by: LimitedBy = "memory"
    notes: tuple[Note, ...] = ()
    if size == size_range(limits)[1]:
        limited_by = limits.max_reason
        why = f"{limits.largest_text}."
        if limits.step.kept_samples is not None and size < limits.max_batch_size:
            why += " The batches of an optimizer step have equal sizes."
        if limited_by == "recipe" and known.first_rehearsal_size >= _MOST_PREDICTED:
            why += " Memory alone allows far more."
        elif largest_size > size:
            # On a CPU the prediction is what is certain from the small sizes that ran.
            about = "at least" if limits.is_host else "about"
            why += f" Memory alone allows {about} {limits.unit.size(largest_size)}."
    else:
        why = f"{_why_no_larger(known, largest_size)}."
        notes = _fragmented_notes(known)
    return Chosen(
        size,
        limited_by,
        why,
        notes,
        fastest_batch_size=fastest_size,
        largest_batch_size=largest_size,
    )


def _why_no_larger(known: TrialsSoFar, largest_size: int) -> str:
    """A clause about the memory that a larger size needs."""
    limits = known.limits
    size = known.passed
    above = [trial for trial in known.failed if trial.batch_size > size]
    if above:
        smallest = min(above, key=lambda trial: trial.batch_size)
        return f"{limits.unit.size(smallest.batch_size)} {smallest.failure}"
    if limits.is_host:
        return (
            f"on a CPU tensors get {known.policy.rehearsal.host_share:.0%} of the room below the"
            " limit, because the system ends a process that runs out of memory. A higher"
            " memory_limit raises the size"
        )
    if largest_size > size:
        return f"the limit leaves room for no more than {limits.unit.size(largest_size)}"
    if limits.steps_are_collective:
        return "no larger size was rehearsed, because an error on one rank ends all ranks"
    return "it passed a rehearsal, and the limit leaves little room above it"


def _fragmented_notes(known: TrialsSoFar) -> tuple[Note, ...]:
    limits = known.limits
    free_bytes = limits.fragmented_bytes
    # A probe does not show whether the cache is released.
    has_failed = any(trial.kind == "rehearsal" for trial in known.failed)
    is_left_free = has_failed or not limits.catches_errors
    if not (free_bytes and is_left_free) or known.memory is None:
        return ()
    most = known.memory.size_at(limits.limit_bytes)
    size = rounded(int(known.policy.rehearsal.first_share * min(most, _MOST_PREDICTED)), limits)
    text = (
        "Nearly every batch has another shape, which fragments the memory of the device, so"
        f" {mib(free_bytes)} of it stays free. With"
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True about"
        f" {limits.unit.size(size)} fit."
    )
    return (Note("limit", text),)
