"""The searches of a Trainer: for a training with its validation, or for one evaluation."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.apply import (
    learning_rate_to_scale,
    project_recipe,
    settings_in_batches,
)
from lightning_batchmem._lightning.bounds import (
    epoch_at,
    num_steps,
    steps_are_batches,
)
from lightning_batchmem._lightning.checkpoint_plan import CheckpointPlan, plan_to_continue
from lightning_batchmem._lightning.clean_start import CleanStart, ProjectSnapshot
from lightning_batchmem._lightning.errors import note_of_retry, noted_errors
from lightning_batchmem._lightning.places import SizeNotFollowedError
from lightning_batchmem._lightning.program import TrainerProgram
from lightning_batchmem._lightning.program_maker import ProgramMaker
from lightning_batchmem._lightning.schedules import accumulation_note
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.strategies import bucket_bytes, wrap_again
from lightning_batchmem._lightning.trainer_state import idle_callbacks_note, weight_average_bytes
from lightning_batchmem._lightning.training_state import Later, TrainingState
from lightning_batchmem._lightning.training_watch import TrainingWatch
from lightning_batchmem.batches.loaders import StageLoaders
from lightning_batchmem.devices import device_name
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.foreign_values import add_note
from lightning_batchmem.plan.learning_rate import learning_rate_factor
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.recipe import (
    Epoch,
    Recipe,
    longer_search_note,
    rounded_step_note,
)
from lightning_batchmem.plan.records import mib
from lightning_batchmem.search.compiled import each_size_static
from lightning_batchmem.search.earlier_plan import parameters_text
from lightning_batchmem.search.limits import MemoryRoom
from lightning_batchmem.search.progress import SearchProgress
from lightning_batchmem.search.ranks import Ranks
from lightning_batchmem.search.search import BatchSizeSearch

_START_TEXT_SIMULATED = "BatchFinder: searching on a simulated GPU"


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
    program: TrainerProgram | None


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
    """

    trainer: Trainer
    device_memory: DeviceMemory
    options: SearchOptions
    policy: SearchPolicy
    ranks: Ranks
    later: Later | None = None
    is_simulated: bool = False
    earlier: Plan | None = None

    def __post_init__(self) -> None:
        trainer = self.trainer
        device_memory = self.device_memory
        options = self.options
        later_bytes = bucket_bytes(trainer)
        # On the host the copy of the weights is part of the resident set from the start.
        if not device_memory.is_host:
            later_bytes += weight_average_bytes(trainer)
        # A Trainer in a worker of Ray has one device, however many workers this machine has.
        ranks_on_host = self.ranks.on_this_host()
        self._room = MemoryRoom(
            device_memory,
            options.memory_limit,
            self.policy.limit_share,
            ranks_on_host,
            later_bytes,
        )
        self._device = device_name(trainer.strategy.root_device)

    def warn_of_limit(self) -> None:
        """Warn of a ``memory_limit`` that the device cannot provide."""
        if self._room.is_exceeded_by_option():
            rank_zero_warn(
                f"memory_limit={self.options.memory_limit!r} is more than the GPU can provide,"
                f" {mib(self._room.provided_bytes())}."
            )

    def training(
        self,
        setting: BatchSizeSetting,
        snapshot: ProjectSnapshot,
        given_plan: Plan | str | Path | None,
    ) -> Plan:
        """Search with training steps; validation is one of their phases.

        Args:
            setting: the places of the batch size.
            snapshot: the state before the optimizers were configured.
            given_plan: an earlier plan to use again.

        Raises:
            NothingFitsError: if no size fits.
            ValueError: if the batch size of the project cannot be set.
        """
        # The path to the size may lead through a class, which is not restored.
        snapshot.add(setting.place.restorer())
        begin = time.monotonic()
        clean_start = CleanStart(self.trainer, self.device_memory, snapshot)
        state = TrainingState(self.trainer, self.later)
        with self._progress() as progress, each_size_static():
            found = self._search_in(state, setting, clean_start, progress, self.options, given_plan)
            if any(self.ranks.exchange(state.is_later)):
                found = self._confirmed(found, state.text, setting, clean_start, progress)
        wrap_again(self.trainer)
        plan = self._placed(found.plan, found.setting)
        texts = []
        # Elsewhere there is room for what callbacks keep.
        if plan.limited_by == "memory":
            texts.append(idle_callbacks_note(self.trainer))
        if not self.is_simulated:
            seconds = self.ranks.exchange(time.monotonic() - begin)[0]
            texts.append(longer_search_note(seconds, plan.training_seconds))
        return plan.with_notes(*(Note("search", text) for text in texts))

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
        parameters = parameters_text(self.trainer.lightning_module)
        with clean_start.entered(state.prepare):
            setting, loaders = self._maker(options).find_place(setting, clean_start)
            before = project_recipe(setting, options, learning_rate, self.earlier)
            now = self.trainer.accumulate_grad_batches
            # For a target the limits of the Trainer stay as they are.
            if options.target_batch_size is not None:
                now = before.accumulate_grad_batches
            ratio = Fraction(before.accumulate_grad_batches, now)
            before, _ = self._in_training(before, loaders, ratio)
            later = None if found is None else found.program
            note = ""
            while True:
                try:
                    maker = self._maker(options)
                    program = maker.training(clean_start, setting, loaders, before, state, later)
                    with noted_errors(lambda: setting.size, program.batches):
                        search = self._search_of(program, progress, maker.options, parameters)
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
                    note = note_of_retry(error, setting, options)
                    if not note:
                        raise
                options = replace(options, min_batch_size=setting.project_size)
                clean_start.reset_for_loaders()
        plan = plan.with_notes(
            Note("limit", self._longest_sample_note(plan, setting.project_size, program)),
            Note("search", program.kept_size_note(setting.project_size)),
            Note("search", state.frozen_note),
            Note("search", note),
        )
        return FoundPlan(
            self._with_recipe(plan, before, program, loaders),
            setting,
            None if self.device_memory.is_host else program,
        )

    def _with_recipe(
        self, plan: Plan, before: Recipe, program: TrainerProgram, loaders: StageLoaders
    ) -> Plan:
        """The plan with the optimizer steps of the training, and what cannot go with them."""
        trainer = self.trainer
        accumulate = plan.accumulate_grad_batches
        target = self.options.target_batch_size
        # Settings that count batches go with the accumulation that keeps the project's own step.
        now = trainer.accumulate_grad_batches
        if program.samples_per_step is not None and now == before.accumulate_grad_batches:
            now = before.batches_of_step
        ratio = Fraction(1) if target is not None else Fraction(accumulate, now)
        after, epoch = self._in_training(plan.recipe, loaders, ratio)
        scaling = self.options.lr_scaling
        rate = before.learning_rate
        samples = after.effective_batch_size
        if scaling and rate is not None and samples and before.effective_batch_size:
            factor = learning_rate_factor(scaling, samples, before.effective_batch_size)
            after = replace(after, learning_rate=rate * factor)
        settings = settings_in_batches(
            trainer, ratio, epoch.batches, follows_validation=program.follows_validation
        )
        missed = rounded_step_note(
            after,
            program.samples_per_step,
            "your own size" if target is None else "target_batch_size",
            self.options.unit,
        )
        of_settings = [
            Note(
                "settings",
                f"{name} is {count:,} instead of {getattr(trainer, name):,}, because it counts"
                " batches.",
            )
            for name, count in settings.items()
        ]
        plan = replace(
            plan, recipe=replace(after, trainer_settings=settings), project_recipe=before
        )
        return plan.with_notes(
            Note("training", missed),
            Note(
                "training",
                accumulation_note(trainer, program.module, loaders, self.options, before, after),
            ),
            *of_settings,
        )

    def _longest_sample_note(
        self, plan: Plan, project_size: int | None, program: TrainerProgram
    ) -> str:
        """A sentence about a size that the longest samples keep below that of the project."""
        # The samples of this rank may be others.
        note = self.ranks.exchange(program.longest_sample_note(plan.batch_size))[0]
        is_smaller = plan.batch_size < (project_size or 0)
        return note if is_smaller and plan.limited_by == "memory" else ""

    def _in_training(
        self, recipe: Recipe, loaders: StageLoaders, ratio: Fraction
    ) -> tuple[Recipe, Epoch]:
        """The recipe with its samples and steps, and an epoch on the rank with the least of both.

        Args:
            recipe: the optimizer steps.
            loaders: the loaders of the training.
            ratio: by how much more batches make a step than for the limits of the Trainer.
        """
        trainer = self.trainer
        size = recipe.batch_size or 1
        accumulate = recipe.accumulate_grad_batches
        of_ranks = self.ranks.exchange(epoch_at(trainer, loaders, size, ratio))
        batches, samples = zip(*of_ranks, strict=True)
        epoch = Epoch(min(batches), min(samples))
        of_step = epoch.samples_of_step(size, accumulate) * recipe.ranks
        return replace(
            recipe,
            effective_batch_size=of_step if recipe.batch_size else None,
            num_steps=num_steps(trainer, epoch.batches, accumulate),
            counts_batches=not steps_are_batches(trainer),
        ), epoch

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
            maker = self._maker(self.options)
            program = maker.evaluation(clean_start, setting)
            if program is None:
                return None
            with noted_errors(lambda: setting.size, program.batches):
                plan = self._search_of(program, progress, maker.options).run()
        return self._placed(plan, setting)

    def plan_in(
        self, checkpoint: dict[str, Any], *, may_search_again: bool
    ) -> CheckpointPlan | None:
        """The plan with which a resumed training continues; see :func:`plan_to_continue`."""
        device_and_limit = (self._device, self._room.limit_bytes())
        return plan_to_continue(
            checkpoint, self.ranks.exchange(device_and_limit), may_search_again=may_search_again
        )

    def watch(self, plan: Plan) -> TrainingWatch:
        """A watch over the training with the plan of this search."""
        # Average samples are smaller than many batches of the training.
        knows_largest_batch = self.options.worst_case != "typical"
        return TrainingWatch(self.device_memory, plan, knows_largest_batch=knows_largest_batch)

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
        maker = self._maker(self.options)
        with clean_start.entered():
            # The project may have changed since the checkpoint was saved.
            with suppress(SizeNotFollowedError):
                return maker.find_place(setting.at(plan.place), clean_start)[0]
            clean_start.reset_for_loaders()
            return maker.find_place(setting, clean_start)[0]

    def _progress(self) -> SearchProgress:
        trainer = self.trainer
        is_shown = trainer.is_global_zero and trainer.progress_bar_callback is not None
        if self.is_simulated:
            return SearchProgress(enabled=is_shown, start_text=_START_TEXT_SIMULATED)
        return SearchProgress(enabled=is_shown)

    def _maker(self, options: SearchOptions) -> ProgramMaker:
        return ProgramMaker(self.trainer, options, self.policy, self.ranks, self._room)

    def _search_of(
        self,
        program: TrainerProgram,
        progress: SearchProgress,
        options: SearchOptions,
        parameters: str = "",
    ) -> BatchSizeSearch:
        return BatchSizeSearch(
            program,
            self._room,
            options,
            self.policy,
            self.ranks,
            progress,
            device=self._device,
            parameters=parameters,
            is_simulated=self.is_simulated,
        )

    def _placed(self, plan: Plan, setting: BatchSizeSetting) -> Plan:
        """The plan with the place of its size, and a note where that of the project changes."""
        attribute = setting.place.attribute
        if attribute is not None and attribute.exists and attribute.value != plan.batch_size:
            old_values = (
                f"If you compute values from `{attribute.path}` in __init__ or setup, they keep the"
                " old size."
            )
            plan = plan.with_notes(Note("search", old_values))
        place = setting.place.text
        return replace(plan, place="" if place == self.options.batch_arg_name else place)
