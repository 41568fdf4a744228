"""Searches on simulated laws, without a device.

The peak of each phase is the highest of some lines ``(a, b)``: ``a + b * size`` bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from lightning_batchmem.plan.limits import ProjectStep, SearchLimits
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.recipe import Recipe
from lightning_batchmem.plan.records import (
    PHASES,
    Chosen,
    NextSize,
    SearchFailed,
    Trial,
    TrialMemory,
)
from lightning_batchmem.plan.rules import decide
from lightning_batchmem.plan.sizes import size_range

LIMIT = 10_000
POLICY = SearchPolicy()
Law = list[list[tuple[int, int]]]
# It fills the limit at 300 samples.
STRAIGHT: Law = [[(1000, 30)]]
Run = Callable[[NextSize], Trial]

LAWS = st.lists(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(10**4, 10**8)), min_size=1, max_size=3),
    min_size=1,
    max_size=4,
)


def limits(
    limit: int = LIMIT,
    low: int = 1,
    cap: int = 10**7,
    *,
    multiple_of: int | None = 1,
    target_batch_size: int | None = None,
    objective: str = "memory",
    **more: object,
) -> SearchLimits:
    """Limits with the sizes from ``low`` to ``cap``, of which the data set has no more."""
    options = SearchOptions(
        multiple_of=multiple_of, target_batch_size=target_batch_size, objective=objective
    )
    more.setdefault("step", ProjectStep(kept_samples=target_batch_size))
    return SearchLimits(limit, low, cap, "dataset", options, **more)


def peaks(law: Law, size: int) -> list[int]:
    """The peak of each phase in bytes."""
    return [max(a + b * size for a, b in lines) for lines in law]


def device(
    law: Law,
    limit: int = LIMIT,
    *,
    held_share: float = 0.0,
    fixed_bytes: int = 0,
    largest_passed: float = float("inf"),
    speed_at: Callable[[int], float | None] | None = None,
) -> Run:
    """Measure ``law`` on a device of ``limit`` bytes.

    Held bytes exceed live bytes by a share of the growth of live bytes.
    """

    def run(step: NextSize) -> Trial:
        size = step.batch_size
        live_bytes = max(peaks(law, size))
        held_bytes = live_bytes + int(held_share * (live_bytes - max(peaks(law, 0))))
        outcome = "ok"
        if max(live_bytes, held_bytes) > limit:
            outcome = "out_of_memory"
        elif step.kind == "rehearsal" and size > largest_passed:
            outcome = "allocator_retry"
        phases = {}
        if outcome != "out_of_memory":
            phases = dict(zip(PHASES, peaks(law, size), strict=False))
        speed = None if speed_at is None or outcome != "ok" else speed_at(size)
        return Trial(
            size,
            outcome,
            TrialMemory(
                phases, held_peak_bytes=held_bytes, needed_bytes=held_bytes, fixed_bytes=fixed_bytes
            ),
            step.kind,
            samples_per_s=speed,
        )

    return run


def passing(largest: float) -> Run:
    """A device with the straight law; no rehearsal of more than ``largest`` samples passes."""
    return device(STRAIGHT, largest_passed=largest)


def failing(largest: float, *kinds: str) -> Run:
    """A device on which trials of these kinds run out of memory above ``largest`` samples."""

    def run(step: NextSize) -> Trial:
        if step.kind in kinds and step.batch_size > largest:
            return Trial(step.batch_size, "out_of_memory", TrialMemory(), step.kind)
        return device(STRAIGHT)(step)

    return run


def launching(size: int) -> float:
    """Samples per second where a step takes 0.1 s plus 1 ms a sample."""
    return size / (0.1 + 0.001 * size)


def saturating(size: int) -> float:
    """Samples per second of a device with room for 300 samples at once."""
    return 10.0 * min(size, 300)


@dataclass
class Driven:
    """The end of a search, and everything that was run."""

    step: Chosen | SearchFailed
    trials: list[Trial]
    bounds: SearchLimits

    @property
    def plan(self) -> Plan:
        assert isinstance(self.step, Chosen), self.step
        return Plan(
            replace(self.step, notes=()),
            tuple(self.trials),
            self.bounds.limit_bytes,
            device="abacus",
            notes=self.step.notes,
            recipe=Recipe(ranks=self.bounds.step.ranks),
            budget_name=self.bounds.unit.budget_name,
        )

    @property
    def text(self) -> str:
        """Sizes in order: ``p`` is a probe, ``r`` a rehearsal, ``!`` a trial that did not fit."""
        return " ".join(
            f"{t.batch_size}{t.kind[0]}{'!' * (t.outcome != 'ok')}" for t in self.trials
        )


def sizes_of(trials: Iterable[Trial], kind: str, outcome: str = "ok") -> set[int]:
    """The sizes of the trials of one kind with one outcome."""
    return {t.batch_size for t in trials if (t.kind, t.outcome) == (kind, outcome)}


def most_trials(lowest: int, highest: int) -> float:
    """The most trials of a search, whatever fails.

    A probe is at least 1.5 times as large as the one before, and a rehearsal that fails leaves at
    most 0.6 of the way between a size that ran and one that failed.
    """
    return 32 + 2 * math.log2(max(1, highest / lowest))


def drive(run: Run, bounds: SearchLimits) -> Driven:
    """Search as the finder does, and check the properties of every search."""
    trials: list[Trial] = []
    lowest, highest = size_range(bounds)
    while isinstance(step := decide(trials, bounds), NextSize):
        size = step.batch_size
        assert (size, step.kind) not in {(trial.batch_size, trial.kind) for trial in trials}
        assert lowest <= size <= highest
        assert size == highest or size % (bounds.options.multiple_of or 1) == 0
        trials.append(run(step))
        assert len(trials) <= most_trials(lowest, highest)
    driven = Driven(step, trials, bounds)
    passed = sizes_of(trials, "rehearsal")
    if isinstance(step, Chosen):
        assert step.is_verified == (step.batch_size in passed)
        assert step.is_verified or bounds.max_batch_size == 1
        assert Plan.from_json(driven.plan.to_json()) == driven.plan
    else:
        assert not passed
    return driven
