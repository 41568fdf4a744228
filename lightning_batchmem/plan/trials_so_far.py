"""What the trials of a search show: what ran, what failed, what fills the limit, and speeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_batchmem.plan.fit import fit_memory
from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import MemoryModel, Speed, Trial


def measured_speeds(trials: Iterable[Trial]) -> list[Speed]:
    """The best throughput of each size that fits, smallest size first."""
    best: dict[int, float] = {}
    for trial in trials:
        if trial.outcome == "ok" and trial.samples_per_s is not None:
            size = trial.batch_size
            best[size] = max(trial.samples_per_s, best.get(size, 0.0))
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
    def largest_ran(self) -> int:
        """The largest size that ran; 0 if none did."""
        return self.ran[-1].batch_size if self.ran else 0

    @property
    def largest_probed(self) -> int:
        """The largest size whose probe ran, even if its rehearsal failed."""
        return max(t.batch_size for t in self.trials if t.kind == "probe" and t.outcome == "ok")

    @property
    def least_next_size(self) -> float:
        """The least size that is worth a measurement after the largest one that ran."""
        growth = self.policy.rehearsal.least_growth
        if self.limits.is_host:
            # Each size that ran shows that a larger one is certain to fit, which is little larger
            # where gradients take most of the room.
            growth = (1 + growth) / 2
        return growth * self.largest_ran

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
        """The lines of the probes, with what is set aside; None with fewer than two sizes."""
        probes = [trial for trial in self.trials if trial.kind == "probe"]
        return fit_memory(
            [replace(trial, memory=trial.memory.with_set_aside()) for trial in probes]
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
            * (self.limits.filled_bytes - trial.memory.set_aside_bytes - trial.memory.fixed_bytes)
            / trial.memory.growing_bytes
            for trial in self.ran
            if trial.kind == "probe"
        )

    @property
    def predicted_size(self) -> float:
        """The share of the size that fills the limit at which the first rehearsal is."""
        share = self.policy.rehearsal.first_share
        if self.limits.is_host:
            share = self.policy.rehearsal.host_share
        elif self.limits.steps_are_collective:
            share = self.policy.rehearsal.collective_share
        return share * self.size_at_limit

    @property
    def certain_size(self) -> float:
        """The largest size whose steps are certain to fit."""
        # A step may take what a checkpoint needs later. Where there is no room for both, what a
        # larger step frees stays with the process, and a training was killed.
        return self._certain_size(self._free_bytes if self._room_bytes > 0 else 0)

    @property
    def first_rehearsal_size(self) -> float:
        """The size of the first rehearsal."""
        if not self.limits.is_host:
            return self.predicted_size
        return min(self.predicted_size, self._certain_size(self._room_bytes))

    @property
    def _free_bytes(self) -> int:
        """What the process left of the limit at the sizes that ran."""
        return self.limits.limit_bytes - max(trial.memory.held_bytes for trial in self.ran)

    @property
    def _room_bytes(self) -> int:
        """The same without what is set aside."""
        return self._free_bytes - max(trial.memory.set_aside_bytes for trial in self.ran)

    def _certain_size(self, room_bytes: int) -> float:
        """The largest size that takes at most this many bytes more than the largest that ran.

        What does not last grows at most in proportion to the size, also where lines show nothing
        yet: backward may make it below gradients that are larger so far.

        Source: where only the lines of tensors counted, the system killed processes that held much
        besides tensors.
        """
        last = self.ran[-1]
        grown_bytes = last.memory.held_bytes - last.memory.fixed_bytes
        sample_bytes = 0.0
        if self.memory is not None:
            slope = max(line.slope for line in self.memory.lines.values())
            sample_bytes = slope / self.policy.rehearsal.host_share
        sample_bytes = max(1.0, sample_bytes, grown_bytes / last.batch_size)
        return last.batch_size + self.policy.rehearsal.first_share * room_bytes / sample_bytes

    @cached_property
    def speeds(self) -> list[Speed]:
        """The throughput of each size that ran, the smallest size first."""
        return measured_speeds(self.ran)
