"""The searches of a Trainer: for a training with its validation, or for one evaluation."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.apply import learning_rate_to_scale, training_setup
from lightning_batchmem._lightning.bounds import stage_bounds, training_bounds
from lightning_batchmem._lightning.checkpoint_plan import CheckpointPlan, plan_to_continue
from lightning_batchmem._lightning.clean_start import CleanStart, ProjectSnapshot
from lightning_batchmem._lightning.data_source import (
    attach_loaders,
    stage_loop,
    validation_loop,
    validation_source,
)
from lightning_batchmem._lightning.hooks import configure_optimizers_again
from lightning_batchmem._lightning.packages import noted_errors
from lightning_batchmem._lightning.place_search import FollowedSetting, followed_setting
from lightning_batchmem._lightning.program import TrainerProgram
from lightning_batchmem._lightning.size_places import SizeNotFollowedError
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.steps import EvaluationSteps, TrainingSteps
from lightning_batchmem._lightning.strategies import bucket_bytes, has_batch_norm, wrap_again
from lightning_batchmem._lightning.trainer_state import (
    call_module_hook,
    weight_average_bytes,
)
from lightning_batchmem._lightning.training_watch import TrainingWatch
from lightning_batchmem.batches.loaders import StageLoaders
from lightning_batchmem.batches.probe_batches import ProbeBatches
from lightning_batchmem.devices import device_name
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.plan.learning_rate import optimizer_step
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import mib
from lightning_batchmem.search.compiled import each_size_static
from lightning_batchmem.search.earlier_plan import parameters_text
from lightning_batchmem.search.limits import MemoryRoom
from lightning_batchmem.search.progress import SearchProgress
from lightning_batchmem.search.ranks import Ranks
from lightning_batchmem.search.search import BatchSizeSearch
from lightning_batchmem.state.snapshot import freeze

_START_TEXT_SIMULATED = "BatchFinder: searching on a simulated GPU"

# Loaders are requested at this size first. Small even sizes are constants in many projects, so a
# request at one of them would not show whether a loader follows.
_FIRST_REQUEST = 13


@dataclass(eq=False)
class TrainerSearch:
    """Searches in a Trainer whose loop has not started, and leaves no other trace than the plan.

    Args:
        trainer: the Trainer.
        device_memory: the memory of its device.
        options: the arguments of BatchFinder.
        policy: the numbers that steer the search.
        ranks: the processes that search together.
        is_simulated: whether the device is a simulated one. The size of the project is rehearsed
            there too.
    """

    trainer: Trainer
    device_memory: DeviceMemory
    options: SearchOptions
    policy: SearchPolicy
    ranks: Ranks
    is_simulated: bool = False

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
        self._first_size = options.first_size(self.policy)
        self._device = device_name(trainer.strategy.root_device)
        if self._room.is_exceeded_by_option():
            rank_zero_warn(
                f"memory_limit={options.memory_limit!r} is more than the device can provide,"
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
            RuntimeError: if no size fits.
            ValueError: if the batch size of the project cannot be set.
        """
        learning_rate = learning_rate_to_scale(setting, self.options)
        # The path to the size may lead through a class, which is not restored.
        snapshot.keep(setting.place.keep())
        parameters = parameters_text(self.trainer.lightning_module)
        clean_start = CleanStart(self.trainer, self.device_memory, snapshot)
        with self._progress() as progress, clean_start.entered(), each_size_static():
            followed = self._followed(setting, clean_start)
            setup = training_setup(followed, self.options, learning_rate)
            program = self._training_program(clean_start, followed)
            with noted_errors(program.batches):
                plan = self._search_of(program, progress).run(
                    device=self._device,
                    parameters=parameters,
                    given_plan=given_plan,
                    also_size=followed.project_size if self.is_simulated else None,
                )
        wrap_again(self.trainer)
        step = optimizer_step(
            setup,
            plan.batch_size,
            min(self.ranks.exchange(program.batches_in_epoch(plan.batch_size))),
            target_batch_size=self.options.target_batch_size,
            multiple_of=self.options.multiple_of,
            lr_scaling=self.options.lr_scaling,
        )
        plan = self._placed(plan, followed.setting)
        # The learning rate comes first, because the console shows only one note.
        notes = (step.learning_rate_note, *plan.notes, *step.notes)
        return replace(
            plan,
            step=replace(step, learning_rate_note="", notes=()),
            notes=tuple(note for note in notes if note),
            project_batch_size=followed.project_size,
        )

    def evaluation(self, setting: BatchSizeSetting, snapshot: ProjectSnapshot) -> Plan | None:
        """Search with forward passes; ``None`` if no loader of the stage follows the batch size.

        Raises:
            RuntimeError: if no size fits.
        """
        clean_start = CleanStart(self.trainer, self.device_memory, snapshot)
        with self._progress() as progress, clean_start.entered(), each_size_static():
            program = self._evaluation_program(clean_start, setting)
            if program is None:
                return None
            with noted_errors(program.batches):
                plan = self._search_of(program, progress).run(device=self._device)
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
        with clean_start.entered():
            # The project may have changed since the checkpoint was saved.
            with suppress(SizeNotFollowedError):
                return self._followed(setting.at(plan.place), clean_start).setting
            clean_start.again()
            return self._followed(setting, clean_start).setting

    def _followed(self, setting: BatchSizeSetting, clean_start: CleanStart) -> FollowedSetting:
        """The setting at a place that the training loaders follow; they are requested.

        Raises:
            ValueError: if there is none.
        """
        if setting.is_budget:
            budget = setting.project_budget
            return FollowedSetting(setting, setting.loaders_for(budget), budget)
        unit = self.options.multiple_of or 1
        largest_size = self.options.largest_size // unit * unit
        size = max(self._first_size, min(_FIRST_REQUEST * unit, largest_size))
        return followed_setting(setting, size, clean_start, self.ranks)

    def _training_program(
        self, clean_start: CleanStart, followed: FollowedSetting
    ) -> TrainerProgram:
        """The program of the training with its validation."""
        trainer = self.trainer
        setting = followed.setting
        loaders = followed.loaders
        batches = self._batches(loaders, clean_start)
        if setting.is_budget:
            self._begin_at_smallest_budget(setting, loaders, batches)
        followed.check_samples(batches)
        validation = replace(setting, source=validation_source(trainer))
        evaluation = self._validation_steps(validation, clean_start)
        if not all(self.ranks.exchange(evaluation is not None)):
            evaluation = None
        training = TrainingSteps(trainer, trainer.fit_loop.epoch_loop, loaders, batches)
        validation_loaders = None if evaluation is None else evaluation.loaders
        bounds = training_bounds(
            trainer,
            loaders,
            validation_loaders,
            self.options,
            self.policy,
            followed.project_size,
        )
        begin_stage = partial(self._begin_training, loaders, validation_loaders)
        program = TrainerProgram(
            clean_start,
            setting,
            [setting.source, validation.source],
            training,
            evaluation,
            bounds,
            begin_stage,
        )
        with noted_errors():
            program.restart(self._first_size)
        return program

    def _evaluation_program(
        self, clean_start: CleanStart, setting: BatchSizeSetting
    ) -> TrainerProgram | None:
        try:
            size = setting.project_budget if setting.is_budget else self._first_size
            loaders = setting.loaders_for(size, may_be_fixed=True)
            batches = self._batches(loaders, clean_start)
            if setting.is_budget:
                self._begin_at_smallest_budget(setting, loaders, batches, may_be_fixed=True)
            follows = loaders.follows
        except ValueError as error:
            # In a training this is an error. This stage may not be meant for BatchFinder.
            rank_zero_warn(str(error))
            follows = False
        if not all(self.ranks.exchange(follows)):
            return None
        steps = EvaluationSteps(self.trainer, stage_loop(self.trainer), loaders, batches)
        bounds = stage_bounds(self.trainer, setting.source.stage, loaders)
        return TrainerProgram(
            clean_start, setting, [setting.source], None, steps, bounds, loaders.set_sizes
        )

    def _validation_steps(
        self, setting: BatchSizeSetting, clean_start: CleanStart
    ) -> EvaluationSteps | None:
        """The steps of validation; ``None`` where there is none, or its loaders cannot be used."""
        trainer = self.trainer
        if not trainer.enable_validation or setting.source.is_empty:
            return None
        try:
            loaders = setting.loaders_for(self._first_size, may_be_fixed=True)
            batches = self._batches(loaders, clean_start)
            batches.prepare(self._first_size)
        except ValueError as error:
            rank_zero_warn(f"BatchFinder leaves validation out of the search: {error}")
            return None
        return EvaluationSteps(trainer, validation_loop(trainer), loaders, batches)

    def _begin_at_smallest_budget(
        self,
        setting: BatchSizeSetting,
        loaders: StageLoaders,
        batches: ProbeBatches,
        *,
        may_be_fixed: bool = False,
    ) -> None:
        """Let the search begin at the smallest budget that changes a batch.

        Raises:
            ValueError: if no loader follows the budget, unless they ``may_be_fixed``.
        """
        project_budget = setting.project_budget
        smallest = batches.smallest_useful_budget(
            project_budget, needs_two_samples=has_batch_norm(self.trainer.lightning_module)
        )
        if not (loaders.follows or may_be_fixed):
            raise ValueError(
                f"the batches of {loaders.hook} must change with `{setting.name}`, got the same"
                " batches at another value"
            )
        if self.options.max_batch_size is None and batches.has_constant_length(project_budget):
            raise ValueError(
                f"max_batch_size must be given, because {loaders.hook} has the same number of"
                f" batches with any `{setting.name}`, so the largest useful value is not known"
            )
        if self.options.min_batch_size is None:
            smallest = max(self.ranks.exchange(min(smallest, self.options.largest_size)))
            self.options = replace(self.options, min_batch_size=smallest)
            self._first_size = self.options.first_size(self.policy)

    def _batches(self, loaders: StageLoaders, clean_start: CleanStart) -> ProbeBatches:
        return ProbeBatches(
            loaders,
            self.options.worst_case,
            policy=self.policy.reading,
            largest_size=self.options.largest_size,
            room_bytes=self._room.free_bytes(),
            restored=clean_start.restored,
        )

    def _begin_training(
        self, training: StageLoaders, validation: StageLoaders | None, batch_size: int
    ) -> None:
        """Attach the loaders, configure optimizers, and call the hooks before the first step."""
        trainer = self.trainer
        attach_loaders(trainer, training, validation, batch_size)
        if self.options.target_batch_size is not None:
            # With two micro batches, gradients are alive in backward too.
            trainer.accumulate_grad_batches = 2
        configure_optimizers_again(trainer)
        freeze(config.scheduler for config in trainer.strategy.lr_scheduler_configs)
        for hook in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
            call_module_hook(trainer, hook)

    def _progress(self) -> SearchProgress:
        trainer = self.trainer
        is_shown = trainer.is_global_zero and trainer.progress_bar_callback is not None
        if self.is_simulated:
            return SearchProgress(enabled=is_shown, start_text=_START_TEXT_SIMULATED)
        return SearchProgress(enabled=is_shown)

    def _search_of(self, program: TrainerProgram, progress: SearchProgress) -> BatchSizeSearch:
        return BatchSizeSearch(program, self._room, self.options, self.policy, self.ranks, progress)

    def _placed(self, plan: Plan, setting: BatchSizeSetting) -> Plan:
        """The plan with the place of its size, and a note where that of the project changes."""
        notes = plan.notes
        attribute = setting.attribute
        if attribute is not None and attribute.exists and attribute.value != plan.batch_size:
            old_values = (
                f"Values computed from `{attribute.path}` in __init__ or setup keep the old size."
            )
            notes = (*notes, old_values)
        place = setting.place.text
        return replace(
            plan,
            notes=notes,
            place="" if place == self.options.batch_arg_name else place,
        )
