"""BatchFinder: measure -> fit -> decide -> apply -> report, before the first step."""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import lightning.pytorch.callbacks
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from rich.console import Console

from lightning_batchmem._lightning.checkpoint import callback_states, restored_after_setup
from lightning_batchmem._lightning.data_source import (
    DataSource,
    forget_train_loader,
    generators_of,
    stage_source,
    train_source,
    validation_source,
)
from lightning_batchmem._lightning.evaluation import before_loaders, stage_loop
from lightning_batchmem._lightning.module_state import ModuleState, RandomStates, record_before_optimizers
from lightning_batchmem._lightning.strategies import check_strategy
from lightning_batchmem._lightning.trainer_state import is_fast_dev_run
from lightning_batchmem.apply.batch_size import BatchSizeSetting
from lightning_batchmem.apply.training import apply_to_training, complete_plan, record_training_setup
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.select import device_memory_for, device_name
from lightning_batchmem.measure.batches import check_worst_case
from lightning_batchmem.measure.ranks import Ranks, own_budget_bytes
from lightning_batchmem.plan.memory_limit import check_positive, parse_memory_limit
from lightning_batchmem.plan.options import SearchOptions, WorstCase
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import Objective, SearchFailed, mib
from lightning_batchmem.report.plan_table import plan_table
from lightning_batchmem.search import BatchSizeSearch

_LIMIT_CHANGED = 0.1
"""Share by which the limit of a resumed run may differ before it is said; what a host has free is never the same."""


