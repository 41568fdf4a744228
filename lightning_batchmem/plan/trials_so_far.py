"""What the trials of a search show: what ran, what failed, what fills the limit, and speeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_batchmem.plan.fit import fit_memory
from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import MemoryModel, Speed, Trial


def measured_speeds(trials: Iterable[Trial]) -> list[Speed]:
    """The best throughput of each size that fits, smallest size first."""
    best: dict[int, float] = {}
    for trial in trials:
        if trial.outcome == "ok" and trial.samples_per_second is not None:
            size = trial.batch_size
            best[size] = max(trial.samples_per_second, best.get(size, 0.0))
    return [Speed(size, best[size]) for size in sorted(best)]


@dataclass(frozen=True)
class TrialsSoFar:
    """What the trials of a search show; sizes in samples.

    Args:
        trials: everything that was run, in the order in which it was run; at least one.
        limits: limit in bytes, range of sizes, and the user's options.
        policy: the numbers that steer the search.
    """

    trials: Sequence[Trial]
    limits: SearchLimits
    policy: SearchPolicy

    @cached_property
    def passed(self) -> int:
        """The largest size that passed a rehearsal; 0 if none did."""
        sizes = [t.batch_size for t in self.trials if t.kind == "rehearsal" and t.outcome == "ok"]
        return max(sizes, default=0)

    @cached_property
    def failed(self) -> list[Trial]:
        """The trials that failed above every size that passed."""
        return [t for t in self.trials if t.outcome != "ok" and t.batch_size > self.passed]

    @cached_property
    def smallest_failed(self) -> float:
        """The smallest size that failed; ``inf`` if none did."""
        return min((trial.batch_size for trial in self.failed), default=math.inf)

    @cached_property
    def ran(self) -> list[Trial]:
        """The trials that ran, below every size that failed; the smallest size first."""
        ran = [t for t in self.trials if t.outcome == "ok" and t.batch_size < self.smallest_failed]
        return sorted(ran, key=lambda trial: trial.batch_size)

    @property
    def holds_too_much(self) -> bool:
        """Whether the last size failed on the host although its tensors fit."""
        last = self.trials[-1]
        tensors_fit = last.needed_bytes <= self.limits.limit_bytes
        return self.limits.is_host and last.outcome == "over_limit" and tensors_fit

    @property
    def largest_ran(self) -> int:
        """The largest size that ran; 0 if none did."""
        return self.ran[-1].batch_size if self.ran else 0

    @property
    def largest_probed(self) -> int:
        """The largest size whose probe ran, even if its rehearsal failed."""
        return max(t.batch_size for t in self.trials if t.kind == "probe" and t.outcome == "ok")

    @property
    def num_errors(self) -> int:
        """How many rehearsals ran out of memory."""
        return sum(
            trial.outcome == "out_of_memory" and trial.kind == "rehearsal" for trial in self.trials
        )

    @property
    def has_rehearsed(self) -> bool:
        """Whether the ladder has ended."""
        return any(trial.kind == "rehearsal" for trial in self.trials)

    @cached_property
    def memory(self) -> MemoryModel | None:
        """The lines of the probes, with what is set aside; None with fewer than two sizes.

        What grows in backward may be hidden below the gradients that are alive in the forward pass,
        so there is a line without them.
        """
        probes = [trial for trial in self.trials if trial.kind == "probe"]
        memory = fit_memory([trial.with_set_aside() for trial in probes])
        known_apart = [trial for trial in probes if trial.without_gradients_bytes]
        without_gradients = fit_memory([trial.without_gradients() for trial in known_apart])
        if memory is None or without_gradients is None:
            return memory
        return MemoryModel(
            {**memory.lines, "without gradients": without_gradients.lines["forward"]}
        )

    @cached_property
    def size_at_limit(self) -> float:
        """The size that fills the limit, as the probes predict it.

        Without lines, all memory that does not last is expected to grow in proportion to the size,
        which is an upper bound of what larger sizes need.

        Source: the peak is a maximum of ``a + b * size`` with ``a >= fixed``, and for each of these
        ``a + b * k * size <= fixed + k * (a - fixed + b * size)``.
        """
        if self.memory is not None:
            return self.memory.size_at(self.limits.filled_bytes)
        return max(
            trial.batch_size
            * (self.limits.filled_bytes - trial.set_aside_bytes - trial.fixed_bytes)
            / trial.growing_bytes
            for trial in self.ran
            if trial.kind == "probe"
        )

    @property
    def most_held_size(self) -> float:
        """The largest size at which a process on the host may hold no more than the limit.

        What it held at the sizes that ran is measured. Each further live byte may take as many as
        the share of the host allows, and gradients do not grow.
        """
        last = self.ran[-1]
        held_bytes = max(trial.held_bytes + trial.set_aside_bytes for trial in self.ran)
        room_bytes = self.limits.limit_bytes - held_bytes
        sample_bytes = last.sample_bytes
        if self.memory is not None:
            # Where nothing grows, a sample takes a byte.
            sample_bytes = max(1.0, *(line.slope for line in self.memory.lines.values()))
        return last.batch_size + self.policy.host_share * room_bytes / sample_bytes

    @property
    def first_rehearsal_size(self) -> float:
        """The size of the first rehearsal, as the probes predict it."""
        if self.limits.is_host:
            return min(self.policy.host_share * self.size_at_limit, self.most_held_size)
        is_collective = self.limits.steps_are_collective
        share = self.policy.collective_share if is_collective else self.policy.rehearsal_share
        return share * self.size_at_limit

    @cached_property
    def speeds(self) -> list[Speed]:
        """The throughput of each size that ran, the smallest size first."""
        return measured_speeds(self.ran)
