"""Which size is fastest, from measured throughput: when to stop, what to refine, what to choose.

No formula predicts a throughput here. On the host it falls where the C library begins to map blocks
in every step, and on a GPU it changes where a library takes another kernel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

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
        if speed.samples_per_second >= (1 + policy.least_rise) * best:
            flat_sizes = 0
        best = max(best, speed.samples_per_second)
    return flat_sizes


def size_between(speeds: Sequence[Speed], policy: SearchPolicy) -> int | None:
    """A size next to the best one that is worth a measurement; ``None`` if there is none.

    It is the geometric mean of the size with the best throughput and a neighbour: of the neighbour
    that is further away, and of the faster one of two that are equally far.
    """
    best = max(speeds, key=lambda speed: speed.samples_per_second, default=None)
    gaps = [
        (larger.batch_size / smaller.batch_size, smaller, larger)
        for smaller, larger in pairwise(speeds)
        if best in (smaller, larger)
    ]
    ratio, smaller, larger = max(
        gaps,
        # Sizes are rounded, so ratios that are nearly equal count as equal.
        key=lambda gap: (
            round(math.log2(gap[0])),
            gap[1].samples_per_second + gap[2].samples_per_second,
        ),
        default=(0.0, best, best),
    )
    if ratio < policy.refined_gap or smaller is None or larger is None:
        return None
    return math.isqrt(smaller.batch_size * larger.batch_size)


def size_to_time_again(
    speeds: Sequence[Speed], trials: Iterable[Trial], policy: SearchPolicy
) -> int | None:
    """A size that was timed once, and whose second time may change which size is the fastest.

    A second time can only raise a throughput. So it matters for smaller sizes than the fastest, and
    for the size with the best throughput if that is another one.
    """
    near_best = fastest(speeds, policy)
    if near_best is None:
        return None
    best = max(speeds, key=lambda speed: speed.samples_per_second)
    least = (1 - policy.rival_share) * best.samples_per_second
    rivals = [
        speed.batch_size
        for speed in speeds
        if speed.samples_per_second >= least and speed.batch_size < near_best.batch_size
    ]
    if best != near_best:
        rivals.append(best.batch_size)
    # A trial that failed has no throughput, and is not run again.
    num_timed = Counter(
        trial.batch_size for trial in trials if trial.kind == "timing" or trial.samples_per_second
    )
    return next((size for size in rivals if num_timed[size] == 1), None)


def num_refinements(trials: Iterable[Trial]) -> int:
    """How many probes were between sizes that had run before."""
    largest = 0
    count = 0
    for trial in trials:
        if trial.kind == "probe" and trial.batch_size < largest:
            count += 1
        largest = max(largest, trial.batch_size)
    return count
