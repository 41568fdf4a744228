"""The project's own batch size beside the chosen one, in real steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.objectives import objective_of
from lightning_batchmem.plan.recipe import COPIES, SLOWER_SHARE, loss_text
from lightning_batchmem.plan.records import Chosen, NextSize, Speed, Trial
from lightning_batchmem.plan.sizes import accumulated_batches, is_allowed
from lightning_batchmem.search.program import Program
from lightning_batchmem.search.ranks import Ranks
from lightning_batchmem.search.trial import TrialRunner


@dataclass(frozen=True)
class ProjectSize:
    """Compares the chosen size with the project's.

    Args:
        program: the training program.
        runner: runs its steps.
        limits: the limits of the search.
        ranks: the processes that search together.
    """

    program: Program
    runner: TrialRunner
    limits: SearchLimits
    ranks: Ranks

    def compared(self, chosen: Chosen, run: Callable[[NextSize], Trial]) -> Chosen:
        """Compare the speeds of both sizes where both fit.

        By default the project's size is taken if it is faster; ``objective="throughput"`` leaves
        it only for one that is faster.

        Args:
            chosen: what the search has found.
            run: runs a size on all ranks.

        Returns:
            The size to train with, with both throughputs.
        """
        limits = self.limits
        project_size = limits.step.batch_size
        size = chosen.batch_size
        if (
            project_size in (None, size)
            or project_size > min(chosen.largest_batch_size or size, limits.max_batch_size)
            or not is_allowed(project_size, limits)
        ):
            return chosen
        own = Speed(project_size, self._samples_per_s(project_size))
        other = Speed(size, self._samples_per_s(size))
        if not (own.samples_per_s and other.samples_per_s):
            return chosen
        chosen = replace(chosen, speeds=(own, other))
        if not objective_of(limits.options).takes_project_size(own, other):
            return chosen
        trial = run(NextSize(project_size, "rehearsal"))
        if trial.outcome != "ok":
            return chosen
        is_slower = other.samples_per_s < (1 - SLOWER_SHARE) * own.samples_per_s
        how = "ran slower" if is_slower else "did not run clearly faster"
        why = f"it is the size of the project, and {limits.unit.size(size)} {how}."
        return replace(chosen, batch_size=project_size, limited_by="throughput", why=why)

    def text_of_loss(self, batch_size: int) -> str:
        """A sentence about a loss with which the accumulation of this size does not go."""
        limits = self.limits
        if accumulated_batches(batch_size, limits) <= self.program.accumulate_grad_batches:
            return ""
        if limits.steps_are_collective or limits.options.budget or batch_size < max(COPIES):
            return ""
        losses = self.ranks.exchange(self.runner.losses_of_copies(COPIES))[0]
        return loss_text(losses)

    def _samples_per_s(self, batch_size: int) -> float:
        """The throughput of the slowest rank at a size; 0 where it was not measured."""
        accumulate = accumulated_batches(batch_size, self.limits)
        own_speed = self.runner.samples_per_s(batch_size, accumulate, self.limits)
        return min(self.ranks.exchange(own_speed or 0.0))
