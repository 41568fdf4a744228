"""Where a search stands, and the questions that are asked of it; pure arithmetic for :mod:`.decide`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_batchmem.plan.accumulation import micro_batches
from lightning_batchmem.plan.fit import lines_through, worst_per_size
from lightning_batchmem.plan.records import MemoryModel, SearchLimits, Trial

NOTABLE = 0.02  # a gain below this share is not worth another probe ...
NOTABLE_NOISE = 0.25  # ... nor one below this share of what the device cannot repeat (1.25 to 15 % on the host)
NEVER_DEAR = 32  # samples
NOTABLE_CEILING = 0.005  # the whole data set, or all that the user allows, is worth a probe for little
MIN_GAIN_WHEN_COSTLY = 0.2  # ... nor one below this share where it makes the search dear; see :func:`min_gain_share`

# Source of the two figures: measured by hand, torch 2.13 (CPU), the worst of 24 to 50 steps of training against the
# first two, in five kinds of networks and examples/quickstart.py: the growth exceeded theirs by 1 to 28 %, which is up
# to 0.9 of what had been loose (the prediction, from smaller sizes, was mostly above theirs); where tensors of more
# than 32 MiB, which the heap does not hold, leave nothing loose, by 1 %.
LOOSE_REPEATABILITY = 0.6  # of what is loose, by which another run may hold more
FIRM_REPEATABILITY = 0.05  # of the growth, the least that is left for it

RUN_SHARE = 0.75  # of what the device cannot repeat, that a size which was run still leaves room for


@dataclass(frozen=True)
class SearchState:
    """Where the search stands.

    Args:
        trials: everything run so far, in the order in which it was run.
        search_limits: limit in bytes, range of sizes in samples, rounding and objective.
        repeatability: share of the growth by which peaks at one size differ between runs.
        lowest: smallest size that bounds and rounding allow, in samples.
        highest: largest size that they allow, in samples.
        good: the sizes that fit and lie below any that does not, smallest first.
        failed_size: the smallest size that does not fit, in samples; ``None`` when all did.
        over: the measurement at ``failed_size``, where it ran through.
    """

    trials: tuple[Trial, ...]
    search_limits: SearchLimits
    repeatability: float
    lowest: int
    highest: int
    fitting: list[Trial]
    failed_size: int | None
    too_large: Trial | None

    @property
    def best(self) -> Trial:
        """The largest size that fits."""
        return self.fitting[-1]

    @property
    def following(self) -> int:
        """The next size above the best that the rounding allows, in samples."""
        return rounded(self.best.batch_size + 1, self.search_limits, up=True)


def search_state(
    trials: tuple[Trial, ...], search_limits: SearchLimits, repeatability: float, lowest: int, highest: int
) -> SearchState:
    """Sort what was run into sizes that fit and sizes that do not; see :class:`Search` for the arguments."""
    ran = worst_per_size(trials)
    too_large = [trial for trial in ran if upper_held_bytes(trial, ran[0], repeatability) > search_limits.limit_bytes]
    failed = {trial.batch_size for trial in (*too_large, *(trial for trial in trials if trial.outcome != "ok"))}
    failed_size = min(failed, default=None)
    fitting = [trial for trial in ran if failed_size is None or trial.batch_size < failed_size]
    measured = next((trial for trial in too_large if trial.batch_size == failed_size), None)
    return SearchState(trials, search_limits, repeatability, lowest, highest, fitting, failed_size, measured)


def upper_held_bytes(trial: Trial, smallest: Trial, repeatability: float) -> float:
    """What the same size may hold in another run: the measurement itself where the device repeats it exactly.

    Where it does not, a few steps have not seen the worst: add by how much they differed, or most of the share of the
    growth by which runs differ, whichever is more. Not all of it, as for a prediction: what came out above the line has
    used up some of that.
    """
    if repeatability == 0:
        return trial.held_bytes
    unseen = RUN_SHARE * repeatability * (trial.held_bytes - smallest.held_bytes)
    return trial.held_bytes + max(trial.noise_bytes, unseen)


def repeatability_of(trials: Sequence[Trial], repeatability: float) -> float:
    """Share of the growth by which peaks at one size may differ between runs, as the two largest sizes showed it.

    Args:
        trials: everything run so far.
        repeatability: of the device, where the trials do not say.
    """
    ran = worst_per_size(trials)
    settled = ran[1:] or ran  # the smallest size was the first, and its share is that of a process that starts
    shares = [trial.loose_share for trial in settled if trial.loose_share is not None]
    if not repeatability or not shares:
        return repeatability
    return max(FIRM_REPEATABILITY, LOOSE_REPEATABILITY * max(shares[-2:]))


def guaranteed_size(search: SearchState) -> int:
    """The largest size that fits whatever the growth with each sample is, by the largest measurement.

    Source: the peak is a maximum of ``a + b * size`` with ``a >= fixed`` (what lasts from step to step is there at each
    moment), and for each of these ``a + b * k * size <= fixed + k * (a - fixed + b * size)``: k times the samples take
    at most k times what a step holds beyond what is fixed.
    """
    size, fixed = search.best.batch_size, min(search.fitting[0].fixed_bytes, search.best.held_bytes)
    grown = search.best.held_bytes - fixed + search.best.noise_bytes + 1
    return max(size, int((search.search_limits.limit_bytes - fixed) / (1 + search.repeatability)) * size // grown)


def without_noise(model: MemoryModel) -> MemoryModel:
    """The same lines, as if every measurement was exact; what the device cannot repeat is left."""
    return replace(model, lines={phase: replace(line, noise=0.0) for phase, line in model.lines.items()})


def largest_within(model: MemoryModel, within: float, low: int, high: int) -> int:
    """The largest size up to ``high`` whose upper bound stays ``within`` bytes, or ``low``."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if model.upper_bytes(middle) <= within else (low, middle - 1)
    return low


