"""How long the rest of a search will take."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_batchmem.plan.decide import decide
from lightning_batchmem.plan.fit import fit_memory, fit_time
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import NextSize, SearchLimits, Trial


def expected_seconds(trials: Sequence[Trial], limits: SearchLimits, policy: SearchPolicy) -> float:
    """Seconds that the rest of a search takes if every size fits as predicted; 0 if unknown."""
    memory = fit_memory(trials, policy)
    times = fit_time(trials)
    if memory is None or times is None:
        return 0.0
    run = list(trials)
    seconds = 0.0
    while isinstance(step := decide(run, limits, policy), NextSize):
        size = step.batch_size
        num_steps = policy.steps_of_a_rehearsal
        if step.kind == "probe":
            num_steps = policy.steps_of_a_probe
        seconds += num_steps * times.step_seconds(size) + policy.restart_seconds
        predicted_bytes = int(memory.predict_bytes(size))
        run.append(Trial(size, "ok", {memory.phase_at(size): predicted_bytes}, step.kind))
    return seconds
