"""Which sizes are predicted to fit on the host, and which fit for certain."""

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

    Held bytes are live bytes and an overhead, which grows with the phase that grows most: its
    blocks seldom fit exactly into what another phase has freed. It may be negative, because bytes
    that are never written are not held. Probes are too small to show it, so it is bounded below
    and above. It differs between rehearsals, as between processes that train at one size, by the
    order of the blocks in the heap. So the largest of all rehearsals counts.

    Args:
        batch_size: the size in samples.
        memory: the lines of live bytes.
        ran: one trial for each size that ran through, smallest size first.
        failed: the trials that did not pass.
        policy: the bounds of the held bytes for each live byte.
    """
    first = ran[0]
    last = ran[-1]
    last_live_bytes: float = last.peak_bytes
    # These steps ended before their live bytes were counted.
    ended_early = [t for t in failed if t.outcome == "over_limit" and not t.phase_peak_bytes]
    if ended_early:
        last = min(ended_early, key=lambda trial: trial.batch_size)
        last_live_bytes = memory.predict_bytes(last.batch_size)
    if last.kind != "rehearsal":
        least_overhead = 0.0
        most_overhead = policy.most_held_ratio - 1
    else:
        least_overhead = policy.least_held_ratio - 1
        most_overhead = math.inf
    grown_overhead_bytes = (
        last.needed_bytes - last_live_bytes - (first.needed_bytes - first.peak_bytes)
    )
    grown_bytes = max(1.0, memory.grown_bytes(first.batch_size, last.batch_size))
    overhead = min(most_overhead, max(least_overhead, grown_overhead_bytes / grown_bytes))
    more_live_bytes = memory.predict_bytes(batch_size) - last_live_bytes
    overhead_grows_with = more_live_bytes
    if overhead > 0:
        overhead_grows_with = memory.grown_bytes(last.batch_size, batch_size)
    needed_bytes = last.needed_bytes + more_live_bytes + overhead * overhead_grows_with
    # The overhead is that beyond the first trial, which has none of its own.
    rehearsals = [trial for trial in ran[1:] if trial.kind == "rehearsal"]
    if last not in rehearsals:
        return needed_bytes
    overheads = [_held_overhead(trial, first, memory) for trial in rehearsals]
    larger_overhead = max(0.0, max(overheads) - max(least_overhead, overheads[-1]))
    return needed_bytes + larger_overhead * memory.grown_bytes(first.batch_size, batch_size)


def _held_overhead(trial: Trial, first: Trial, memory: MemoryModel) -> float:
    """Held bytes beyond the live bytes, for each byte of growth since the first trial."""
    overhead_bytes = trial.held_bytes - trial.peak_bytes - (first.held_bytes - first.peak_bytes)
    return overhead_bytes / max(1.0, memory.grown_bytes(first.batch_size, trial.batch_size))


def guaranteed_size_on_host(trial: Trial, limit_bytes: int, policy: SearchPolicy) -> int:
    """The largest size that fits if everything that does not last grows with the batch.

    It may be larger, because only a part of the held bytes grows with the batch. An old process
    holds free blocks of earlier work, and an optimizer step needs room for the parameters. What it
    holds besides is left from the forward and the backward pass.

    Source: the peak is a maximum of ``a + b * size`` with ``a >= fixed``, and for each of these
    ``a + b * k * size <= fixed + k * (a - fixed + b * size)``.
    """
    fixed_bytes = min(trial.fixed_bytes, trial.needed_bytes)
    growing_bytes = max(1, trial.needed_bytes - fixed_bytes)
    size = (limit_bytes - fixed_bytes) * trial.batch_size // growing_bytes
    if not trial.is_exact:
        return size
    peaks = trial.phase_peak_bytes
    with_batch = [peaks[phase] for phase in peaks if phase != "optimizer_step"]
    growing_bytes = max(with_batch, default=trial.peak_bytes) - trial.fixed_bytes
    growth_bytes = policy.most_held_ratio * max(1, growing_bytes)
    room_bytes = limit_bytes - trial.needed_bytes
    return max(size, trial.batch_size + int(room_bytes * trial.batch_size / growth_bytes))
