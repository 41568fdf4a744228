"""BatchFinder: search, apply, report, before the first step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from rich.console import Console

from lightning_batchmem._lightning.apply import (
    apply_to_training,
    check_step,
    check_training,
    complete_plan,
    current_state,
    record_training_setup,
)
from lightning_batchmem._lightning.data_source import (
    discard_train_loader,
    stage_loop,
    stage_source,
    train_source,
)
from lightning_batchmem._lightning.hooks import before_optimizers, call_before
from lightning_batchmem._lightning.module_state import ModuleState
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.strategies import check_strategy
from lightning_batchmem._lightning.trainer_state import RandomStates, callbacks_of, is_fast_dev_run
from lightning_batchmem.devices import device_memory_for, device_name
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.peaks import RequestedBytes
from lightning_batchmem.devices.tensors import bytes_of, tensors_in
from lightning_batchmem.plan.options import SearchOptions, WorstCase, changes_since
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import Objective, SearchFailed, mib
from lightning_batchmem.plan.scaling import LearningRateScaling
from lightning_batchmem.search.budget import memory_limit_bytes
from lightning_batchmem.search.earlier_plan import earlier_plan, search_conditions
from lightning_batchmem.search.ranks import Ranks
from lightning_batchmem.search.search import BatchSizeSearch

# Two starts of one training differ by at most this share of the limit.
_NOTABLE_SHARE = 0.01


class BatchFinder(Callback):
    """Compute the batch size before training starts, from a few real steps at small sizes.

    In ``on_fit_start`` it measures the user's training step at small sizes, fits a line to the live
    bytes of each phase, predicts the size, rehearses the training at it, and restores everything
    else. Under ``trainer.validate``, ``test`` and ``predict`` it searches with forward passes,
    before their loaders are built. A run that resumes from a checkpoint continues with the size in
    the checkpoint.

    Args:
        objective: ``"memory"`` for the largest size that fits, ``"throughput"`` for the smallest
            one within 5 % of the best samples per second.
        memory_limit: the most memory that this process may hold: bytes (``2e9`` too), a text such
            as ``"20GiB"``, or a fraction in (0, 1] of what the device can provide to this process.
            ``None``, and at most: 0.95 of it.
        max_batch_size: the largest size to consider, in samples.
        min_batch_size: the smallest size to consider, in samples; ``None``: 2 (one sample is an
            error to BatchNorm).
        multiple_of: sizes are rounded down to a multiple of it; ``None``: to the largest power of
            two that is at most a 64th of the size.
        min_steps_per_epoch: an epoch keeps at least this many optimizer steps: the size is at most
            samples / (steps x accumulation x ranks), but not below the size of the project or
            ``min_batch_size``. ``None``, and where ``max_batch_size`` or ``target_batch_size`` is
            given: no limit.
        batch_arg_name: the attribute of the module, the datamodule or their hparams that holds the
            size, or a path to it through attributes and dicts, such as ``"kwargs.batch_size"``.
        eval_batch_arg_name: the attribute that holds the size of validation (and of ``validate``,
            ``test`` and ``predict``), which has a search itself then. ``None``: validation is a
            phase of the search for training, at the size that its loaders have there.
        worst_case: which samples the search uses: ``"typical"`` spreads them over the data set,
            ``"longest"`` takes the largest one (of up to 10,000), a callable returns the size of a
            sample. ``None``: if samples differ in size, the largest one where the collate function
            pads, and samples as in the largest of 1,000 random batches where it concatenates.
        target_batch_size: samples per optimizer step over all ranks: sets
            ``accumulate_grad_batches``, and a batch size that divides it. ``None``: accumulation
            stays as the Trainer has it.
        lr_scaling: ``"linear"`` or ``"sqrt"``: multiply the ``lr`` or ``learning_rate`` of the
            module by the ratio of samples per optimizer step, or its square root, before the
            optimizers are configured. ``None``: no change.
        base_batch_size: samples per optimizer step that the learning rate was chosen for; ``None``:
            those that the project had before the search.
        search_on_resume: search again where a checkpoint holds a plan.
        plan: a plan of an earlier ``fit`` to use again: a ``Plan``, its JSON file, or a log
            directory. If device, limit, ranks, precision, parameters and options are the same, only
            a rehearsal at its size is run. If they are not, or the rehearsal fails, the search
            runs, and a note of the new plan has the reason.
        verbose: print the whole plan, with all reasons and every size that was run, instead of six
            lines.

    Attributes:
        plan: the :class:`~lightning_batchmem.Plan` of the last search; ``None`` before.

    Raises:
        ValueError: for an argument out of range, and at ``fit`` for a project whose batch size
            cannot be set.
        RuntimeError: at ``fit`` when no size fits.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_batchmem import BatchFinder
        >>> finder = BatchFinder(memory_limit=0.9)
        >>> trainer = Trainer(callbacks=[finder], logger=False, enable_checkpointing=False)
    """

    def __init__(
        self,
        *,
        objective: Objective = "memory",
        memory_limit: int | float | str | None = None,
        max_batch_size: int | None = None,
        min_batch_size: int | None = None,
        multiple_of: int | None = None,
        min_steps_per_epoch: int | None = 10,
        batch_arg_name: str = "batch_size",
        eval_batch_arg_name: str | None = None,
        worst_case: WorstCase = None,
        target_batch_size: int | None = None,
        lr_scaling: LearningRateScaling | None = None,
        base_batch_size: int | None = None,
        search_on_resume: bool = False,
        plan: Plan | str | Path | None = None,
        verbose: bool = False,
    ) -> None:
        arguments = {
            name: value
            for name, value in locals().items()
            if name in SearchOptions.__dataclass_fields__
        }
        super().__init__()
        self.plan: Plan | None = None
        self._options = SearchOptions(**arguments)
        self._search_on_resume = search_on_resume
        self._verbose = verbose
        if not isinstance(plan, Plan | str | Path | None):
            raise ValueError(f"plan must be a Plan, a path or None, got {plan!r:.80}")
        self._earlier = plan
        self._plan_of_fit: Plan | None = None
        self._checkpoint: dict[str, Any] = {}
        # These are the states before configure_optimizers.
        self._before: tuple[RandomStates, ModuleState] | None = None
        self._fit_started = False
        self._cancel: Callable[[], object] | None = None
        # The number is that of live bytes when the search began its last rehearsal.
        self._start: tuple[DeviceMemory, int] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Record the state before ``configure_optimizers``, or search before an evaluation."""
        self._checkpoint = {}
        self._fit_started = False
        self._start = None
        if is_fast_dev_run(trainer):
            return
        # The check comes before Lightning makes an engine that could not be made again.
        check_strategy(trainer)
        if stage != "fit":
            self._cancel = call_before(
                stage_loop(trainer), "setup_data", lambda: self._evaluation(trainer, pl_module)
            )
            return
        # This callback must run before a LearningRateFinder, which Lightning puts first, and which
        # needs the size. mypy does not see that the trainer has this attribute.
        trainer.callbacks = sorted(callbacks_of(trainer), key=lambda callback: callback is not self)  # type: ignore[attr-defined]

        def record() -> None:
            self._before = current_state(trainer, pl_module, train_source(trainer))

        self._cancel = before_optimizers(trainer, record)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search, apply the size, and print the plan."""
        before = self._before
        self._before = None
        self._fit_started = True
        self._cancel = None
        if is_fast_dev_run(trainer):
            rank_zero_info("BatchFinder does nothing under fast_dev_run")
            return
        # With any of these at 0 there is no training.
        if 0 in (trainer.max_epochs, trainer.max_steps, trainer.limit_train_batches):
            return
        # Settings and files may differ between ranks, so one rank may fail alone.
        with Ranks(trainer).fail_together():
            check_training(trainer, pl_module, self._options)
            source = train_source(trainer)
            random, module_state = before or current_state(trainer, pl_module, source)
            # Lightning has built the loader where configure_optimizers read
            # estimated_stepping_batches.
            discard_train_loader(trainer)
            setting = BatchSizeSetting(trainer, pl_module, self._options.batch_arg_name, source)
            setting.check()
            device_memory = _device_memory_of(trainer)
            plan = resumed = self._resumed_plan(trainer, device_memory)
        if plan is None:
            plan = self._search(setting, device_memory, random, module_state)
        else:
            module_state.restore()
            random.restore()
        # The hooks configure_optimizers and train_dataloader may raise an error on one rank only.
        with Ranks(trainer).fail_together():
            apply_to_training(trainer, setting, plan, self._options)
        self.plan = self._plan_of_fit = plan
        if resumed is None:
            self._report(trainer, plan)

    def _search(
        self,
        setting: BatchSizeSetting,
        device_memory: DeviceMemory,
        random: RandomStates,
        module_state: ModuleState,
    ) -> Plan:
        trainer = setting.trainer
        before = record_training_setup(trainer, setting, self._options, self._plan_of_fit)
        earlier, why_not = earlier_plan(trainer, device_memory, self._options, self._earlier)
        search = BatchSizeSearch(
            trainer, device_memory, self._options, random, module_state, earlier
        )
        plan = _checked(search.training(setting), setting)
        plan = replace(
            plan,
            notes=(*plan.notes, *why_not),
            conditions=search_conditions(trainer, self._options),
        )
        if device_memory.counts_live_bytes and search.start_bytes > 0:
            self._start = (device_memory, search.start_bytes)
        return complete_plan(trainer, plan, self._options, before, search.epoch_batches)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Warn once if training begins with more memory in use than the search did."""
        if self._start is None or self.plan is None:
            return
        device_memory, start_bytes = self._start
        self._start = None
        # A resumed run has restored the optimizer state, which the rehearsal made itself.
        own = tensors_in([batch, *(optimizer.state for optimizer in trainer.optimizers)])
        own_bytes = bytes_of(own, trainer.strategy.root_device)
        current_bytes = RequestedBytes(device_memory).current().allocated_bytes
        more_bytes = current_bytes - own_bytes - start_bytes
        if more_bytes > _NOTABLE_SHARE * self.plan.limit_bytes:
            rank_zero_warn(
                f"Training begins with {mib(more_bytes)} more in use than the search did, for"
                " example because of another callback. If it runs out of memory, lower"
                " memory_limit by as much."
            )

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Remove what ``setup`` left on strategy and loops when a run ends before the search."""
        if self._cancel is not None:
            self._cancel()
        # The other ranks may wait in a search that this one has not reached.
        if self._before is not None:
            self._before = None
            Ranks(trainer).report(exception)

    def state_dict(self) -> dict[str, Any]:
        """The plan and the options for a checkpoint, as plain JSON types."""
        if self._plan_of_fit is None:
            return {}
        return {"plan": json.loads(self._plan_of_fit.to_json()), "options": self._options.as_json()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Read the plan of a checkpoint, with which a resumed ``fit`` continues."""
        if "plan" not in state_dict:
            return
        self._checkpoint = state_dict
        # A LearningRateFinder loads the checkpoint that it saved after the search, with the same
        # plan.
        if self._fit_started and self.plan is not None and state_dict != self.state_dict():
            rank_zero_warn(
                f"BatchFinder searched again and uses batch size {self.plan.batch_size}, because"
                " this strategy loads the checkpoint (batch size"
                f" {state_dict['plan']['batch_size']}) after the search. To keep its size, set it"
                " by hand and remove BatchFinder."
            )

    def _resumed_plan(self, trainer: Trainer, device_memory: DeviceMemory) -> Plan | None:
        """The plan of the checkpoint that the run resumes from; a warning has its changes."""
        if not self._checkpoint or self._search_on_resume:
            return None
        plan = Plan.from_json(json.dumps(self._checkpoint["plan"]))
        changes = changes_since(
            plan,
            # Version 0.1.0 stored the options as "wishes".
            self._checkpoint.get("options", self._checkpoint.get("wishes", {})),
            self._options.as_json(),
            device=device_name(trainer.strategy.root_device),
            limit_bytes=memory_limit_bytes(trainer, device_memory, self._options),
        )
        accumulate = trainer.accumulate_grad_batches
        if self._options.target_batch_size is None and plan.accumulate_grad_batches != accumulate:
            plan = replace(plan, accumulate_grad_batches=accumulate, effective_batch_size=None)
        text = f"BatchFinder continues with batch size {plan.batch_size} of the checkpoint"
        if changes:
            rank_zero_warn(
                f"{text}, although {', and '.join(changes)}. search_on_resume=True searches again."
            )
        else:
            rank_zero_info(text)
        return plan

    def _evaluation(self, trainer: Trainer, module: LightningModule) -> None:
        """Search with forward passes, where the loaders of the stage follow the batch size."""
        loop = stage_loop(trainer)
        source = stage_source(trainer)
        options = self._options
        self._cancel = None
        if getattr(trainer, f"limit_{source.stage}_batches") == 0:
            return
        check_step(module, "validation_step" if source.stage == "val" else f"{source.stage}_step")
        setting = BatchSizeSetting(
            trainer, module, options.eval_batch_arg_name or options.batch_arg_name, source
        )
        outcome = None
        if setting.attribute.exists or source.passed:
            random, module_state = current_state(trainer, module, source)
            search = BatchSizeSearch(
                trainer, _device_memory_of(trainer), options, random, module_state
            )
            outcome = search.evaluation(setting, loop)
        if outcome is None:
            rank_zero_info(
                f"BatchFinder leaves {source.hook} unchanged: no loader follows `{setting.name}`"
            )
            return
        device = device_name(trainer.strategy.root_device)
        self.plan = replace(_checked(outcome, setting), device=device, ranks=trainer.world_size)
        setting.write(self.plan.batch_size, also_logged=True)
        self._report(trainer, self.plan)

    def _report(self, trainer: Trainer, plan: Plan) -> None:
        if trainer.is_global_zero:
            text = str(plan) if self._verbose else plan.short_text()
            Console().print(text, highlight=False, markup=False, soft_wrap=True)


def _device_memory_of(trainer: Trainer) -> DeviceMemory:
    device = trainer.strategy.root_device
    if (device_memory := device_memory_for(device)) is None:
        raise ValueError(
            f"the device must have a peak memory counter for BatchFinder, got {device.type}."
            " Set the batch size by hand."
        )
    return device_memory


def _checked(outcome: Plan | SearchFailed, setting: BatchSizeSetting) -> Plan:
    if isinstance(outcome, SearchFailed):
        raise RuntimeError(outcome.reason)
    if not setting.attribute.exists or setting.value == outcome.batch_size:
        return outcome
    note = f"Values computed from `{setting.name}` in __init__ or setup keep the old size."
    return replace(outcome, notes=(*outcome.notes, note))
