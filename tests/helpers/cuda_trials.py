"""Cases of ``tests/gpu/test_cuda_trials.py``: every trial of a search is run twice."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from lightning.pytorch import Trainer

from benchmarks.networks import group, project
from lightning_batchmem import BatchFinder
from lightning_batchmem.search.trial import TrialRunner
from tests.helpers.cuda_stub import gpu_trainer, print_case

COUNTERS = ("num_alloc_retries", "num_device_free", "num_device_alloc", "num_ooms")


class Twice:
    """Runs each trial of a search twice, and keeps what differs between the two."""

    def __init__(self) -> None:
        self.num_trials = 0
        self.outcomes: list[str] = []
        self.differences: list[dict[str, Any]] = []

    def install(self) -> None:
        isolated = TrialRunner.run
        restarted = TrialRunner._restarted
        before: dict[str, int] = {}

        def noted(runner: TrialRunner, *arguments: Any) -> Any:
            meter = restarted(runner, *arguments)
            # The restart has released what an earlier trial left.
            before.update(counts())
            return meter

        def twice(runner: TrialRunner, *arguments: Any, **keywords: Any) -> Any:
            records = []
            for _ in range(2):
                trial = isolated(runner, *arguments, **keywords)
                # The clock of the stub is that of a shared machine.
                times = {"step_seconds": None}
                record = asdict(replace(trial, samples_per_s=None, **times))
                after = counts()
                record |= {name: after[name] - before[name] for name in COUNTERS}
                records.append(record)
            self.num_trials += 1
            self.outcomes.append(trial.outcome)
            first, second = records
            for name, value in first.items():
                if value != second[name]:
                    difference = {"trial": arguments[:2], name: [value, second[name]]}
                    self.differences.append(difference)
            return trial

        TrialRunner._restarted = noted  # type: ignore[method-assign]
        TrialRunner.run = twice  # type: ignore[method-assign, assignment]


def counts() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {name: int(stats[name]) for name in COUNTERS}


def every_trial_twice(name: str, gibibytes: str) -> dict[str, Any]:
    """A search in a Trainer, whose steps are timed equally often."""
    twice = Twice()
    twice.install()
    finder = BatchFinder(objective="memory")
    finder.policy = replace(finder.policy, steps=replace(finder.policy.steps, timed_seconds=0.0))
    module = project(group("device")[name], int(float(gibibytes) * 2**30))
    trainer: Trainer = gpu_trainer(finder, max_steps=1)
    trainer.fit(module)
    return {
        "num_trials": twice.num_trials,
        "outcomes": twice.outcomes,
        "differences": twice.differences,
    }


CASES = {"every_trial_twice": every_trial_twice}

if __name__ == "__main__":
    print_case(CASES)
