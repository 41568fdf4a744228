"""The search: run a size, fit, decide, until a size is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_batchmem.devices.breakdown import measure_breakdown
from lightning_batchmem.plan import sentences
from lightning_batchmem.plan.decide import decide
from lightning_batchmem.plan.fit import ran_through
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import Chosen, NextSize, SearchFailed, SearchLimits, Trial
from lightning_batchmem.plan.reuse import reused, why_not_allowed
from lightning_batchmem.search.compiled import forget_compiled
from lightning_batchmem.search.memory_budget import MemoryBudget, search_limits
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
        start_bytes: live bytes at the start of the last rehearsal; 0 if nothing was rehearsed.
    """

    chosen: Chosen | SearchFailed
    trials: tuple[Trial, ...]
    limits: SearchLimits
    notes: tuple[str, ...] = ()
    start_bytes: int = 0


class BatchSizeSearch:
    """A search over the real steps of one session.

    Args:
        session: the training program, in the state before its first step.
        budget: the memory that this rank may use, with options and policy of the search.
        ranks: the processes that search together.
        progress: shows the trial and the step that run.
    """

    def __init__(
        self,
        session: Session,
        budget: MemoryBudget,
        ranks: Ranks,
        progress: SearchProgress,
    ) -> None:
        self._session = session
        self._budget = budget
        self._policy = budget.policy
        self._ranks = ranks
        self._progress = progress
        self._runner = TrialRunner(session, budget.device, ranks, budget.policy)
        self._runner.meter.before_step = progress.begin_step
        self._start_bytes = 0

    def run(self, earlier_plan: Plan | None = None) -> SearchResult:
        """Search, or only rehearse the size of an earlier plan if that passes."""
        session = self._session
        limits = search_limits(session, self._budget, self._ranks)
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
            result = self._search([], limits)
        if isinstance(result.chosen, Chosen) and result.trials and session.exchanges_gradients:
            result = self._with_room_for_exchanges(result)
        if isinstance(result.chosen, SearchFailed):
            failure = self._explained(result.chosen, result.trials, result.limits)
            return replace(result, chosen=failure)
        session.check_batch_size(result.chosen.batch_size)
        notes = [
            *result.chosen.notes,
            *notes,
            *self._runner.notes(),
            *session.notes,
        ]
        return replace(result, notes=tuple(notes), start_bytes=self._start_bytes)

    def _search(self, trials: list[Trial], limits: SearchLimits) -> SearchResult:
        """Run sizes until one is chosen."""
        while isinstance(step := decide(trials, limits, self._policy), NextSize):
            self._progress.trying(step, trials)
            if step.needs_clean_start:
                self._restart(step.batch_size)
            self._session.set_batch_size(step.batch_size)
            self._detect_collectives(step, trials)
            trials.append(self._ranks.worst_of(self._runner.run(step, limits)))
            self._progress.measured(trials[-1])
            limits = self._read_again(limits)
        return SearchResult(step, tuple(trials), limits)

    def _rehearse_again(self, plan: Plan, limits: SearchLimits) -> SearchResult:
        """Rehearse the size of an earlier plan."""
        step = NextSize(plan.batch_size, "rehearsal", needs_clean_start=True)
        self._progress.trying(step, [])
        self._restart(step.batch_size)
        self._detect_collectives(step, [])
        trial = self._ranks.worst_of(self._runner.run(step, limits))
        self._progress.measured(trial)
        if trial.outcome != "ok":
            self._restart(self._budget.options.first_size(self._policy))
            return SearchResult(
                SearchFailed(sentences.failed_again(trial, limits)), (trial,), limits
            )
        chosen, trials = reused(plan, trial, limits)
        return SearchResult(chosen, trials, self._read_again(limits))

    def _with_room_for_exchanges(self, result: SearchResult) -> SearchResult:
        """Lower the size until steps in which ranks exchange gradients fit as well."""
        limits = result.limits
        room = limits
        while isinstance(chosen := result.chosen, Chosen):
            self._restart(chosen.batch_size)
            own_held_bytes = self._runner.synchronized_step(chosen.batch_size)
            held_bytes = max(self._ranks.exchange(own_held_bytes))
            if held_bytes <= limits.limit_bytes:
                return replace(result, limits=limits)
            passed = ran_through(trial for trial in result.trials if trial.outcome == "ok")
            alone = next(trial for trial in passed if trial.batch_size == chosen.batch_size)
            more_bytes = max(1, held_bytes - alone.held_bytes)
            room = replace(room, limit_bytes=room.limit_bytes - more_bytes)
            trials = [
                trial
                for trial in result.trials
                if trial.kind != "rehearsal" or trial.needed_bytes <= room.limit_bytes
            ]
            result = self._search(trials, room)
        return result

    def _restart(self, batch_size: int) -> None:
        """Go back to the state in which the stage starts, and set the size of the next steps."""
        forget_compiled()
        self._session.restart(batch_size)
        self._start_bytes = self._runner.meter.live_bytes()

    def _detect_collectives(self, step: NextSize, trials: Sequence[Trial]) -> None:
        """Before the first trial, find out whether the user's own steps need all ranks."""
        if trials or self._ranks.size == 1 or self._runner.is_collective:
            return
        calls_collectives = self._runner.calls_collectives(step.batch_size)
        self._runner.is_collective = any(self._ranks.exchange(calls_collectives))
        if self._runner.is_collective or step.kind == "rehearsal":
            # A step has ended early, or has changed the state in which a rehearsal starts.
            self._restart(step.batch_size)

    def _read_again(self, limits: SearchLimits) -> SearchLimits:
        """The limits after a trial: other processes may have filled the device meanwhile."""
        readings = self._ranks.exchange(
            (self._budget.usable_bytes(), self._runner.meter.is_compiled)
        )
        return replace(
            limits,
            limit_bytes=min(limits.limit_bytes, *(usable_bytes for usable_bytes, _ in readings)),
            steps_are_collective=self._runner.is_collective,
            is_compiled=any(is_compiled for _, is_compiled in readings),
        )

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
        worker_bytes = trial.worker_bytes if self._budget.device.holds_loader_workers else 0
        # A size that ran out of memory needed more than was measured.
        needed_bytes = max(breakdown.peak_bytes, limits.limit_bytes)
        text = sentences.breakdown_of(
            trial.batch_size,
            limits,
            str(breakdown),
            worker_bytes,
            is_mostly_other=2 * breakdown.other_bytes > needed_bytes,
        )
        return SearchFailed(f"{failure.reason} {text}")
