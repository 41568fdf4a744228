"""Sentences about the outcome of a search."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lightning_batchmem.plan.records import SearchLimits, Trial, mib

_REMEDY = "Use a smaller model, smaller samples, lower precision or activation checkpointing."

_LIMITS: dict[str, str] = {
    "dataset": "the data set has no more than {size} samples for a full batch",
    "host memory": (
        "more than {size} samples in the DataLoader's workers would fill the host's memory"
    ),
    "target_batch_size": "target_batch_size needs no more than {size} samples on a rank",
    "max_batch_size": "max_batch_size is {size}",
    "validation data": "the validation data set has no full batch of more than {size} samples",
}
_OUTCOMES = {
    "out_of_memory": "ran out of memory",
    "over_limit": "need {needed}",
    "allocator_retry": "fit only if the allocator releases its cache in every step",
}


def size_limit_text(limits: SearchLimits) -> str:
    reason = limits.max_reason
    size = limits.max_batch_size
    return _LIMITS.get(reason, f"{reason} allows no more than {{size}} samples").format(size=size)


def outcome_text(trial: Trial) -> str:
    text = _OUTCOMES[trial.outcome].format(needed=mib(trial.needed_bytes))
    return f"{text} ({trial.error})" if trial.error else text


def empty_range_text(limits: SearchLimits) -> str:
    wanted = f"No multiple of {limits.multiple_of}" if limits.multiple_of else "No size"
    lowest = max(1, limits.min_batch_size)
    return (
        f"{wanted} lies between min_batch_size={lowest} and the largest size:"
        f" {size_limit_text(limits)}."
    )


def nothing_fits_text(trial: Trial, limits: SearchLimits) -> str:
    return (
        f"Nothing fits: {trial.batch_size} samples, the smallest size allowed,"
        f" {outcome_text(trial)} under a limit of {mib(limits.limit_bytes)}. {_REMEDY}"
    )


def no_rehearsal_text(trial: Trial) -> str:
    return (
        f"No size passed its rehearsal, and {trial.batch_size} samples {outcome_text(trial)}."
        f" {_REMEDY}"
    )


def memory_text(failed: Sequence[Trial], batch_size: int) -> str:
    """Why memory allows no more than ``batch_size`` samples."""
    above = [trial for trial in failed if trial.batch_size > batch_size]
    if not above:
        return "the largest size that is predicted to fit"
    smallest = min(above, key=lambda trial: trial.batch_size)
    return f"{smallest.batch_size} samples {outcome_text(smallest)}"


def dropped_text(batch_size: int) -> str:
    return (
        f"The peak at {batch_size} samples is above that of a larger size and was left out of the"
        " fit."
    )


def fragmentation_text(trial: Trial) -> str:
    return (
        f"The allocator reserved {mib(trial.held_bytes)} for {mib(trial.peak_bytes)} of tensors."
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may let a larger size fit."
    )


def not_used_text(reason: str) -> str:
    """A note about an earlier plan."""
    return f"The earlier plan was not used: {reason}."


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
