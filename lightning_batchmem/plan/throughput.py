"""Which size is fastest, from measured throughput: when to stop, and what to choose.

No formula predicts a throughput here. On the host it falls where the C library begins to map blocks
in every step, and on a GPU it changes where a library takes another kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Speed, Trial


def measured_speeds(trials: Iterable[Trial]) -> list[Speed]:
    """The best throughput of each size that fits, smallest size first."""
    best: dict[int, float] = {}
    for trial in trials:
        if trial.outcome == "ok" and trial.samples_per_second is not None:
            size = trial.batch_size
            best[size] = max(trial.samples_per_second, best.get(size, 0.0))
    return [Speed(size, best[size]) for size in sorted(best)]


def fastest(speeds: Sequence[Speed], policy: SearchPolicy) -> Speed | None:
    """The smallest size near the best throughput; ``None`` if nothing was timed."""
    best = max((speed.samples_per_second for speed in speeds), default=0.0)
    near_best = (s for s in speeds if s.samples_per_second >= policy.near_best_share * best)
    return next(near_best, None)


def num_flat_sizes(speeds: Sequence[Speed], policy: SearchPolicy) -> int:
    """How many of the largest sizes in a row did not raise the throughput."""
    best = 0.0
    flat_sizes = 0
    for speed in speeds:
        flat_sizes += 1
        if policy.near_best_share * speed.samples_per_second >= best:
            flat_sizes = 0
        best = max(best, speed.samples_per_second)
    return flat_sizes
