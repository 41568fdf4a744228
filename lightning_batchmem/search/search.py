"""The search: run a size, fit, decide, until a size is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lightning_batchmem.devices.breakdown import measure_breakdown
from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.notes import Note, in_order
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.recipe import Recipe, slower_text
from lightning_batchmem.plan.records import Chosen, Growth, NextSize, SearchFailed, Trial, mib
from lightning_batchmem.plan.rules import decide
from lightning_batchmem.plan.sizes import (
    accumulated_batches,
    is_allowed,
    largest_where,
    rounded,
    size_range,
)
from lightning_batchmem.search.earlier_plan import (
    earlier_plan_not_used,
    find_earlier_plan,
    reused,
    why_not_allowed,
)
from lightning_batchmem.search.kept_trials import KeptTrials
from lightning_batchmem.search.limits import MemoryRoom, search_limits
from lightning_batchmem.search.program import Program
from lightning_batchmem.search.progress import SearchProgress
from lightning_batchmem.search.project_size import ProjectSize
from lightning_batchmem.search.ranks import Ranks
from lightning_batchmem.search.rehearsal import batches_that_keep
from lightning_batchmem.search.trial import TrialRunner

GROWTH_SHARE = 0.01
"""What grows is named if it takes more than this share of the limit; a list of losses does not."""

# What to do where no size fits.
_SMALLER_STEP = "Use a smaller model, smaller samples, lower precision or activation checkpointing."
_SMALLER_VALIDATION = (
    "The batches of the validation do not follow the batch size: make them, or their samples,"
    " smaller in val_dataloader."
)
_MORE_ROOM = (
    "Most of it is memory of this process outside the step: pass a higher memory_limit, or free it."
)


class NothingFitsError(RuntimeError):
    """No batch size fits; the text says what was measured, and what to do."""


class BatchSizeSearch:
    """A search over the real steps of one program: of a Trainer, or of a loop.

    Args:
        program: the training program.
        room: the memory that this rank may use.
        options: the arguments of the user.
        policy: the numbers that steer the search.
        ranks: the processes that search together.
        progress: shows the trial and the step that run.
        device: the name of the device.
        parameters: the number of parameters; empty for an evaluation.
        is_simulated: whether times and values of the steps mean nothing.
        kept: the trials of an earlier start of this search; ``None`` to keep none.

    Raises:
        ValueError: if the process already holds as much as ``memory_limit``.
    """

    def __init__(
        self,
        program: Program,
        room: MemoryRoom,
        options: SearchOptions,
        policy: SearchPolicy,
        ranks: Ranks,
        progress: SearchProgress,
        *,
        device: str,
        parameters: str = "",
        is_simulated: bool = False,
        kept: KeptTrials | None = None,
    ) -> None:
        self._room = room
        self._policy = policy
        self._ranks = ranks
        self._progress = progress
        self._options = options
        self._device = device
        # The shards of FSDP1 have different sizes, and all ranks have one plan.
        self._parameters = ranks.exchange(parameters)[0]
        self._is_simulated = is_simulated
        self._kept = kept or KeptTrials(ranks)
        self._runner = self._runner_of(program)
        keeps_step = options.keeps_step(program.accumulate_grad_batches)
        self._limits = self._limits_of(keeps_step=keeps_step)
        # What was run since the search, or the rehearsal of an earlier plan, has begun.
        self._trials: tuple[Trial, ...] = ()

    def run(self, given_plan: Plan | str | Path | None = None) -> Plan:
        """Search, or only rehearse the size of an earlier plan if that passes.

        Args:
            given_plan: an earlier plan, its file, or a log directory.

        Raises:
            NothingFitsError: if no size fits.
        """
        earlier_plan, notes = find_earlier_plan(
            given_plan,
            self._parameters,
            device=self._device,
            limit_bytes=self._room.limit_bytes(),
            ranks=self._ranks,
        )
        chosen = None if earlier_plan is None else self._rehearse_again(earlier_plan)
        if isinstance(chosen, SearchFailed):
            notes = [earlier_plan_not_used(chosen.reason)]
        chosen, of_growth = self._with_growth(
            chosen if isinstance(chosen, Chosen) else self._found()
        )
        return self._plan(chosen, [*of_growth, *notes])

    def confirm(self, plan: Plan) -> Plan:
        """Rehearse the size of a plan of another state of this training; search if it fails here.

        What the steps keep was measured in that other state, where a memory bank is full.

        Raises:
            NothingFitsError: if no size fits.
        """
        chosen = self._rehearse_again(plan)
        return self._plan(chosen if isinstance(chosen, Chosen) else self._found(), [])

    def with_rehearsal(self, plan: Plan, batch_size: int) -> Plan:
        """The plan of this search with a rehearsal of one more size, where the data allow it."""
        is_rehearsed = any(
            trial.batch_size == batch_size and trial.kind == "rehearsal" for trial in self._trials
        )
        if is_rehearsed or not is_allowed(batch_size, self._limits):
            return plan
        trial = self._run(NextSize(batch_size, "rehearsal"))
        return replace(plan, trials=(*plan.trials, trial)).with_notes(*trial.notes)

    def _plan(self, chosen: Chosen, notes: list[Note]) -> Plan:
        self._runner.program.check_batch_size(chosen.batch_size)
        limits = self._limits
        on_training = [slower_text(chosen.speeds, chosen.batch_size, limits)]
        if not self._is_simulated:
            on_training.append(self._project_size().text_of_loss(chosen.batch_size))
        of_steps = [
            Note(
                "risk",
                f"Steps on equal batches took {mib(lowest_bytes)} to {mib(highest_bytes)}:"
                " something in them is random, or changes, and the training may need more. A"
                " smaller memory_limit leaves more room.",
            )
            for trial in self._trials
            if trial.memory.differing_bytes
            and (trial.batch_size, trial.kind) == (chosen.batch_size, "rehearsal")
            for highest_bytes, lowest_bytes in [trial.memory.differing_bytes]
        ]
        of_trials = [note for trial in self._trials for note in trial.notes]
        return Plan(
            replace(chosen, notes=()),
            self._trials,
            # A plan has the limit of the training.
            limits.limit_bytes + self._room.later_bytes,
            device=self._device,
            recipe=Recipe(
                chosen.batch_size, accumulated_batches(chosen.batch_size, limits), limits.step.ranks
            ),
            notes=in_order(
                [
                    *[Note("training", text) for text in on_training],
                    *of_steps,
                    *self._kept.notes,
                    *notes,
                    *chosen.notes,
                    *of_trials,
                    *self._runner.program.notes,
                    *self._room.notes,
                ]
            ),
            parameters=self._parameters,
            budget_name=limits.unit.budget_name,
        )

    def _found(self) -> Chosen:
        """Run sizes until one is chosen; where the project's own does not fit, keep its step.

        The size is timed beside the project's, except where times mean nothing. An earlier plan has
        times of another run.
        """
        kept = self._kept
        subject = (self._device, self._parameters, self._limits.step, self._options)
        self._trials = kept.read("; ".join(map(str, subject)))
        if kept.why_kept:
            self._limits = self._limits_of(keeps_step=True)
        is_first = True
        while not isinstance(step := self._decided(), Chosen):
            if isinstance(step, NextSize):
                if is_first:
                    self._find_collectives(step.batch_size)
                is_first = False
                self._run(step)
                self._read_limit_again()
            elif self._limits.step.may_keep:
                self._trials = kept.begin_again(step.reason)
                self._limits = self._limits_of(keeps_step=True)
                is_first = True
            else:
                texts = [step.reason, *kept.notes, *self._explanation(), *self._room.notes]
                raise NothingFitsError(" ".join(map(str, texts)))
        if kept.why_kept:
            why = f"{kept.why_kept}. Accumulation keeps the samples of an optimizer step."
            step = replace(step, limited_by="memory", why=why)
        return step if self._is_simulated else self._project_size().compared(step, self._run)

    def _decided(self) -> NextSize | Chosen | SearchFailed:
        return decide(self._trials, self._kept.to_decide(self._limits), self._policy)

    def _runner_of(self, program: Program) -> TrialRunner:
        return TrialRunner(
            program, self._room.device, self._ranks, self._policy, self._progress.begin_step
        )

    def _project_size(self) -> ProjectSize:
        return ProjectSize(self._runner.program, self._runner, self._limits, self._ranks)

    def _with_growth(self, chosen: Chosen) -> tuple[Chosen, list[Note]]:
        """The size, lowered until what its steps keep fits too, and a note of it.

        If no smaller size helps, the size is not verified.
        """
        limits = self._limits
        least_bytes = GROWTH_SHARE * limits.limit_bytes
        for trial in self._trials:
            growth = trial.growth if trial.batch_size == chosen.batch_size else None
            if growth and growth.total_bytes > least_bytes:
                break
        else:
            return chosen, []
        room_bytes = self._room_bytes(trial, growth, trial.batch_size)
        notes = [growth.note(room_bytes)]
        if growth.fits(room_bytes):
            return chosen, notes
        size = self._size_with_room(trial, growth)
        if size and self._run(NextSize(size, "rehearsal")).outcome == "ok":
            smaller = replace(
                chosen,
                batch_size=size,
                limited_by="memory",
                why="a larger size leaves no room for what the steps keep.",
                largest_batch_size=size,
                speeds=(),
            )
            lowered, of_lowered = self._with_growth(smaller)
            if lowered.is_verified:
                return lowered, of_lowered
        self._limits = limits
        return replace(chosen, is_verified=False), notes

    def _room_bytes(self, trial: Trial, growth: Growth, batch_size: int) -> float:
        """Bytes that a size up to the trial's leaves for what its steps keep."""
        # On the host the process may hold several bytes for each live one.
        share = self._policy.rehearsal.host_share if self._limits.is_host else 1
        return share * (self._limits.limit_bytes - growth.needed_bytes(trial, batch_size))

    def _size_with_room(self, trial: Trial, growth: Growth) -> int:
        """The largest size below a trial's that leaves room for all it keeps; 0 for none."""
        program = self._runner.program
        steps = program.evaluation if growth.is_of_validation else program.training

        def fits(size: int) -> bool:
            batches = batches_that_keep(program, steps or program.primary, size)
            batch_bytes = growth.batch_bytes * size / trial.batch_size
            kept_bytes = (batches - growth.batches_run) * batch_bytes
            # Fragmentation takes the rest.
            share = self._policy.rehearsal.first_share
            return kept_bytes <= share * self._room_bytes(trial, growth, size)

        size = min(self._ranks.exchange(largest_where(fits, 0, trial.batch_size - 1)))
        if self._limits.step.may_keep and 0 < size < (self._limits.step.batch_size or 0):
            are_collective = self._limits.steps_are_collective
            limits = self._limits_of(keeps_step=True)
            self._limits = replace(limits, steps_are_collective=are_collective)
        size = rounded(size, self._limits)
        return size if size >= size_range(self._limits)[0] else 0

    def _keep_step_of(self, plan: Plan) -> None:
        """Keep the samples of an optimizer step if an earlier plan has kept them."""
        has_changed = plan.accumulate_grad_batches != self._limits.step.accumulate_grad_batches
        if has_changed and self._limits.step.kept_samples is None:
            self._limits = self._limits_of(keeps_step=True)

    def _limits_of(self, *, keeps_step: bool) -> SearchLimits:
        limits = search_limits(
            self._runner.program,
            self._room,
            self._options,
            self._policy,
            self._ranks,
            keeps_step=keeps_step,
        )
        if limits.step.kept_samples is not None:
            self._runner.program.accumulate(limits.step.kept_samples)
        return limits

    def _rehearse_again(self, plan: Plan) -> Chosen | SearchFailed:
        """Rehearse the size of an earlier plan, where this search allows it."""
        self._keep_step_of(plan)
        why_not = why_not_allowed(plan, self._limits)
        if why_not:
            return SearchFailed(why_not)
        self._find_collectives(plan.batch_size)
        trial = self._run(NextSize(plan.batch_size, "rehearsal"))
        if trial.outcome != "ok":
            return SearchFailed(f"{self._limits.unit.size(trial.batch_size)} {trial.failure}")
        chosen, self._trials = reused(plan, trial)
        self._read_limit_again()
        return chosen

    def _run(self, step: NextSize) -> Trial:
        """Run a trial on all ranks; the worst one counts."""
        self._progress.begin_trial(step, self._trials)
        with self._kept.running(step, are_collective=self._limits.steps_are_collective):
            own_trial = self._runner.run(step.kind, step.batch_size, self._limits)
            if step.kind == "rehearsal":
                own_trial = self._with_later_state(own_trial)
            trial = self._ranks.worst_of(own_trial)
        self._progress.measured(trial, self._limits.unit)
        self._trials = (*self._trials, trial)
        self._kept.end(self._trials)
        return trial

    def _with_later_state(self, own_trial: Trial) -> Trial:
        """The worst of a rehearsal and one in the later state, with what the first leaves."""
        program = self._runner.program.rehearsed_after
        # A later state may run out of memory that the first one has fragmented.
        if program is None or not self._limits.catches_errors:
            return own_trial
        outcomes = self._ranks.exchange(own_trial.outcome)
        if any(outcome != "ok" for outcome in outcomes):
            return own_trial
        later_trial = self._runner_of(program).run("rehearsal", own_trial.batch_size, self._limits)
        return Trial.worst_of([own_trial, later_trial])

    def _find_collectives(self, batch_size: int) -> None:
        """Before the first trial, find out whether the user's own steps need all ranks."""
        ranks = self._ranks
        if ranks.size == 1 or not ranks.ends_together or self._limits.steps_are_collective:
            return
        calls_collectives = self._runner.calls_collectives(batch_size)
        is_collective = any(self._ranks.exchange(calls_collectives))
        self._limits = replace(self._limits, steps_are_collective=is_collective)

    def _read_limit_again(self) -> None:
        """Lower the limit after a trial: other processes may have filled the device meanwhile."""
        limits = self._limits
        if limits.is_host:
            # The size stays far from the limit, and equal searches find equal sizes.
            return
        usable_bytes = self._ranks.exchange(self._room.usable_bytes())
        self._limits = replace(limits, limit_bytes=min(limits.limit_bytes, *usable_bytes))

    def _explanation(self) -> list[str]:
        """The memory breakdown of the last size, and what to do; empty if nothing was run."""
        if not self._trials:
            return []
        trial = self._trials[-1]
        limits = self._limits
        device = self._room.device
        device.release_cached()
        breakdown = measure_breakdown(
            self._runner.program.module,
            self._runner.program.optimizers,
            # To move a batch to the device could run out of memory once more.
            None,
            self._runner.program.device,
            start_bytes=device.current().allocated_bytes,
            # Nothing was measured where memory ran out in the first step.
            peak_bytes=trial.memory.peak_bytes or trial.memory.held_bytes or None,
        )
        # A size that ran out of memory needed more than was measured.
        needed_bytes = max(breakdown.peak_bytes, limits.limit_bytes)
        text = f"At {limits.unit.size(trial.batch_size)} the memory consisted of {breakdown}"
        if trial.memory.set_aside_bytes:
            set_aside = mib(trial.memory.set_aside_bytes)
            text += f"; samples, DataLoader workers and a checkpoint take {set_aside} more"
        advice = _SMALLER_STEP
        evaluation = self._runner.program.evaluation
        if 2 * breakdown.other_bytes > needed_bytes:
            advice = _MORE_ROOM
        elif trial.fails_in_validation and evaluation and not evaluation.follows_size:
            advice = _SMALLER_VALIDATION
        return [f"{text}. {advice}"]
