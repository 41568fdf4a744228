"""Which sizes are predicted to fit, and which fit for certain: one function per kind of device."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import MemoryModel, Trial


def needed_bytes_on_host(
    batch_size: int,
    memory: MemoryModel,
    ran: Sequence[Trial],
    failed: Sequence[Trial],
    policy: SearchPolicy,
) -> float:
    """Bytes that a training at ``batch_size`` samples is predicted to hold on the host.

    Held bytes grow with live bytes, as far as these are written. Probes are too small to show by
    how much, so the ratio is bounded below and above. On an accelerator the prediction is
    :meth:`.MemoryModel.predict_bytes` itself.

    Args:
        batch_size: the size in samples.
        memory: the lines of live bytes.
        ran: one trial for each size that ran through, smallest size first.
        failed: the trials that did not pass.
        policy: the bounds of the ratio.
    """
    first = ran[0]
    last = ran[-1]
    last_live_bytes: float = last.peak_bytes
    # These steps ended before their live bytes were counted.
    ended_early = [t for t in failed if t.outcome == "over_limit" and not t.phase_peak_bytes]
    if ended_early:
        last = min(ended_early, key=lambda trial: trial.batch_size)
        last_live_bytes = round(memory.predict_bytes(last.batch_size))
    if last.kind != "rehearsal":
        lowest_ratio = 1.0
        highest_ratio = policy.most_held_ratio
    else:
        lowest_ratio = policy.least_held_ratio
        highest_ratio = math.inf
    grown_live_bytes = max(1, last_live_bytes - first.peak_bytes)
    ratio = (last.needed_bytes - first.needed_bytes) / grown_live_bytes
    ratio = min(highest_ratio, max(lowest_ratio, ratio))
    return last.needed_bytes + ratio * (memory.predict_bytes(batch_size) - last_live_bytes)


def guaranteed_size_on_accelerator(trial: Trial, limit_bytes: int) -> int:
    """The largest size that fits if everything that does not last grows with the batch.

    Source: the peak is a maximum of ``a + b * size`` with ``a >= fixed``, and for each of these
    ``a + b * k * size <= fixed + k * (a - fixed + b * size)``.
    """
    fixed_bytes = min(trial.fixed_bytes, trial.needed_bytes)
    growing_bytes = max(1, trial.needed_bytes - fixed_bytes)
    return (limit_bytes - fixed_bytes) * trial.batch_size // growing_bytes


def guaranteed_size_on_host(trial: Trial, limit_bytes: int, policy: SearchPolicy) -> int:
    """The same, or a larger size if free blocks of the heap make up much of the held bytes.

    An old process holds free blocks of earlier work, which do not grow with the batch.
    """
    size = guaranteed_size_on_accelerator(trial, limit_bytes)
    if not trial.is_exact:
        return size
    fixed_bytes = min(trial.fixed_bytes, trial.needed_bytes)
    growth_bytes = policy.most_held_ratio * max(1, trial.peak_bytes - fixed_bytes)
    room_bytes = limit_bytes - trial.needed_bytes
    return max(size, trial.batch_size + int(room_bytes * trial.batch_size / growth_bytes))
