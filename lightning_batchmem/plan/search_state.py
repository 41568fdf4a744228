"""Everything that follows from the trials of a search: sizes that fit, predictions, and speeds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from lightning_batchmem.plan.fit import fit_memory, ran_through
from lightning_batchmem.plan.headroom import (
    guaranteed_size_on_host,
    needed_bytes_on_host,
)
from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import MemoryModel, Speed, Trial
from lightning_batchmem.plan.scaling import largest_where, rounded, size_range
from lightning_batchmem.plan.throughput import measured_speeds, num_refinements


@dataclass(frozen=True)
class SearchState:
    """Everything that follows from the trials, each computed once.

    Args:
        trials: everything that was run, in the order in which it was run.
        limits: limit in bytes, range of sizes in samples, rounding and objective.
        policy: the numbers that steer the search.
    """

    trials: tuple[Trial, ...]
    limits: SearchLimits
    policy: SearchPolicy

    @cached_property
    def lowest(self) -> int:
        """The smallest size that is allowed."""
        return size_range(self.limits)[0]

    @cached_property
    def highest(self) -> int:
        """The largest size that is allowed."""
        return size_range(self.limits)[1]

    @cached_property
    def tried(self) -> set[int]:
        """The sizes that were run."""
        return {trial.batch_size for trial in self.trials}

    @cached_property
    def is_compiled(self) -> bool:
        """Whether the module is compiled for each size, so that few sizes are run."""
        return any(trial.is_compiled for trial in self.trials)

    @property
    def is_for_throughput(self) -> bool:
        """Whether the fastest size is wanted, not the largest."""
        return self.limits.options.objective == "throughput"

    @property
    def sizes_left(self) -> int:
        """How many sizes may run besides the probes that fit."""
        policy = self.policy
        most = policy.max_sizes_compiled if self.is_compiled else policy.max_sizes
        probed = {t.batch_size for t in self.trials if t.kind == "probe" and t.outcome == "ok"}
        return most - len(self.tried - probed)

    @cached_property
    def passed_sizes(self) -> set[int]:
        """The sizes that passed a rehearsal."""
        return {
            trial.batch_size
            for trial in self.trials
            if trial.kind == "rehearsal" and trial.outcome == "ok"
        }

    @cached_property
    def failed(self) -> list[Trial]:
        """Trials that did not run through, above every rehearsal that passed."""
        best = max(self.passed_sizes, default=0)
        return [t for t in self.trials if t.outcome != "ok" and t.batch_size > best]

    @cached_property
    def failed_size(self) -> float:
        """The smallest size that failed above every size that passed."""
        return min((trial.batch_size for trial in self.failed), default=math.inf)

    @cached_property
    def ran(self) -> list[Trial]:
        """One trial for each size that ran through, smallest size first."""
        return ran_through(self.trials)

    @cached_property
    def fitting(self) -> list[Trial]:
        """One trial for each size that ran within the limit, below any size that did not."""
        ran = ran_through(trial for trial in self.trials if trial.outcome == "ok")
        return [trial for trial in ran if trial.batch_size < self.failed_size]

    @cached_property
    def passed(self) -> list[Trial]:
        """Rehearsals that passed, smallest size first."""
        return [trial for trial in self.fitting if trial.batch_size in self.passed_sizes]

    @property
    def largest(self) -> Trial:
        """The largest size that fits."""
        return self.fitting[-1]

    @cached_property
    def memory(self) -> MemoryModel | None:
        """The lines of live bytes; None with fewer than two sizes."""
        return fit_memory(self.ran, self.policy)

    @cached_property
    def speeds(self) -> list[Speed]:
        """The throughput of each size that fits and never failed, smallest size first."""
        sizes = {trial.batch_size for trial in self.fitting}
        sizes -= {trial.batch_size for trial in self.trials if trial.outcome != "ok"}
        return measured_speeds(trial for trial in self.trials if trial.batch_size in sizes)

    @property
    def has_compared_speeds(self) -> bool:
        """Whether sizes were run because they are near the size with the best throughput."""
        has_timed_again = any(trial.kind == "timing" for trial in self.trials)
        return has_timed_again or num_refinements(self.trials) > 0

    def candidate(self) -> int:
        """The largest size that is predicted to fit, less a step for each failure."""
        policy = self.policy
        # The needed bytes include a reserve.
        share = policy.collective_share if self.limits.steps_are_collective else 1.0
        size = self.largest_predicted_size(share)
        if self.failed:
            num_steps = len(self.failed) + self._skipped_steps_down()
            shrink = policy.step_down[min(num_steps, len(policy.step_down)) - 1]
            shrunk_size = self.rounded(int(self.failed_size * (1 - shrink)))
            # A size that was probed without a failure is more likely to pass than a smaller guess.
            size = min(size, max(shrunk_size, self.largest.batch_size))
            if len(self.failed) >= len(policy.step_down):
                # The prediction is far too large, so search in between.
                size = min(size, self.between_fit_and_failure())
        return max(size, self.lowest)

    def guaranteed_size(self) -> int:
        """The largest size that fits for certain, after the largest that fitted."""
        usable_bytes = self._usable_bytes_on_host(self.policy.candidate_share)
        return guaranteed_size_on_host(self.largest, int(usable_bytes), self.policy)

    def first_rehearsal_size(self) -> int:
        """The size that is rehearsed first where an overrun kills, before it is rounded."""
        return int(self.policy.climb[0] * self.unrounded_predicted_size(1.0, 10**9))

    def largest_predicted_size(self, share: float) -> int:
        """The largest size that is predicted to fit into a share of the limit."""
        return self.rounded(self.unrounded_predicted_size(share, self.highest))

    def unrounded_predicted_size(self, share: float, most: int) -> int:
        """The same before it is rounded, and at most ``most``."""
        return largest_where(lambda size: self._is_predicted_to_fit(size, share), 0, most)

    def between_fit_and_failure(self) -> int:
        """The geometric mean of the largest size that fits and the smallest that does not."""
        return self.rounded(math.isqrt(self.largest.batch_size * int(self.failed_size)))

    def rounded(self, size: int) -> int:
        """Round down to an allowed size."""
        return self.highest if size >= self.highest else rounded(size, self.limits)

    def _skipped_steps_down(self) -> int:
        """Steps down to skip: memory should run out only once."""
        return 1 if any(trial.outcome == "out_of_memory" for trial in self.failed) else 0

    def _usable_bytes_on_host(self, share: float) -> float:
        """What the largest size that fits needs, and a share of the room beyond that."""
        needed_bytes = min(self.largest.needed_bytes, self.limits.limit_bytes)
        return needed_bytes + share * (self.limits.limit_bytes - needed_bytes)

    def _is_predicted_to_fit(self, size: int, share: float) -> bool:
        """Whether a size is predicted to need at most a share of the limit."""
        if self.memory is None:
            return False
        needed_bytes = needed_bytes_on_host(size, self.memory, self.ran, self.failed, self.policy)
        return needed_bytes <= self._usable_bytes_on_host(share)
