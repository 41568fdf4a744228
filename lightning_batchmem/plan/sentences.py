"""Every sentence of a plan: reasons, notes, and why there is no plan."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_batchmem.plan.records import SearchLimits, Speed, Trial, mib

_SMALLER_STEP = "Use a smaller model, smaller samples, lower precision or activation checkpointing."
_MORE_ROOM = (
    "Most of it is other memory of this process, not that of the step: pass a higher memory_limit,"
    " or free it."
)

_LIMITS: Mapping[str, str] = {
    "dataset": "the data set has no more than {size} samples for a full batch",
    "host memory": (
        "more than {size} samples in the DataLoader's workers would fill the host's memory"
    ),
    "target_batch_size": "target_batch_size needs no more than {size} samples on a rank",
    "max_batch_size": "max_batch_size is {size}",
    "validation data": "the validation data set has no full batch of more than {size} samples",
}
_OUTCOMES: Mapping[str, str] = {
    "out_of_memory": "ran out of memory",
    "over_limit": "need {needed}",
    "allocator_retry": "fit only if the allocator releases its cache in every step",
}

LIVE_BYTES_NOT_COUNTED = (
    "Live tensors could not be counted, so the resident set was measured and more room left free."
)


def size_limit(limits: SearchLimits) -> str:
    """What limits the largest size that is allowed."""
    text = _LIMITS.get(
        limits.max_reason, f"{limits.max_reason} allows no more than {{size}} samples"
    )
    return text.format(size=limits.max_batch_size)


def outcome(trial: Trial) -> str:
    """What happened at a size that did not pass."""
    text = _OUTCOMES[trial.outcome].format(needed=mib(trial.needed_bytes))
    return f"{text} ({trial.error})" if trial.error else text


# Why there is no size.


def empty_range(limits: SearchLimits) -> str:
    wanted = f"No multiple of {limits.multiple_of}" if limits.multiple_of else "No size"
    lowest = max(1, limits.min_batch_size)
    return (
        f"{wanted} lies between min_batch_size={lowest} and the largest size: {size_limit(limits)}."
    )


def nothing_fits(trial: Trial, limits: SearchLimits, *, could_be_one: bool) -> str:
    hint = " min_batch_size=1 tries a single sample." if could_be_one else ""
    return (
        f"Nothing fits: {trial.batch_size} samples, the smallest size allowed, {outcome(trial)}"
        f" under a limit of {mib(limits.limit_bytes)}.{hint}"
    )


def breakdown_of(
    batch_size: int, breakdown: str, worker_bytes: int, *, is_mostly_other: bool
) -> str:
    text = f"At {batch_size} samples the memory held {breakdown}"
    if worker_bytes:
        text += f"; DataLoader workers hold {mib(worker_bytes)} more"
    return f"{text}. {_MORE_ROOM if is_mostly_other else _SMALLER_STEP}"


# Why this size.


def too_small_to_run(batch_size: int, limits: SearchLimits) -> str:
    return f"{batch_size} samples: {size_limit(limits)}. Nothing was run."


def limited_by_memory(batch_size: int, failed: Iterable[Trial]) -> str:
    above = [trial for trial in failed if trial.batch_size > batch_size]
    if not above:
        return f"{batch_size} samples: the largest size that is predicted to fit."
    smallest = min(above, key=lambda trial: trial.batch_size)
    return f"{batch_size} samples: {smallest.batch_size} samples {outcome(smallest)}."


def limited_by_size(batch_size: int, limits: SearchLimits) -> str:
    return f"{batch_size} samples: {size_limit(limits)}."


def near_best_throughput(batch_size: int, share: float) -> str:
    return (
        f"{batch_size} samples: the smallest size with at least {share:.0%} of the best throughput"
        " that was measured."
    )


def passed_again(batch_size: int) -> str:
    return f"{batch_size} samples: the size of an earlier plan, which passed a rehearsal again."


# Notes about the measurement.


def dropped_from_fit(batch_size: int) -> str:
    return (
        f"The peak at {batch_size} samples is above that of a larger size and was left out of the"
        " fit."
    )


def fragmented(trial: Trial) -> str:
    return (
        f"The allocator reserved {mib(trial.held_bytes)} for {mib(trial.peak_bytes)} of tensors."
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may let a larger size fit."
    )


def slower(chosen: Speed, smaller: Speed) -> str:
    share = 1 - chosen.samples_per_second / smaller.samples_per_second
    return (
        f"{chosen.batch_size} samples train {share:.0%} slower than"
        f" {smaller.batch_size} ({chosen.samples_per_second:,.0f} and"
        f" {smaller.samples_per_second:,.0f} samples/s). "
        'objective="throughput" chooses the fastest size.'
    )


def idle_optimizer(steps: int) -> str:
    return (
        f"An optimizer did not step in the first {steps} steps, so its state is not part of the"
        " measured memory. Lower memory_limit to leave room for it."
    )


# Notes about the training.


def old_values(name: str) -> str:
    return f"Values computed from `{name}` in __init__ or setup keep the old size."


def rounded_target(
    effective: int, target: int, accumulate: int, batch_size: int, ranks: int
) -> str:
    on_ranks = f" on each of {ranks} ranks" if ranks > 1 else ""
    return (
        f"{effective:,} samples per optimizer step instead of {target:,}:"
        f" {accumulate:,} x {batch_size:,}{on_ranks}"
    )


def short_epoch(batches: int, accumulate: int) -> str:
    return f"an epoch ends after {batches} of {accumulate} batches per optimizer step"


def no_learning_rate_rule(before: int, after: int, optimizers: str) -> str:
    return (
        f"samples per optimizer step went from {before:,} to {after:,}, and no single rule is known"
        f" for {optimizers}: tune the learning rate by hand"
    )


def learning_rate_rule(
    before: int, after: int, optimizers: str, rule: str, factor: float, untested_beyond: int
) -> str:
    ratio = after / before
    untested = ""
    if max(ratio, 1 / ratio) > untested_beyond:
        untested = f" (untested beyond {untested_beyond} times the samples)"
    return (
        f"samples per optimizer step went from {before:,} to {after:,}: for {optimizers},"
        f' lr_scaling="{rule}" multiplies the learning rate by {factor:,.4g}{untested}, see'
        " docs/choosing-a-batch-size.md"
    )


# Why an earlier plan was not used, as clauses of one sentence.


def earlier_plan_not_used(*reasons: str) -> str:
    return f"The earlier plan was not used: {', and '.join(reasons)}."


def unreadable(error: Exception) -> str:
    return f"it cannot be read ({error})"


def not_verified() -> str:
    return "it was not verified by a fit of this version"


def failed_again(trial: Trial) -> str:
    return f"{trial.batch_size} samples {outcome(trial)}"


def outside_range(batch_size: int, lowest: int, highest: int, limits: SearchLimits) -> str:
    return (
        f"it has {batch_size} samples, and sizes from {lowest} to {highest} are allowed:"
        f" {size_limit(limits)}"
    )


def last_batch_of_one(batch_size: int) -> str:
    return f"the last batch at its {batch_size} samples would have one sample"


def other_size_limit(limited_by: str, batch_size: int, highest: int) -> str:
    reason = limited_by.replace("_", " ")
    return f"its size was limited by {reason} to {batch_size} and may now be {highest}"


def other_device(old: str, new: str) -> str:
    return f"it was found on {old} and this is {new}"


def held_too_much(held_bytes: int, limit_bytes: int) -> str:
    return f"it held {mib(held_bytes)} and the limit is {mib(limit_bytes)}"


def other_limit(old_bytes: int, new_bytes: int) -> str:
    return f"the limit was {mib(old_bytes)} and is {mib(new_bytes)}"


def other_options(
    old: Mapping[str, Any], new: Mapping[str, Any], names: Sequence[str]
) -> list[str]:
    return [f"{name} was {old[name]!r} and is {new[name]!r}" for name in names]


# Notes about the samples.


def ragged_samples(sizes: Sequence[float], random_batches: int | None) -> str:
    """A note about samples that differ in size.

    The search used the largest of so many ``random_batches``; None if it repeated one sample.
    """
    batches = "of the largest sample only"
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
