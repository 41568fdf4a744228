"""Sentences about the outcome of a search."""

from __future__ import annotations

from lightning_batchmem.plan.records import SearchLimits, Trial, mib

REMEDY = "Use a smaller model, smaller samples, lower precision or activation checkpointing."

_LIMITS: dict[str, str] = {
    "dataset": "the data set has no more than {size} samples for a full batch",
    "host memory": "more than {size} samples in the DataLoader's workers would fill the host's memory",
    "target_batch_size": "target_batch_size needs no more than {size} samples on a rank",
    "max_batch_size": "max_batch_size is {size}",
}
_OUTCOMES = {
    "out_of_memory": "ran out of memory",
    "over_limit": "held {held}",
    "allocator_retry": "fits only if the allocator releases its cache in every step",
}


def size_limit_text(limits: SearchLimits) -> str:
    """What set the largest size."""
    return _LIMITS[limits.max_reason].format(size=limits.max_batch_size)


def outcome_text(trial: Trial) -> str:
    """What happened to a trial that did not fit."""
    text = _OUTCOMES[trial.outcome].format(held=mib(trial.needed_bytes))
    return f"{text} ({trial.error})" if trial.error else text


def empty_range_text(limits: SearchLimits) -> str:
    """Why no size is allowed."""
    wanted = f"No multiple of {limits.multiple_of}" if limits.multiple_of else "No size"
    return (
        f"{wanted} lies between min_batch_size={limits.min_batch_size} and the largest size: {size_limit_text(limits)}."
    )
