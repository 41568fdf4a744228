"""Every sentence of a plan: reasons, notes, and why there is no plan."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.records import Trial, mib

NOTHING_FITS = "Nothing fits"
_SMALLER_STEP = "Use a smaller model, smaller samples, lower precision or activation checkpointing."
_MORE_ROOM = (
    "Most of it is other memory of this process, not that of the step: pass a higher memory_limit,"
    " or free it."
)

_LIMITS: Mapping[str, str] = {
    "dataset": "the data set has no more than {size} for a full batch",
    "host memory": "more than {size} in the DataLoader's workers would fill the host's memory",
    "target_batch_size": "target_batch_size needs no more than {size} on a rank",
    "max_batch_size": "max_batch_size is {number}",
    "validation data": "the validation data set has no full batch of more than {size}",
}
_LIMITS_OF_BUDGET: Mapping[str, str] = {
    **_LIMITS,
    "dataset": "an epoch has no second batch above {size}",
}
_OUTCOMES: Mapping[str, str] = {
    "out_of_memory": "ran out of memory",
    "over_limit": "need {needed}",
    "allocator_retry": "fit only if the allocator releases its cache in every step",
}

LIVE_BYTES_NOT_COUNTED = (
    "Live tensors could not be counted, so the memory of the whole process was measured instead."
)


def size_limit(limits: SearchLimits) -> str:
    """What limits the largest size that is allowed."""
    texts = _LIMITS if limits.options.budget_name is None else _LIMITS_OF_BUDGET
    text = texts.get(limits.max_reason, f"{limits.max_reason} allows no more than {{size}}")
    size = size_text(limits.max_batch_size, limits)
    return text.format(size=size, number=limits.max_batch_size)


def size_text(batch_size: int, limits: SearchLimits) -> str:
    """A size as a number of samples, or as a budget."""
    if limits.options.budget_name is None:
        return f"{batch_size} samples"
    return f"{limits.options.budget_name} {batch_size:,}"


def outcome(trial: Trial) -> str:
    """What happened at a size that did not pass."""
    text = _OUTCOMES[trial.outcome].format(needed=mib(trial.needed_bytes))
    return f"{text} ({trial.error})" if trial.error else text


# Why there is no size.


def empty_range(limits: SearchLimits) -> str:
    unit = limits.options.multiple_of
    wanted = f"No multiple of {unit}" if unit else "No size"
    lowest = max(1, limits.min_batch_size)
    return (
        f"{wanted} lies between min_batch_size={lowest} and the largest size: {size_limit(limits)}."
    )


def fixed_part_does_not_fit(limits: SearchLimits) -> str:
    return (
        f"{NOTHING_FITS}, and no step was run: without any batch, the process and the gradients"
        f" need {mib(limits.missing_bytes)} more than the limit of {mib(limits.limit_bytes)}. Use a"
        " smaller model or a higher memory_limit."
    )


def nothing_fits(trial: Trial, limits: SearchLimits, *, could_be_one: bool) -> str:
    hint = " min_batch_size=1 tries a single sample." if could_be_one else ""
    return (
        f"{NOTHING_FITS}: {size_text(trial.batch_size, limits)}, the smallest size allowed,"
        f" {outcome(trial)} under a limit of {mib(limits.limit_bytes)}.{hint}"
    )


def breakdown_of(
    batch_size: int,
    limits: SearchLimits,
    breakdown: str,
    set_aside_bytes: int,
    *,
    is_mostly_other: bool,
) -> str:
    text = f"At {size_text(batch_size, limits)} the memory held {breakdown}"
    if set_aside_bytes:
        text += f"; DataLoader workers and a checkpoint take {mib(set_aside_bytes)} more"
    return f"{text}. {_MORE_ROOM if is_mostly_other else _SMALLER_STEP}"


# Why this size.


def too_small_to_run(batch_size: int, limits: SearchLimits) -> str:
    return f"{size_text(batch_size, limits)}: {size_limit(limits)}. Nothing was run."


def limited_by_memory(
    batch_size: int,
    largest_size: int,
    failed: Iterable[Trial],
    limits: SearchLimits,
    host_share: float,
) -> str:
    size = size_text(batch_size, limits)
    above = [trial for trial in failed if trial.batch_size > batch_size]
    if limits.is_host and not above:
        return (
            f"{size}: on the host tensors get {host_share:.0%} of the room below the limit, because"
            " the system ends a process that runs out of memory. A higher memory_limit raises the"
            " size."
        )
    if not above and largest_size > batch_size:
        return f"{size}: the limit leaves room for no more than {size_text(largest_size, limits)}."
    if limits.steps_are_collective and not above:
        return f"{size}: no larger size was rehearsed, because an error on one rank ends all ranks."
    if not above:
        return f"{size}: it passed a rehearsal, and the limit leaves little room above it."
    smallest = min(above, key=lambda trial: trial.batch_size)
    return f"{size}: {size_text(smallest.batch_size, limits)} {outcome(smallest)}."


def limited_by_size(batch_size: int, limits: SearchLimits) -> str:
    return f"{size_text(batch_size, limits)}: {size_limit(limits)}."


def near_best_throughput(batch_size: int, limits: SearchLimits, share: float) -> str:
    size = size_text(batch_size, limits)
    return (
        f"{size}: the smallest size with at least {share:.0%} of the best throughput that was"
        " measured."
    )


def passed_again(batch_size: int, limits: SearchLimits) -> str:
    size = size_text(batch_size, limits)
    return f"{size}: the size of an earlier plan, which passed a rehearsal on this device."


# Notes about the measurement.


def dropped_from_fit(batch_size: int, limits: SearchLimits) -> str:
    size = size_text(batch_size, limits)
    return f"The peak at {size} is above that of a larger size, so no line uses it."


def fragmented(trial: Trial) -> str:
    return (
        f"The allocator reserved {mib(trial.held_bytes)} for {mib(trial.peak_bytes)} of tensors."
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may let a larger size fit."
    )


def idle_optimizer(steps: int) -> str:
    return (
        f"An optimizer did not step in the first {steps} steps, so its state is not part of the"
        " measured memory. Set a smaller max_batch_size to leave room for it."
    )


NOT_RESTORED = (
    "the attributes of the objects that the search was given. Not restored: what steps change in"
    " classes, functions, default arguments, global variables, caches, and behind weak references."
)

# Where the size is set, if it was found by trying.


def place_text(place: str) -> str:
    """A clause about an attribute, or about a hook, whose place ends with the parentheses."""
    if place.endswith("()"):
        hook = place.removesuffix("()")
        return f"set on the loader of {hook}; write it into your code to keep it"
    return f"set as {place}"


# Notes about the training.


def old_values(name: str) -> str:
    return f"Values computed from `{name}` in __init__ or setup keep the old size."


def _step_size(size: int, budget_name: str | None) -> str:
    """What an optimizer step has, as a number of samples or as a budget."""
    return f"{size:,} samples" if budget_name is None else f"{budget_name} {size:,}"


def rounded_target(
    effective: int,
    target: int,
    accumulate: int,
    batch_size: int,
    ranks: int,
    budget_name: str | None,
) -> str:
    on_ranks = f" on each of {ranks} ranks" if ranks > 1 else ""
    return (
        f"An optimizer step has {_step_size(effective, budget_name)}, not the {target:,} of"
        " target_batch_size:"
        f" {accumulate:,} x {batch_size:,}{on_ranks}."
    )


def short_epoch(batches: int, accumulate: int) -> str:
    return (
        f"An optimizer step takes {accumulate} batches, but an epoch ends after {batches}, so the"
        " step has fewer."
    )


def no_learning_rate_rule(before: int, after: int, optimizers: str, budget_name: str | None) -> str:
    return (
        f"An optimizer step has {_step_size(after, budget_name)} instead of {before:,}, and no"
        f" single rule is known for {optimizers}. Tune the learning rate by hand."
    )


def learning_rate_rule(
    before: int,
    after: int,
    optimizers: str,
    budget_name: str | None,
    rule: str,
    factor: float,
    untested_beyond: int,
) -> str:
    ratio = after / before
    untested = ""
    if max(ratio, 1 / ratio) > untested_beyond:
        untested = f" (untested beyond {untested_beyond} times the {budget_name or 'samples'})"
    return (
        f"An optimizer step has {_step_size(after, budget_name)} instead of {before:,}. For"
        f' {optimizers}, lr_scaling="{rule}" multiplies the learning rate by'
        f" {factor:,.4g}{untested}: docs/choosing-a-batch-size.md."
    )


# Why an earlier plan was not used, as clauses of one sentence.


def earlier_plan_not_used(*reasons: str) -> str:
    return f"The earlier plan was not used: {', and '.join(reasons)}."


def unreadable(given: object, error: Exception) -> str:
    return f"{given} cannot be read ({error})"


def unknown_trial(trial: Trial) -> str:
    return (
        f"this version does not know a trial of the kind {trial.kind[:80]!r} with the outcome"
        f" {trial.outcome[:80]!r}"
    )


def not_verified() -> str:
    return "it was not verified by a fit of this version"


def failed_again(trial: Trial, limits: SearchLimits) -> str:
    return f"{size_text(trial.batch_size, limits)} {outcome(trial)}"


def other_sizes_allowed(batch_size: int, lowest: int, highest: int, limits: SearchLimits) -> str:
    unit = limits.options.multiple_of or 1
    sizes = f"multiples of {unit}" if unit > 1 else "sizes"
    return (
        f"it has {size_text(batch_size, limits)}, and {sizes} from {lowest} to {highest} are"
        f" allowed: {size_limit(limits)}"
    )


def changed(name: str, old: str, new: str) -> str:
    return f"the {name} was {old} and is {new}"


# Notes about the limit and the samples.


def later_bytes(count_bytes: int) -> str:
    return (
        f"The search left {mib(count_bytes)} of the limit free: the training needs them later, for"
        " gradients that ranks exchange or for averaged weights."
    )


def worst_of_budget(num_batches: int) -> str:
    return (
        f"Of up to {num_batches} batches that the loader made, the search used those with most"
        " bytes, most items and the longest sample."
    )


def ragged_samples(sizes: Sequence[float], random_batches: int | None) -> str:
    """A note about samples that differ in size.

    The search used the largest of so many ``random_batches``; None if it used the largest samples.
    """
    batches = "of the largest samples only"
    if random_batches is not None:
        batches = f"as large as the largest of {random_batches:,} random ones"
    return (
        f"Samples differ in size: of {len(sizes):,} the largest has {max(sizes):,.0f} bytes in a"
        f" batch and the median {statistics.median(sizes):,.0f}. The search used batches {batches};"
        ' worst_case="typical" uses average ones.'
    )


def scan_ended(count: int, seconds: float) -> str:
    """A note about a data set of which only the first ``count`` samples were read in time."""
    return f"Only {count:,} samples were read in {seconds:.0f} s; larger ones may exist."