def disagreement(search: SearchState) -> float:
    """By which share of its growth the largest probe, noise aside, is off the lines fitted to the smaller ones."""
    before, last = lines_through(search.fitting[:-1], search.repeatability), search.best
    if before is None or before.lines.keys() != last.phase_peak_bytes.keys():
        return math.inf
    off = 0.0
    for phase, line in before.lines.items():
        expected, upper = line.at(last.batch_size), line.upper(last.batch_size)
        off = max(off, abs(last.phase_peak_bytes[phase] - expected) - (upper - expected))
    return off / max(1, last.peak_bytes - search.fitting[-2].peak_bytes)


def min_gain_share(search: SearchState, target: int) -> float:
    """The gain, as a share of the best size, that makes ``target`` samples worth another probe.

    With two steps at each size, the samples pushed through the search stay within four times the size it ends with as
    long as the sizes before it, the smallest aside, add up to no more than that size. Small sizes cost little whatever
    their number, and there a few samples are a large share.
    """
    share = max(NOTABLE, NOTABLE_NOISE * search.repeatability)
    dear = target > NEVER_DEAR and sum(trial.batch_size for trial in search.trials[1:]) > target
    return max(share, MIN_GAIN_WHEN_COSTLY) if dear else share


def worth_probing(search: SearchState, target: int) -> bool:
    """Whether ``target`` samples are so many more than the best size that it is worth another probe."""
    size = search.best.batch_size
    share = NOTABLE_CEILING if target == search.highest else min_gain_share(search, target)
    return target >= max(search.following, (1 + share) * size)


def size_range(search_limits: SearchLimits) -> tuple[int, int]:
    """Smallest and largest size that the rounding allows; the first is the larger one when there is none."""
    lowest = rounded(max(1, search_limits.min_batch_size), search_limits, up=True)
    highest = rounded(search_limits.max_batch_size, search_limits)
    if (
        search_limits.multiple_of is None
        and search_limits.min_batch_size <= search_limits.max_batch_size
        and highest < lowest
    ):
        return (
            search_limits.max_batch_size,
            search_limits.max_batch_size,
        )  # too narrow for a multiple of 8: the cap itself will do
    return lowest, max(0, highest)


def rounded(size: int, search_limits: SearchLimits, up: bool = False) -> int:
    """Round down (or up) to an allowed size; :class:`.SearchLimits` explains ``multiple_of`` and the target."""
    if search_limits.target_batch_size is not None:
        allowed = micro_batches(search_limits.target_batch_size, search_limits.ranks, search_limits.multiple_of)
        if up:
            return next((micro for micro in reversed(allowed) if micro >= size), max(size, *allowed) + 1)
        return next((micro for micro in allowed if micro <= size), 0)
    step = search_limits.multiple_of or (8 if size >= 64 else 1)
    return -(-size // step) * step if up else size // step * step
