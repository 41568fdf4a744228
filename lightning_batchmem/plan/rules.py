"""The rules of a search: from everything that was run to the next size, or to the chosen one.

The search has two parts. A *ladder* of probes runs small sizes, whose lines predict the size that
fills the limit. Then *rehearsals* bisect between the largest size that ran and the smallest one
that failed. Where an overrun is not an error that can be caught, one size is rehearsed, further
away from the limit. All that a search knows is the list of its trials. The objective
(:mod:`.objectives`) chooses the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.objectives import objective_of
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Chosen, NextSize, SearchFailed, Trial, mib
from lightning_batchmem.plan.sizes import is_allowed, rounded, size_range
from lightning_batchmem.plan.trials_so_far import TrialsSoFar

NOTHING_FITS = "Nothing fits"
"""Each sentence about a search in which no size fits begins with these words."""

USUAL_PROBES = 3
"""Probes of most searches: two small sizes, and half of the size of the first rehearsal."""


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
        >>> from lightning_batchmem import TrialMemory
        >>> trials = []
        >>> while isinstance(step := decide(trials, limits), NextSize):
        ...     memory = TrialMemory({"forward": 100 + 10 * step.batch_size})
        ...     trials.append(Trial(step.batch_size, "ok", memory, step.kind))
        >>> step.batch_size, step.limited_by, [trial.batch_size for trial in trials]
        (50, 'dataset', [2, 8, 40, 50])
    """
    policy = policy or SearchPolicy()
    lowest, highest = size_range(limits)
    if lowest > highest:
        return SearchFailed(_empty_range(limits))
    if limits.missing_bytes > 0:
        return SearchFailed(
            f"{NOTHING_FITS}, and no step was run: without any batch, the process and the gradients"
            f" need {mib(limits.missing_bytes)} more than the limit of {mib(limits.limit_bytes)}."
            " Use a smaller model or a higher memory_limit."
        )
    if not trials:
        return _first_size(limits, policy, lowest, highest)
    known = TrialsSoFar(trials, limits, policy)
    if not known.ran:
        if lowest < known.smallest_failed:
            return NextSize(lowest, "probe")
        return SearchFailed(_nothing_fits(known, could_be_one=lowest == policy.first_size))
    objective = objective_of(limits.options)
    project_size = limits.step.batch_size or 0
    if limits.step.may_keep and known.smallest_failed <= project_size:
        return SearchFailed(_project_does_not_fit(known))
    if not known.has_rehearsed:
        rung = objective.next_probe(known)
        if rung is not None:
            return NextSize(rung, "probe")
    size = objective.next_rehearsal(known)
    if limits.step.may_keep and (known.passed if size is None else size) < project_size:
        # The training runs at this size without a search, so it may be nearer to the limit.
        may_fit = limits.catches_errors and project_size <= known.size_at_limit
        if not (may_fit and is_allowed(project_size, limits)):
            return SearchFailed(_project_does_not_fit(known))
        size = project_size
    if size is not None:
        return NextSize(size, "rehearsal")
    return objective.choose(known)


def _project_does_not_fit(known: TrialsSoFar) -> str:
    limits = known.limits
    why = next(
        (t.failure for t in known.failed if t.batch_size == limits.step.batch_size),
        f"may need more than the limit of {mib(limits.limit_bytes)} leaves for tensors",
    )
    return f"{limits.unit.size(limits.step.batch_size or 0)}, the size of the project, {why}"


def runs_left(step: NextSize, trials: Sequence[Trial]) -> int:
    """About how many runs follow this one: the other usual probes, and one rehearsal.

    Example:
        >>> runs_left(NextSize(2, "probe"), []), runs_left(NextSize(50, "rehearsal"), [])
        (3, 0)
    """
    if step.kind == "rehearsal":
        return 0
    num_probes = sum(trial.kind == "probe" for trial in trials)
    # Where there were more probes, a rehearsal is still left.
    return max(1, USUAL_PROBES - num_probes)


def _first_size(
    limits: SearchLimits, policy: SearchPolicy, lowest: int, highest: int
) -> NextSize | Chosen:
    first = policy.first_size
    if limits.max_reason == "dataset" and limits.max_batch_size < first:
        why = f"{limits.largest_text}. Nothing was run."
        return Chosen(highest, "dataset", why, is_verified=False)
    size = min(max(lowest, rounded(first, limits, up=True)), highest)
    return NextSize(size, "probe")


def _empty_range(limits: SearchLimits) -> str:
    multiple_of = limits.options.multiple_of
    wanted = f"No multiple of {multiple_of}" if multiple_of else "No size"
    return (
        f"{wanted} lies between min_batch_size={max(1, limits.min_batch_size):,} and the largest"
        f" size: {limits.largest_text}."
    )


def _nothing_fits(known: TrialsSoFar, *, could_be_one: bool) -> str:
    limits = known.limits
    trial = known.trials[-1]
    hint = " min_batch_size=1 tries a single sample." if could_be_one else ""
    return (
        f"{NOTHING_FITS}: {limits.unit.size(trial.batch_size)}, the smallest size allowed,"
        f" {trial.failure} under a limit of {mib(limits.limit_bytes)}.{hint}"
    )
