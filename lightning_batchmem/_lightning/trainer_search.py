"""The searches of a Trainer: for a training with its validation, or for one evaluation."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.apply import CheckpointPlan, plan_to_continue
from lightning_batchmem._lightning.bounds import reached_samples
from lightning_batchmem._lightning.clean_start import CleanStart, ProjectSnapshot
from lightning_batchmem._lightning.data_source import (
    stage_loop,
    validation_loop,
    validation_source,
)
from lightning_batchmem._lightning.errors import noted_errors, retry_text
from lightning_batchmem._lightning.kept_start import KeptStart, found_before_steps
from lightning_batchmem._lightning.optimizer_steps import (
    learning_rate_to_scale,
    project_recipe,
    with_recipe,
)
from lightning_batchmem._lightning.place_search import find_place
from lightning_batchmem._lightning.places import SizeNotFollowedError
from lightning_batchmem._lightning.program import (
    EvaluationProgram,
    TrainingProgram,
    from_smallest_budget,
)
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.steps import EvaluationSteps, TrainingSteps
from lightning_batchmem._lightning.strategies import bucket_bytes, strategy_text, wrap_again
from lightning_batchmem._lightning.trainer_state import idle_callbacks_text, weight_average_bytes
from lightning_batchmem._lightning.training_state import Later, TrainingState
from lightning_batchmem.batches.loaders import StageLoaders
from lightning_batchmem.batches.probe_batches import ProbeBatches
from lightning_batchmem.devices import device_name
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.foreign_values import add_note
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.recipe import Recipe, longer_search_text
from lightning_batchmem.search.compiled import each_size_static
from lightning_batchmem.search.kept_trials import KeptTrials
from lightning_batchmem.search.limits import MemoryRoom
from lightning_batchmem.search.progress import SearchProgress
from lightning_batchmem.search.ranks import Ranks
from lightning_batchmem.search.search import BatchSizeSearch

# Loaders are requested at this size first. Small even sizes are constants in many projects, so a
# request at one of them would not show whether a loader follows.
_FIRST_REQUEST = 13


@dataclass(frozen=True)
class FoundPlan:
    """The plan of a search in one state of a training, and what it was found with.

    Args:
        plan: the plan.
        setting: the place of the size.
        program: the program of the search; ``None`` where the samples would take memory of trials.
    """

    plan: Plan
    setting: BatchSizeSetting
    program: TrainingProgram | None


@dataclass(eq=False)
class TrainerSearch:
    """Searches in a Trainer whose loop has not started, and leaves no other trace than the plan.

    Args:
        trainer: the Trainer.
        device_memory: the memory of its device.
        options: the arguments of BatchFinder.
        policy: the numbers that steer the search.
        ranks: the processes that search together.
        later: a function of the user that makes the state that needs most memory.
        is_simulated: whether the device is a simulated one. The size of the project is rehearsed
            there too.
        earlier: the plan of an earlier fit in this process that has set the size.
        kept: the trials of a run that only searches, which restores nothing; ``None`` in others.
        parameters: the number of parameters before a strategy has sharded them.
    """

    trainer: Trainer
    device_memory: DeviceMemory
    options: SearchOptions
    policy: SearchPolicy
    ranks: Ranks
    later: Later | None = None
    is_simulated: bool = False
    earlier: Plan | None = None
    kept: KeptTrials | None = None
    parameters: str = ""

    def __post_init__(self) -> None:
        trainer = self.trainer
        device_memory = self.device_memory
        later_bytes = bucket_bytes(trainer)
        # On the host the copy of the weights is part of the resident set from the start.
        if not device_memory.is_host:
            later_bytes += weight_average_bytes(trainer)
        # A Trainer in a worker of Ray has one device, however many workers this machine has.
        ranks_on_host = self.ranks.on_this_host()
        self.room = MemoryRoom(
            device_memory,
            self.options.memory_limit,
            self.policy.rehearsal.limit_share,
            ranks_on_host,
            later_bytes,
        )
        self.device = device_name(trainer.strategy.root_device)
        if warning := self.room.warning:
            rank_zero_warn(warning)

    def training(
        self,
        setting: BatchSizeSetting,
        snapshot: ProjectSnapshot | None,
        given_plan: Plan | str | Path | None,
    ) -> Plan:
        """Search with training steps; validation is one of their phases.

        Args:
            setting: the places of the batch size.
            snapshot: the state before the optimizers were configured; ``None`` if nothing is
                restored.
            given_plan: an earlier plan to use again.

        Raises:
            NothingFitsError: if no size fits.
            ValueError: if the batch size of the project cannot be set.
        """
        if self.kept is not None:
            setting = found_before_steps(
                setting,
                self.device_memory,
                lambda state: self._find_place(setting, state, self.options)[0],
            )
        snapshot = snapshot or ProjectSnapshot(LightningModule())
        # The path to the size may lead through a class, which is not restored.
        snapshot.add(setting.place.restorer())
        begin = time.monotonic()
        make_start = CleanStart if self.kept is None else KeptStart
        clean_start = make_start(self.trainer, self.device_memory, snapshot)
        state = TrainingState(self.trainer, self.later)
        with self._progress() as progress, each_size_static():
            found = self._search_in(state, setting, clean_start, progress, self.options, given_plan)
            if any(self.ranks.exchange(state.is_later)):
                found = self._confirmed(found, state.text, setting, clean_start, progress)
        wrap_again(self.trainer)
        plan = replace(
            self._placed(found.plan, found.setting), strategy=strategy_text(self.trainer)
        )
        # Elsewhere there is room for what callbacks keep.
        if plan.limited_by == "memory":
            plan = plan.with_notes(Note("risk", idle_callbacks_text(self.trainer)))
        if not (self.is_simulated or self.kept):
            seconds = self.ranks.exchange(time.monotonic() - begin)[0]
            longer = longer_search_text(seconds, plan.training_seconds)
            plan = plan.with_notes(Note("cost", longer))
        return plan

    def _search_in(
        self,
        state: TrainingState,
        setting: BatchSizeSetting,
        clean_start: CleanStart,
        progress: SearchProgress,
        options: SearchOptions,
        given_plan: Plan | str | Path | None = None,
        found: FoundPlan | None = None,
    ) -> FoundPlan:
        """Search in a state of the training, after a later one whose size was ``found``."""
        learning_rate = learning_rate_to_scale(setting, options)
        with clean_start.entered(state.prepare):
            setting, loaders = self._find_place(setting, clean_start, options)
            before = project_recipe(
                setting, loaders, options, learning_rate, self.earlier, self.ranks
            )
            note = ""
            while True:
                try:
                    program, of_search = self._training_program(
                        clean_start, setting, loaders, before, state, options, found
                    )
                    with noted_errors(lambda: setting.size, program.batches):
                        # The later state has the sizes that come first.
                        kept = self.kept if found is None else None
                        search = self._search_of(
                            program, progress, of_search, self.parameters, kept
                        )
                        plan = (
                            search.run(given_plan) if found is None else search.confirm(found.plan)
                        )
                        if self.is_simulated and setting.project_size:
                            plan = search.with_rehearsal(plan, setting.project_size)
                    break
                # A user's step may raise any error.
                except Exception as error:
                    if note:
                        add_note(error, note)
                    note = retry_text(error, setting, options)
                    if not note:
                        raise
                options = replace(options, min_batch_size=setting.project_size)
                clean_start.reset_for_loaders()
        plan = plan.with_notes(
            Note("limit", program.longest_sample_text(plan, setting.project_size, self.ranks)),
            Note("search", program.kept_size_text(setting.project_size)),
            Note("risk", state.frozen_text),
            Note("risk", note),
        )
        return FoundPlan(
            with_recipe(plan, before, program, self.options, self.ranks),
            setting,
            None if self.device_memory.is_host else program,
        )

    def _find_place(
        self, setting: BatchSizeSetting, clean_start: CleanStart, options: SearchOptions
    ) -> tuple[BatchSizeSetting, StageLoaders]:
        """The setting at a place that the training loaders follow, and the loaders.

        Raises:
            ValueError: if there is none.
        """
        if setting.is_budget:
            budget = setting.project_budget
            return setting, setting.loaders_for(budget)
        unit = options.multiple_of or 1
        largest_size = options.largest_size // unit * unit
        first_size = options.first_size(self.policy.first_size)
        size = max(first_size, min(_FIRST_REQUEST * unit, largest_size))
        return find_place(setting, size, clean_start, self.ranks)

    def _training_program(
        self,
        clean_start: CleanStart,
        setting: BatchSizeSetting,
        loaders: StageLoaders,
        before: Recipe,
        state: TrainingState,
        options: SearchOptions,
        found: FoundPlan | None,
    ) -> tuple[TrainingProgram, SearchOptions]:
        """The training with its validation, and the options of the search in it."""
        trainer = self.trainer
        batches = self._batches(loaders, clean_start, options)
        if setting.is_budget:
            options = from_smallest_budget(setting, loaders, batches, options, self.ranks)
        setting.check_samples(batches)
        first_size = options.first_size(self.policy.first_size)
        validation = replace(setting, source=validation_source(trainer))
        evaluation = self._validation_steps(validation, clean_start, options, first_size)
        if not all(self.ranks.exchange(evaluation is not None)):
            evaluation = None
        program = TrainingProgram(
            clean_start,
            setting,
            [setting.source, validation.source],
            TrainingSteps(
                trainer,
                trainer.fit_loop.epoch_loop,
                loaders,
                batches,
                hook_of_epoch=state.begin_epoch,
            ),
            evaluation,
            before,
            options,
            self.policy,
            state,
            None if found is None else found.program,
        )
        with noted_errors(lambda: first_size):
            program.restart(first_size)
        return program, options

    def _validation_steps(
        self,
        setting: BatchSizeSetting,
        clean_start: CleanStart,
        options: SearchOptions,
        first_size: int,
    ) -> EvaluationSteps | None:
        """The steps of validation; ``None`` where there is none, or its loaders cannot be used."""
        trainer = self.trainer
        if not trainer.enable_validation or setting.source.is_empty:
            return None
        try:
            loaders = setting.loaders_for(first_size, may_be_fixed=True)
            batches = self._batches(loaders, clean_start, options)
            batches.prepare(first_size)
        except ValueError as error:
            rank_zero_warn(f"BatchFinder leaves validation out of the search: {error}")
            return None
        return EvaluationSteps(trainer, validation_loop(trainer), loaders, batches)

    def _evaluation_program(
        self, clean_start: CleanStart, setting: BatchSizeSetting
    ) -> tuple[EvaluationProgram, SearchOptions] | None:
        """The evaluation, and the options of the search in it; ``None`` if no loader follows."""
        options = self.options
        first_size = options.first_size(self.policy.first_size)
        try:
            size = setting.project_budget if setting.is_budget else first_size
            loaders = setting.loaders_for(size, may_be_fixed=True)
            batches = self._batches(loaders, clean_start, options)
            if setting.is_budget:
                options = from_smallest_budget(
                    setting, loaders, batches, options, self.ranks, may_be_fixed=True
                )
            follows = loaders.follows
        except ValueError as error:
            # In a training this is an error. This stage may not be meant for BatchFinder.
            rank_zero_warn(str(error))
            follows = False
        if not all(self.ranks.exchange(follows)):
            return None
        steps = EvaluationSteps(self.trainer, stage_loop(self.trainer), loaders, batches)
        return EvaluationProgram(clean_start, setting, steps), options

    def _batches(
        self, loaders: StageLoaders, clean_start: CleanStart, options: SearchOptions
    ) -> ProbeBatches:
        clean_start.restore_collate([info.loader for info in loaders.sized])
        return ProbeBatches(
            loaders,
            options.worst_case,
            policy=self.policy.reading,
            largest_size=options.largest_size,
            room_bytes=self.room.free_bytes(),
            reached=partial(reached_samples, self.trainer, loaders.stage, options.largest_size),
        )

    def _confirmed(
        self,
        found: FoundPlan,
        state_text: str,
        setting: BatchSizeSetting,
        clean_start: CleanStart,
        progress: SearchProgress,
    ) -> FoundPlan:
        """Rehearse the size in the state in which the training starts; search smaller ones there.

        Args:
            found: what was found in the later state.
            state_text: what that state is.
            setting: the places of the batch size.
            clean_start: the state in which the training starts.
            progress: shows the trials.
        """
        size = found.plan.batch_size
        at_start = self._search_in(
            TrainingState(self.trainer, self.later, is_first=True),
            setting,
            clean_start,
            progress,
            replace(self.options, max_batch_size=size),
            found=found,
        )
        # What grows was measured in the later state only.
        is_verified = found.plan.verified and at_start.plan.verified
        if at_start.plan.batch_size == size:
            chosen = replace(found.plan.chosen, state=state_text, is_verified=is_verified)
            return replace(found, plan=replace(found.plan, chosen=chosen))
        text = (
            "The state in which the training starts limits the size, perhaps because it fragments"
            f" memory: {state_text} alone, {self.options.unit.size(size)} fit."
        )
        of_given_plan = [note for note in found.plan.notes if note.kind == "earlier_plan"]
        chosen = replace(at_start.plan.chosen, is_verified=is_verified)
        plan = replace(at_start.plan, chosen=chosen)
        return replace(at_start, plan=plan.with_notes(Note("limit", text), *of_given_plan))

    def evaluation(self, setting: BatchSizeSetting, snapshot: ProjectSnapshot) -> Plan | None:
        """Search with forward passes; ``None`` if no loader of the stage follows the batch size.

        Raises:
            NothingFitsError: if no size fits.
        """
        clean_start = CleanStart(self.trainer, self.device_memory, snapshot)
        with self._progress() as progress, clean_start.entered(), each_size_static():
            made = self._evaluation_program(clean_start, setting)
            if made is None:
                return None
            program, options = made
            with noted_errors(lambda: setting.size, program.batches):
                plan = self._search_of(program, progress, options).run()
        return self._placed(plan, setting)

    def plan_in(
        self, checkpoint: dict[str, Any], *, may_search_again: bool
    ) -> CheckpointPlan | None:
        """The plan with which a resumed training continues; see :func:`plan_to_continue`."""
        return plan_to_continue(
            checkpoint,
            self.ranks.exchange((self.device, self.room.limit_bytes())),
            may_search_again=may_search_again,
        )

    def setting_of_saved(
        self, plan: Plan, setting: BatchSizeSetting, snapshot: ProjectSnapshot
    ) -> BatchSizeSetting:
        """The setting at the place of a saved plan; where it is gone, at a place that is found.

        Raises:
            ValueError: if none is found.
        """
        if not plan.place and setting.place.exists:
            return setting
        clean_start = CleanStart(self.trainer, self.device_memory, snapshot)
        with clean_start.entered():
            # The project may have changed since the checkpoint was saved.
            with suppress(SizeNotFollowedError):
                return self._find_place(setting.at(plan.place), clean_start, self.options)[0]
            clean_start.reset_for_loaders()
            return self._find_place(setting, clean_start, self.options)[0]

    def _progress(self) -> SearchProgress:
        trainer = self.trainer
        is_shown = trainer.is_global_zero and trainer.progress_bar_callback is not None
        if self.is_simulated:
            return SearchProgress(
                enabled=is_shown, start_text="BatchFinder: searching on a simulated GPU"
            )
        return SearchProgress(enabled=is_shown)

    def _search_of(
        self,
        program: TrainingProgram | EvaluationProgram,
        progress: SearchProgress,
        options: SearchOptions,
        parameters: str = "",
        kept: KeptTrials | None = None,
    ) -> BatchSizeSearch:
        return BatchSizeSearch(
            program,
            self.room,
            options,
            self.policy,
            self.ranks,
            progress,
            device=self.device,
            parameters=parameters,
            is_simulated=self.is_simulated,
            kept=kept,
        )

    def _placed(self, plan: Plan, setting: BatchSizeSetting) -> Plan:
        """The plan with the place of its size, and a note where the project's changes."""
        attribute = setting.place.attribute
        if attribute is not None and attribute.exists and attribute.value != plan.batch_size:
            old_values = (
                f"If you compute values from `{attribute.path}` in __init__ or setup, they keep the"
                " old size."
            )
            plan = plan.with_notes(Note("search", old_values))
        place = setting.place.text
        return replace(plan, place="" if place == SearchOptions.batch_arg_name else place)
