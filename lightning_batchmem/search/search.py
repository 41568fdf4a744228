"""The search: run a size, fit, decide, until a size is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_batchmem.devices.breakdown import measure_breakdown
from lightning_batchmem.plan import sentences
from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Chosen, NextSize, SearchFailed, Trial
from lightning_batchmem.plan.rules import decide
from lightning_batchmem.search.earlier_plan import reused, why_not_allowed
from lightning_batchmem.search.limits import MemoryRoom, search_limits
from lightning_batchmem.search.progress import SearchProgress
from lightning_batchmem.search.ranks import Ranks
from lightning_batchmem.search.session import Session
from lightning_batchmem.search.trial import TrialRunner


@dataclass(frozen=True)
class SearchResult:
    """The size that a search chose, and what its plan is made of.

    Args:
        chosen: the size, or why there is none.
        trials: everything that was run, in the order in which it was run.
        limits: the limits at the end of the search.
        notes: sentences about the search and its samples.
    """

    chosen: Chosen | SearchFailed
    trials: tuple[Trial, ...]
    limits: SearchLimits
    notes: tuple[str, ...] = ()


class BatchSizeSearch:
    """A search over the real steps of one session.

    Args:
        session: the training program.
        budget: the memory that this rank may use.
        options: the arguments of the user.
        policy: the numbers that steer the search.
        ranks: the processes that search together.
        progress: shows the trial and the step that run.
    """

    def __init__(
        self,
        session: Session,
        budget: MemoryRoom,
        options: SearchOptions,
        policy: SearchPolicy,
        ranks: Ranks,
        progress: SearchProgress,
    ) -> None:
        self._session = session
        self._budget = budget
        self._options = options
        self._policy = policy
        self._ranks = ranks
        self._progress = progress
        self._runner = TrialRunner(session, budget.device, ranks, policy, progress.begin_step)

    def run(self, earlier_plan: Plan | None = None, also_size: int | None = None) -> SearchResult:
        """Search, or only rehearse the size of an earlier plan if that passes.

        Args:
            earlier_plan: the plan.
            also_size: a size that is rehearsed at the end, where the data allow it.
        """
        session = self._session
        limits = search_limits(session, self._budget, self._options, self._policy, self._ranks)
        notes: list[str] = []
        result: SearchResult | None = None
        if earlier_plan is not None:
            why_not = why_not_allowed(earlier_plan, limits)
            if not why_not:
                result = self._rehearse_again(earlier_plan, limits)
                if isinstance(result.chosen, SearchFailed):
                    why_not = result.chosen.reason
                    result = None
            if why_not:
                notes.append(sentences.earlier_plan_not_used(why_not))
        if result is None:
            result = self._search(limits)
        later_bytes = self._budget.later_bytes
        of_limit = [sentences.later_bytes(later_bytes)] if later_bytes else []
        if isinstance(result.chosen, SearchFailed):
            failure = self._explained(result.chosen, result.trials, result.limits)
            reason = " ".join([failure.reason, *of_limit])
            return replace(result, chosen=SearchFailed(reason))
        chosen = result.chosen
        session.check_batch_size(chosen.batch_size)
        if also_size is not None and also_size <= limits.max_batch_size:
            result = self._with_size(result, also_size)
        of_trials = dict.fromkeys(note for trial in result.trials for note in trial.notes)
        notes = [
            *chosen.notes,
            *notes,
            *of_trials,
            *session.notes,
            *of_limit,
        ]
        return replace(result, notes=tuple(notes))

    def _search(self, limits: SearchLimits) -> SearchResult:
        """Run sizes until one is chosen."""
        trials: list[Trial] = []
        while isinstance(step := decide(trials, limits, self._policy), NextSize):
            if not trials:
                limits = self._with_collectives_found(step.batch_size, limits)
            trials.append(self._trial(step, trials, limits))
            limits = self._read_again(limits)
        return SearchResult(step, tuple(trials), limits)

    def _with_size(self, result: SearchResult, batch_size: int) -> SearchResult:
        """The result with a rehearsal of one more size, unless it has one."""
        if any(t.batch_size == batch_size and t.kind == "rehearsal" for t in result.trials):
            return result
        trial = self._trial(NextSize(batch_size, "rehearsal"), result.trials, result.limits)
        return replace(result, trials=(*result.trials, trial))

    def _rehearse_again(self, plan: Plan, limits: SearchLimits) -> SearchResult:
        """Rehearse the size of an earlier plan."""
        limits = self._with_collectives_found(plan.batch_size, limits)
        trial = self._trial(NextSize(plan.batch_size, "rehearsal"), [], limits)
        if trial.outcome != "ok":
            return SearchResult(
                SearchFailed(sentences.failed_again(trial, limits)), (trial,), limits
            )
        chosen, trials = reused(plan, trial, limits)
        return SearchResult(chosen, trials, self._read_again(limits))

    def _trial(self, step: NextSize, trials: Sequence[Trial], limits: SearchLimits) -> Trial:
        """Run a trial on all ranks, of which the worst counts."""
        self._progress.begin_trial(step, trials)
        own_trial = self._runner.run(step.kind, step.batch_size, limits)
        trial = self._ranks.worst_of(own_trial)
        self._progress.measured(trial)
        return trial

    def _with_collectives_found(self, batch_size: int, limits: SearchLimits) -> SearchLimits:
        """Before the first trial, find out whether the user's own steps need all ranks."""
        if self._ranks.size == 1 or limits.steps_are_collective:
            return limits
        calls_collectives = self._runner.calls_collectives(batch_size)
        is_collective = any(self._ranks.exchange(calls_collectives))
        return replace(limits, steps_are_collective=is_collective)

    def _read_again(self, limits: SearchLimits) -> SearchLimits:
        """The limits after a trial: other processes may have filled the device meanwhile."""
        if limits.is_host:
            # The size stays far from the limit, and equal searches find equal sizes.
            return limits
        usable_bytes = self._ranks.exchange(self._budget.usable_bytes())
        return replace(limits, limit_bytes=min(limits.limit_bytes, *usable_bytes))

    def _explained(
        self, failure: SearchFailed, trials: Sequence[Trial], limits: SearchLimits
    ) -> SearchFailed:
        """The failure with the memory breakdown of the last size, and what to do."""
        if not trials:
            return failure
        trial = trials[-1]
        self._budget.device.release_cached()
        breakdown = measure_breakdown(
            self._session.module,
            self._session.optimizers,
            # To move a batch to the device could run out of memory once more.
            None,
            self._session.device,
            start_bytes=self._budget.device.current().allocated_bytes,
            # Nothing was measured where memory ran out in the first step.
            peak_bytes=trial.peak_bytes or trial.held_bytes or None,
        )
        # A size that ran out of memory needed more than was measured.
        needed_bytes = max(breakdown.peak_bytes, limits.limit_bytes)
        text = sentences.breakdown_of(
            trial.batch_size,
            limits,
            str(breakdown),
            trial.set_aside_bytes,
            is_mostly_other=2 * breakdown.other_bytes > needed_bytes,
        )
        return SearchFailed(f"{failure.reason} {text}")
