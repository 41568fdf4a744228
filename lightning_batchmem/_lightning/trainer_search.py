"""The searches of a Trainer: for a training with its validation, or for one evaluation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_batchmem._lightning.apply import record_training_setup, search_conditions
from lightning_batchmem._lightning.clean_start import CleanStart, RecordedState
from lightning_batchmem._lightning.data_source import validation_source
from lightning_batchmem._lightning.run_step import EvaluationLoop
from lightning_batchmem._lightning.session import LightningSession, SessionFactory
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.strategies import processes_on_node, wrap_again
from lightning_batchmem._lightning.trainer_state import Loop, weight_average_bytes
from lightning_batchmem.devices import device_name
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.peaks import PhasePeaks
from lightning_batchmem.plan import sentences
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan, make_plan
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Chosen, SearchFailed, mib
from lightning_batchmem.plan.scaling import OptimizerStep, optimizer_step
from lightning_batchmem.search.budget import Budget
from lightning_batchmem.search.compiled import each_size_static
from lightning_batchmem.search.earlier_plan import find_earlier_plan
from lightning_batchmem.search.progress import SearchProgress
from lightning_batchmem.search.ranks import Ranks
from lightning_batchmem.search.search import BatchSizeSearch, SearchResult


class TrainerSearch:
    """Searches in a Trainer whose loop has not started, and leaves no other trace than the plan.

    Args:
        trainer: the Trainer.
        device_memory: the memory of its device.
        options: the arguments of BatchFinder.
        policy: the numbers that steer the search.
    """

    def __init__(
        self,
        trainer: Trainer,
        device_memory: DeviceMemory,
        options: SearchOptions,
        policy: SearchPolicy,
    ) -> None:
        self.ranks = Ranks(trainer.global_rank, trainer.world_size)
        # On the host the copy of the weights is part of the resident set from the start.
        later_bytes = 0
        if not device_memory.held_is_resident_set:
            later_bytes = weight_average_bytes(trainer)
        self.budget = Budget(
            device_memory, options, policy, processes_on_node(trainer), later_bytes
        )
        self.start_bytes = 0
        self._trainer = trainer
        self.device_memory = device_memory
        self._options = options
        self._policy = policy
        self._phases = PhasePeaks(device_memory)
        self._sessions = SessionFactory(
            trainer, options, policy, self.budget, self.ranks, self._phases
        )
        self._progress = SearchProgress(
            enabled=trainer.is_global_zero and trainer.progress_bar_callback is not None
        )
        if self.budget.is_exceeded_by_option():
            rank_zero_warn(
                f"memory_limit={options.memory_limit!r} is more than the device can provide,"
                f" {mib(self.budget.provided_bytes())}."
            )

    def training(
        self,
        setting: BatchSizeSetting,
        recorded: RecordedState,
        plan_of_fit: Plan | None,
        given_plan: Plan | str | Path | None,
    ) -> Plan:
        """Search with training steps; validation is a phase of them, or has a search of its own.

        Args:
            setting: the places of the batch size.
            recorded: the state before the optimizers were configured.
            plan_of_fit: the plan of an earlier ``fit`` of the same BatchFinder.
            given_plan: an earlier plan to use again.

        Raises:
            RuntimeError: if no size fits.
            ValueError: if the batch size of the project cannot be set.
        """
        trainer = self._trainer
        options = self._options
        with self.ranks.fail_together():
            setup = record_training_setup(trainer, setting, options, plan_of_fit)
            conditions = search_conditions(trainer, options)
            earlier_plan = None
            notes: list[str] = []
            if given_plan is not None:
                earlier_plan, notes = find_earlier_plan(
                    given_plan,
                    conditions,
                    device=self._device,
                    limit_bytes=self.budget.limit_bytes(),
                    policy=self._policy,
                    ranks=self.ranks,
                )
            setting.check()
            validation = replace(
                setting,
                source=validation_source(trainer),
                name=options.eval_batch_arg_name or setting.name,
            )
            clean_start = self._clean_start(recorded, [setting, validation], trainer.fit_loop)
            validation_result: SearchResult | None = None
            epoch_batches = math.inf
            with self._progress, each_size_static(), clean_start:
                session, validation_session = self._sessions.training(
                    clean_start, setting, validation
                )
                result = self._search_of(session).run(earlier_plan)
                if isinstance(result.chosen, Chosen):
                    batches = session.batches_in_epoch(result.chosen.batch_size)
                    epoch_batches = min(self.ranks.exchange(batches))
                    if validation_session is not None:
                        earlier = None if earlier_plan is None else earlier_plan.evaluation
                        validation_result = self._search_of(validation_session).run(earlier)
            wrap_again(trainer)
        chosen = _chosen(result)
        self.start_bytes = result.start_bytes
        validation_plan = None
        if validation_result is not None:
            validation_plan = self._evaluation_plan(
                _chosen(validation_result, "validation: "), validation_result, []
            )
        step = optimizer_step(
            setup,
            chosen.batch_size,
            epoch_batches,
            target_batch_size=options.target_batch_size,
            multiple_of=options.multiple_of,
            lr_scaling=options.lr_scaling,
        )
        return make_plan(
            chosen,
            result.trials,
            result.limits,
            self._policy,
            device=self._device,
            notes=[*result.notes, *_old_values(setting, chosen), *notes],
            step=step,
            evaluation=validation_plan,
            conditions=conditions,
        )

    def evaluation(
        self, setting: BatchSizeSetting, loop: EvaluationLoop, recorded: RecordedState
    ) -> Plan | None:
        """Search with forward passes; ``None`` if no loader of the stage follows the batch size.

        Raises:
            RuntimeError: if no size fits.
        """
        with self.ranks.fail_together():
            clean_start = self._clean_start(recorded, [setting], loop)
            with self._progress, each_size_static(), clean_start:
                session = self._sessions.evaluation(clean_start, setting, loop)
                if session is None:
                    return None
                result = self._search_of(session).run()
        chosen = _chosen(result)
        return self._evaluation_plan(chosen, result, _old_values(setting, chosen))

    @property
    def _device(self) -> str:
        return device_name(self._trainer.strategy.root_device)

    def _clean_start(
        self, recorded: RecordedState, settings: list[BatchSizeSetting], loop: Loop
    ) -> CleanStart:
        return CleanStart(self._trainer, self.device_memory, self._phases, recorded, settings, loop)

    def _search_of(self, session: LightningSession) -> BatchSizeSearch:
        return BatchSizeSearch(session, self.budget, self.ranks, self._progress, rank_zero_info)

    def _evaluation_plan(self, chosen: Chosen, result: SearchResult, notes: list[str]) -> Plan:
        return make_plan(
            chosen,
            result.trials,
            result.limits,
            self._policy,
            device=self._device,
            notes=[*result.notes, *notes],
            step=OptimizerStep(),
        )


def _chosen(result: SearchResult, prefix: str = "") -> Chosen:
    if isinstance(result.chosen, SearchFailed):
        raise RuntimeError(f"{prefix}{result.chosen.reason}")
    return result.chosen


def _old_values(setting: BatchSizeSetting, chosen: Chosen) -> list[str]:
    """A note where the size of the project changes."""
    if not setting.attribute.exists or setting.value == chosen.batch_size:
        return []
    return [sentences.old_values(setting.name)]
