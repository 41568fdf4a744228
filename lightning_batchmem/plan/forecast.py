"""How many trials a search will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_batchmem.plan.decide import decide
from lightning_batchmem.plan.fit import fit_memory, ran_through
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import NextSize, SearchLimits, Trial


def expected_trials(
    trials: Sequence[Trial], limits: SearchLimits, policy: SearchPolicy
) -> int | None:
    """The number of trials of the whole search if all others pass and memory follows its lines.

    Args:
        trials: everything that was run, in the order in which it was run.
        limits: limit in bytes, range of sizes in samples, rounding and objective.
        policy: the numbers that steer the search.

    Returns:
        The number, with those that were run; ``None`` while there are no lines.
    """
    memory = fit_memory(trials, policy)
    if memory is None:
        return None
    last = ran_through(trials)[-1]
    overhead_bytes = last.held_bytes - last.peak_bytes
    expected = list(trials)
    while isinstance(step := decide(expected, limits, policy), NextSize):
        peaks = {phase: int(line.at(step.batch_size)) for phase, line in memory.lines.items()}
        trial = Trial(step.batch_size, "ok", peaks, step.kind, fixed_bytes=last.fixed_bytes)
        held_bytes = trial.peak_bytes + overhead_bytes
        expected.append(
            replace(trial, peak_held_bytes=held_bytes, reserve_bytes=last.reserve_bytes)
        )
    return len(expected)