class BatchFinder(Callback):
    """Compute the batch size before training starts, from a few real steps at small sizes.

    Runs in ``on_fit_start``: measures the user's own training step at growing sizes, fits a line to the peak memory of
    each phase, computes the size, runs it for real, and leaves no other trace on the run. Under ``trainer.validate``,
    ``test`` and ``predict`` it does the same with forward passes only, before their loaders are built. A run that is
    resumed from a checkpoint goes on with the size that the checkpoint holds.

    Args:
        objective: ``"memory"`` for the largest size that fits, ``"throughput"`` for the smallest one that is within
            5 % of the best samples per second.
        memory_limit: the most that this process may hold: bytes, a text such as ``"20GiB"``, or a fraction of what the
            device can give to this process (0.9). ``None``: all that it can give.
        max_batch_size: the largest size to consider, in samples.
        min_batch_size: the smallest size to consider, in samples; ``None``: 2 (one sample is an error to BatchNorm).
        multiple_of: sizes are rounded down to a multiple of it; ``None``: sizes of 64 and more to a multiple of 8.
        batch_arg_name: the attribute of the module, its hparams, the datamodule or its hparams that holds the size.
        eval_batch_arg_name: the attribute that holds the size of validation (and of ``validate``, ``test`` and
            ``predict``), which then is searched for on its own. ``None``: validation is a phase of the search for
            training, at the size that its loaders have there.
        worst_case: which samples the search uses if they differ in size. ``None``: the largest one repeated if the
            collate function pads, samples as large as in the largest of 1,000 random batches if it concatenates.
            ``"longest"``: always the largest one. A callable that measures a sample: the largest by it. ``"typical"``:
            32 samples from all over the data set. Up to 10,000 samples are measured, for at most 20 s.
        target_batch_size: samples for each optimizer step over all ranks: ``accumulate_grad_batches`` is set, and the
            batch size made to divide it. ``None``: accumulation stays as the Trainer has it.
        lr_scaling: ``"linear"`` or ``"sqrt"``: multiply the module's ``lr`` or ``learning_rate`` by the ratio of the
            samples for each optimizer step, or its root, before the optimizers are configured. ``None``: leave it.
        base_batch_size: samples for each optimizer step that the learning rate was chosen for; ``None``: those that
            the project had before the search.
        search_on_resume: search again where a checkpoint holds a plan, instead of going on with its size.

    Attributes:
        plan: the :class:`~lightning_batchmem.Plan` of the last search; ``None`` before.

    Raises:
        ValueError: for an argument out of range, and at ``fit`` for a project whose batch size cannot be set.
        RuntimeError: at ``fit`` when no size fits, or when what was measured follows no law.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_batchmem import BatchFinder
        >>> trainer = Trainer(callbacks=[BatchFinder(memory_limit=0.9)], logger=False, enable_checkpointing=False)
    """

    def __init__(
        self,
        *,
        objective: Objective = "memory",
        memory_limit: int | float | str | None = None,
        max_batch_size: int | None = None,
        min_batch_size: int | None = None,
        multiple_of: int | None = None,
        batch_arg_name: str = "batch_size",
        eval_batch_arg_name: str | None = None,
        worst_case: WorstCase = None,
        target_batch_size: int | None = None,
        lr_scaling: Literal["linear", "sqrt"] | None = None,
        base_batch_size: int | None = None,
        search_on_resume: bool = False,
    ) -> None:
        super().__init__()
        if objective not in ("memory", "throughput"):
            raise ValueError(f'objective must be "memory" or "throughput", got {objective!r}')
        check_positive("max_batch_size", max_batch_size)
        check_positive("min_batch_size", min_batch_size)
        check_positive("multiple_of", multiple_of)
        check_positive("target_batch_size", target_batch_size)
        check_positive("base_batch_size", base_batch_size)
        parse_memory_limit(memory_limit, budget_bytes=1)  # for its error, here rather than at fit
        if max_batch_size is not None and max_batch_size < (min_batch_size or 1):
            raise ValueError(f"max_batch_size must be at least min_batch_size={min_batch_size}, got {max_batch_size}")
        _check_attribute_name("batch_arg_name", batch_arg_name)
        if eval_batch_arg_name is not None:
            _check_attribute_name("eval_batch_arg_name", eval_batch_arg_name)
        if eval_batch_arg_name == batch_arg_name:
            raise ValueError(
                f"eval_batch_arg_name must differ from batch_arg_name, got {eval_batch_arg_name!r} for both"
            )
        check_worst_case(worst_case)
        if lr_scaling not in (None, "linear", "sqrt"):
            raise ValueError(f'lr_scaling must be None, "linear" or "sqrt", got {lr_scaling!r}')
        if base_batch_size is not None and lr_scaling is None:
            raise ValueError(f"base_batch_size must come with lr_scaling, got {base_batch_size} without it")
        self.plan: Plan | None = None
        self._options = SearchOptions(
            objective=objective,
            memory_limit=memory_limit,
            max_batch_size=max_batch_size,
            min_batch_size=min_batch_size,
            multiple_of=multiple_of,
            target_batch_size=target_batch_size,
            worst_case=worst_case,
            eval_batch_arg_name=eval_batch_arg_name,
            lr_scaling=lr_scaling,
            base_batch_size=base_batch_size,
        )
        self._batch_arg_name = batch_arg_name
        self._search_on_resume = search_on_resume
        self._plan_of_fit: Plan | None = None
        self._plan_in_checkpoint: Plan | None = None
        self._options_in_checkpoint: dict[str, Any] = {}
        self._kept: tuple[RandomStates, ModuleState] | None = None  # as they were before configure_optimizers
        self._take_away: Callable[[], object] = _nothing

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note the random states before ``configure_optimizers`` draws from them, or search before an evaluation."""
        self._plan_in_checkpoint = None
        if is_fast_dev_run(trainer):
            return
        check_strategy(trainer)  # before an engine is made that could not be made again
        if stage != "fit":
            self._take_away = before_loaders(stage_loop(trainer), lambda: self._before_evaluation(trainer, pl_module))
            return
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set where mypy does not look
        # before a LearningRateFinder, which Lightning puts first, and which needs the size
        trainer.callbacks = sorted(callbacks, key=lambda callback: callback is not self)  # type: ignore[attr-defined]

        def keep() -> None:
            self._kept = _as_it_is(trainer, pl_module, train_source(trainer))

        self._take_away = record_before_optimizers(trainer, keep)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind on strategy and loops when a run ends before the search."""
        self._take_away()
        if self._kept is not None:  # the other ranks may be waiting in a search that this one has not reached
            self._kept = None
            Ranks(trainer).report(exception)

    def state_dict(self) -> dict[str, Any]:
        """The plan that a checkpoint carries, as plain JSON types."""
        if self._plan_of_fit is None:
            return {}
        return {"plan": json.loads(self._plan_of_fit.to_json()), "wishes": self._options.as_json()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the plan out of a checkpoint; a ``fit`` that resumes goes on with it."""
        if "plan" in state_dict:
            self._plan_in_checkpoint = Plan.from_json(json.dumps(state_dict["plan"]))
            self._options_in_checkpoint = state_dict["wishes"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search, and set the size that was found."""
        kept, self._kept = self._kept, None
        if is_fast_dev_run(trainer):
            rank_zero_info("BatchFinder does nothing under fast_dev_run")
            return
        if 0 in (trainer.max_epochs, trainer.max_steps, trainer.limit_train_batches):
            return  # there is no training to find a size for
        _check_step(pl_module.training_step, "training_step")
        self._check_trainer(trainer, pl_module)
        device_memory = _device_memory_of(trainer)
        source = train_source(trainer)
        random, module_state = kept or _as_it_is(trainer, pl_module, source)
        forget_train_loader(trainer)  # built already if configure_optimizers asked for estimated_stepping_batches
        setting = BatchSizeSetting(trainer, pl_module, self._batch_arg_name, source)
        setting.check()
        before = record_training_setup(trainer, setting, self._options, self._plan_of_fit)
        self._look_into_checkpoint(trainer)
        plan = self._resumed(trainer, device_memory)
        if plan is None:
            search = BatchSizeSearch(trainer, device_memory, self._options, random, module_state)
            outcome = search.training(setting)
            if isinstance(outcome, SearchFailed):
                raise RuntimeError(outcome.reason)
            plan = complete_plan(trainer, outcome, self._options, before, search.epoch_batches)
            _show(trainer, plan)
        else:
            module_state.restore()
            random.restore()
        self.plan = self._plan_of_fit = plan
        name = self._options.eval_batch_arg_name
        validation_setting = replace(setting, source=validation_source(trainer), name=name) if name else None
        with Ranks(trainer).fail_together():  # configure_optimizers and train_dataloader are the user's
            apply_to_training(trainer, setting, plan, validation_setting=validation_setting)

    def _before_evaluation(self, trainer: Trainer, module: LightningModule) -> None:
        """Search with forward passes, where the loaders of the stage follow the batch size."""
        loop, source = stage_loop(trainer), stage_source(trainer)
        if getattr(trainer, f"limit_{source.stage}_batches") == 0:
            return
        name = "validation_step" if source.stage == "val" else f"{source.stage}_step"
        _check_step(getattr(module, name), name)
        setting = BatchSizeSetting(trainer, module, self._options.eval_batch_arg_name or self._batch_arg_name, source)
        if not setting.in_attribute and not source.passed:
            rank_zero_info(f"BatchFinder leaves {source.hook} alone: nothing has the attribute {setting.name!r}")
            return
        random, module_state = _as_it_is(trainer, module, source)
        outcome = BatchSizeSearch(trainer, _device_memory_of(trainer), self._options, random, module_state).evaluation(
            setting, loop
        )
        if outcome is None:
            rank_zero_info(f"BatchFinder leaves {source.hook} alone: it does not follow {setting.name!r}")
            return
        if isinstance(outcome, SearchFailed):
            raise RuntimeError(outcome.reason)
        self.plan = replace(outcome, device=device_name(trainer.strategy.root_device), ranks=trainer.world_size)
        setting.commit(self.plan.batch_size)
        _show(trainer, self.plan)

    def _look_into_checkpoint(self, trainer: Trainer) -> None:
        """Take the plan out of a checkpoint that a strategy for shards loads only after ``on_fit_start``."""
        if (path := restored_after_setup(trainer)) is None:
            return
        state = None
        if trainer.is_global_zero:
            try:
                state = callback_states(path).get(self.state_key)
            except (OSError, RuntimeError, pickle.UnpicklingError) as error:
                rank_zero_warn(f"BatchFinder searches again, since it finds no plan in {path}: {error}")
        state = trainer.strategy.broadcast(state)  # all go on with it, or all search
        if state is not None:
            self.load_state_dict(state)

    def _resumed(self, trainer: Trainer, device_memory: DeviceMemory) -> Plan | None:
        """The plan of the checkpoint that is resumed from; ``None`` when there is none, or a search is wanted."""
        plan = self._plan_in_checkpoint
        if plan is None or self._search_on_resume:
            return None
        budget = own_budget_bytes(device_memory, trainer)
        limit = min(parse_memory_limit(self._options.memory_limit, budget), budget)
        device = device_name(trainer.strategy.root_device)
        changes = []
        if device != plan.device:
            changes.append(f"it was found on {plan.device} and this is {device}")
        if plan.measured_peak_bytes is not None and plan.measured_peak_bytes > limit:
            changes.append(f"it held {mib(plan.measured_peak_bytes)} and the limit is {mib(limit)}")
        elif abs(limit - plan.limit_bytes) > _LIMIT_CHANGED * plan.limit_bytes:
            changes.append(f"the limit was {mib(plan.limit_bytes)} and is {mib(limit)}")
        options = self._options.as_json()
        for name in [name for name, value in options.items() if value != self._options_in_checkpoint.get(name, value)]:
            changes.append(f"{name} was {self._options_in_checkpoint[name]!r} and is {options[name]!r}")
        if self._options.target_batch_size is None and plan.accumulate_grad_batches != trainer.accumulate_grad_batches:
            plan = replace(plan, accumulate_grad_batches=trainer.accumulate_grad_batches, effective_batch_size=None)
        goes_on = f"BatchFinder goes on with the checkpoint's batch size {plan.batch_size}"
        if changes:
            rank_zero_warn(f"{goes_on}, although {', and '.join(changes)}; search_on_resume=True searches again")
        else:
            rank_zero_info(goes_on)
        return plan

    def _check_trainer(self, trainer: Trainer, module: LightningModule) -> None:
        if self._options.target_batch_size is None:
            return
        if not module.automatic_optimization:
            raise ValueError("target_batch_size must be None under manual optimization, which steps by itself")
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set where mypy does not look
        if any(isinstance(one, lightning.pytorch.callbacks.GradientAccumulationScheduler) for one in callbacks):
            raise ValueError("target_batch_size must be None with a GradientAccumulationScheduler, which sets it too")


def _nothing() -> None:
    """What is to be taken away at first; with a name, since ``ddp_spawn`` pickles the finder."""


def _as_it_is(trainer: Trainer, module: LightningModule, source: DataSource) -> tuple[RandomStates, ModuleState]:
    """All that a search, or configuring the optimizers twice, may change outside the trainer."""
    generators = [generator for loader in source.passed_loaders() for generator in generators_of(loader)]
    datamodule = trainer.datamodule  # type: ignore[attr-defined]  # set where mypy does not look
    others = [SimpleNamespace(generators=generators), *([datamodule] if datamodule is not None else [])]
    return RandomStates(), ModuleState(module, others)


def _check_attribute_name(argument: str, name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{argument} must be the name of an attribute, got {name!r}")


def _check_step(step: Callable[..., object], name: str) -> None:
    if "dataloader_iter" in inspect.signature(step).parameters:
        raise ValueError(
            f"{name} must take a batch for BatchFinder, got one that takes dataloader_iter; set the batch size by hand"
        )


def _device_memory_of(trainer: Trainer) -> DeviceMemory:
    device_memory = device_memory_for(trainer.strategy.root_device)
    if device_memory is None:
        raise ValueError(
            f"the device must have a peak memory counter for BatchFinder, got {trainer.strategy.root_device}. Set the"
            " batch size by hand."
        )
    return device_memory


def _show(trainer: Trainer, plan: Plan) -> None:
    if trainer.is_global_zero:
        console = Console()
        console.print(plan_table(plan))
        console.print(str(plan), highlight=False, markup=False, soft_wrap=True)
