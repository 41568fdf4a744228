"""BatchFinder: search, apply, report, before the first step."""

from __future__ import annotations

import json
from functools import partial, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_batchmem._lightning.apply import (
    apply_to_training,
    check_step,
    check_training,
    start_without_search,
    with_learning_rates,
)
from lightning_batchmem._lightning.clean_start import project_snapshot
from lightning_batchmem._lightning.data_source import (
    discard_train_loader,
    stage_loop,
    stage_source,
    train_source,
)
from lightning_batchmem._lightning.finder_run import FinderRun, TrainingWatch, earlier_plan_of
from lightning_batchmem._lightning.given_plan import apply_given_plan
from lightning_batchmem._lightning.search_only import end_process, find_plan, mute_loggers
from lightning_batchmem._lightning.size_setting import BatchSizeSetting, batch_size_setting
from lightning_batchmem._lightning.strategies import (
    check_strategy,
    strategy_text,
    warn_of_untested_torch,
)
from lightning_batchmem._lightning.trainer_search import TrainerSearch
from lightning_batchmem._lightning.trainer_state import (
    callbacks_of,
    is_fast_dev_run,
    is_one_of_several,
    set_callbacks,
    trains_no_more,
)
from lightning_batchmem._lightning.training_state import Later, later_function
from lightning_batchmem.devices import device_memory_for
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.foreign_values import add_note, begin_run, error_text
from lightning_batchmem.plan.options import (
    LearningRateScaling,
    Objective,
    SearchOptions,
    WorstCase,
    check_runs,
    check_switches,
    missing_attribute,
    names_our_arguments,
)
from lightning_batchmem.plan.plan import Plan, check_plan
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.printing import print_or_warn
from lightning_batchmem.search.earlier_plan import (
    parameters_made_text,
    parameters_text,
    write_missing_plan,
)
from lightning_batchmem.search.kept_trials import KeptTrials, trials_path
from lightning_batchmem.search.ranks import Ranks


class BatchFinder(Callback):
    """Compute the batch size before training starts, from a few real steps at small sizes.

    In ``on_fit_start`` it measures your training step at small sizes, fits a line to what tensors
    take in each phase, predicts the size, rehearses the training at it, and restores weights,
    attributes of module and datamodule, and random states. Under ``trainer.validate``, ``test`` and
    ``predict`` it searches with forward passes, before their loaders are built. A run that resumes
    from a checkpoint continues with the size in the checkpoint.

    Attributes:
        plan: the :class:`~lightning_batchmem.Plan` of the last search; ``None`` if a run has begun
            and none has searched.
        policy: the numbers that steer a search; assign another one before ``fit``.
        options: the arguments that steer it, checked.
        later: the function that makes the state that needs most memory; ``None`` for none.
        runs: what this process runs: ``"both"`` search and training, the ``"search"`` only, or the
            ``"training"`` with a plan of another process.

    Args:
        objective: what the size is good for. ``"auto"`` keeps the training about the same: at most
            1.5 times the samples of an optimizer step, and your own size where a larger one is
            slower. Where your own size does not fit, accumulation keeps the samples of a step.
            ``"recipe"`` keeps the samples of a step (size x accumulation x ranks), with as few
            batches as fit. ``"memory"`` is the largest size that fits. ``"throughput"`` is the
            smallest one within 5 % of the best samples per second that were measured. The last two
            may change the training much. ``max_batch_size``, ``target_batch_size`` and
            ``min_steps_per_epoch`` lift the bound of ``"auto"``.
        memory_limit: the most memory that this process may take: bytes (``2e9`` too), a text such
            as ``"20GiB"``, or a share of what the device can provide to this process, as a
            fraction in (0, 1] or as ``"90%"``. Default: 0.95 of it on a GPU, which is also the
            most there, and all of it on a CPU. Set it if other programs use the device. On CUDA
            your limit is enforced on each rank until the training ends, if PyTorch's allocator can
            be limited. On a CPU tensors get 0.25 of the room below the limit: a higher limit, even
            above the free memory, raises the size.
        max_batch_size: the largest size to consider, in samples. Set it if larger batches do not
            help, or to leave room for what a search cannot see.
        min_batch_size: the smallest size to consider, in samples. Default: 2, because one sample is
            an error to BatchNorm. Set it if your loss needs more samples.
        multiple_of: round sizes down to a multiple of this number. Default: the largest power of
            two that is at most a 64th of the size. Set it if your layers are fast at certain sizes.
        min_steps_per_epoch: an epoch keeps at least this many optimizer steps: the size is at most
            samples / (steps x accumulation x ranks), but not below the size of the project or
            ``min_batch_size``. Pass None for no limit. Default: 10, where no other bound applies.
            It does not apply if you set ``max_batch_size`` or ``target_batch_size``.
        batch_arg_name: the attribute of the module, the datamodule or their hparams that has the
            size, or a path to it through attributes and dicts, such as ``"kwargs.batch_size"``.
            Under the default a search in ``fit`` looks for another place if the loaders do not
            follow ``batch_size``. Set it if several attributes may be meant.
        worst_case: which samples the search uses: ``"longest"`` takes the largest ones (of up to
            10,000), ``"typical"`` spreads them over the data set. Default: if they differ in size,
            the largest ones if the collate function pads, with the longest of each tensor, and
            samples as in the largest of 1,000 random batches if it concatenates.
        target_batch_size: samples per optimizer step over all ranks: sets
            ``accumulate_grad_batches``, and a batch size that divides it. Set it to use the batch
            of a paper on your device. Default: see ``objective``.
        lr_scaling: ``"linear"`` or ``"sqrt"``: multiply the ``lr`` or ``learning_rate`` of the
            module by the ratio of samples per optimizer step after and before the search, or its
            square root, before the optimizers are configured. Set it if the rate was tuned for the
            size of the project. Default: the rate stays.
        search_on_resume: True to search again if a checkpoint has a plan, ``"if_changed"`` to do so
            only if the device or its limit is another one. Set it for runs that resume on another
            machine.
        plan: a plan of an earlier ``fit`` to use again: a ``Plan``, its JSON file, or a log
            directory. If device, limit and number of parameters are the same, and its size is
            allowed, only a rehearsal at its size is run. Otherwise, or if the rehearsal fails, the
            search runs, and a note of the new plan has the reason. A file ``"plan.json"`` that is
            missing is written after the search, so a sweep searches once.
        verbose: print the whole plan, with all reasons and every size that was run.
        budget: the attribute that ``batch_arg_name`` names is not a number of samples, but a budget
            within which the loaders form their own batches, such as ``"max_tokens"``. Sizes are in
            units of it. If loaders are passed to ``fit``, it is an attribute of their batch
            samplers, samplers or data sets.
        later: a function of the trainer and the module that makes the state of the training that
            needs most memory, if it comes later than the first step: the final resolution, the
            longest rollout, layers that a hook of the module unfreezes, a memory bank that is full.
            It is called before the loaders are requested, and again before the steps of each size,
            once the optimizers exist. What it changes is restored. Layers that a finetuning
            callback of Lightning unfreezes need no function. A text ``"module:function"`` names
            one. If ranks start as new processes (``ddp_spawn``), it cannot be a lambda.
        then: ``"exit"`` to end the process after the search, with the plan in the file ``plan``.
            Nothing is restored, nothing after ``fit`` runs, and loggers and checkpoints write
            nothing. So it searches under DeepSpeed too, and where a search in the training cannot
            restore everything. If the process ends in the search, start the same command again:
            the search goes on behind the size that was running. Default: train.
        apply: True to search nothing: ``setup`` sets size, accumulation and learning rate of
            ``plan``, before loaders and optimizers exist. Device, limit, ranks, strategy,
            precision, number of parameters, and your own batch size and accumulation have to be the
            same.

    Raises:
        ValueError: for an argument out of range, and at ``fit`` for a project whose batch size
            cannot be set.
        NothingFitsError: at ``fit`` when no size fits.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_batchmem import BatchFinder
        >>> finder = BatchFinder(memory_limit=0.9)
        >>> trainer = Trainer(callbacks=[finder], logger=False, enable_checkpointing=False)
    """

    # Whether the device is a simulated one.
    _is_simulated = False
    # Whether a search keeps the engine of the strategy, because the process ends after it.
    _keeps_engine = False

    # It exists once a run has begun.
    plan: Plan | None

    @names_our_arguments
    def __init__(
        self,
        *,
        objective: Objective = "auto",
        memory_limit: int | float | str | None = None,
        max_batch_size: int | None = None,
        min_batch_size: int | None = None,
        multiple_of: int | None = None,
        min_steps_per_epoch: int | Literal["auto"] | None = "auto",
        batch_arg_name: str = "batch_size",
        worst_case: WorstCase | None = None,
        target_batch_size: int | None = None,
        lr_scaling: LearningRateScaling | None = None,
        search_on_resume: bool | Literal["if_changed"] = False,
        plan: Plan | str | Path | None = None,
        verbose: bool = False,
        budget: bool = False,
        later: Later | str | None = None,
        then: Literal["train", "exit"] = "train",
        apply: bool = False,
    ) -> None:
        super().__init__()
        self.policy = SearchPolicy()
        self.options = SearchOptions(
            objective=objective,
            memory_limit=memory_limit,
            max_batch_size=max_batch_size,
            min_batch_size=min_batch_size,
            multiple_of=multiple_of,
            min_steps_per_epoch=min_steps_per_epoch,
            batch_arg_name=batch_arg_name,
            worst_case=worst_case,
            target_batch_size=target_batch_size,
            lr_scaling=lr_scaling,
            budget=budget,
        )
        check_switches(verbose=verbose, apply=apply)
        self.later: Later | None = later_function(later)
        self._search_on_resume = search_on_resume
        self._verbose = verbose
        check_plan(plan)
        self._given_plan = plan
        check_runs(search_on_resume, then, plan, apply=apply)
        self.runs: Literal["both", "search", "training"] = "training" if apply else "both"
        if then == "exit":
            self.runs = "search"
            mute_loggers()
        self._plan_of_fit: Plan | None = None
        # Whether a search that cannot be made is a warning, after which the training goes on.
        self._is_optional = False
        # Everything that belongs to one fit or evaluation; setup makes a new one.
        self._run = FinderRun()

    @classmethod
    def optional(cls, **options: Any) -> Self:
        """A finder whose search may fail: that is only a warning, on all ranks.

        The run goes on with the batch size of the project. The environment variable makes such
        finders, because a script that does not know the package has to run as without it. An error
        in a step that all ranks take together still ends the run.

        Args:
            **options: arguments of BatchFinder.
        """
        finder = cls(**options)
        finder._is_optional = True
        return finder

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Say where the size is, under whatever name it is looked for."""
            return missing_attribute(
                self,
                name,
                "a plan in fit: read finder.plan.batch_size after it. Where another process or a"
                " copy of it trains, read batch_plan.json, which a MemoryProfiler writes.",
            )

    def device_memory(self, device: torch.device) -> DeviceMemory | None:
        """Return the memory that a search uses; override it to search on another kind of device."""
        return device_memory_for(device)

    def setup(
        self,
        trainer: Trainer,
        # Lightning leaves it out where it calls the function of a class.
        pl_module: LightningModule = None,  # type: ignore[assignment]
        stage: str = "",
    ) -> None:
        """Record the state before ``configure_optimizers``, or search before an evaluation."""
        if is_one_of_several(self, trainer, BatchFinder):
            raise ValueError("callbacks must have one BatchFinder, got several. Remove the others.")
        vars(self).setdefault("plan", None)
        warn_of_untested_torch()
        begin_run()
        # An earlier run may have ended without a teardown.
        self._run.end()
        self._run = run = FinderRun(
            self._ranks_of(trainer),
            # A process that only searches must not train after an error.
            is_optional=self._is_optional and self.runs != "search",
            parameters=parameters_made_text(pl_module),
        )
        if self.runs == "training":
            if stage == "fit":
                self._apply(trainer, pl_module)
            return
        if is_fast_dev_run(trainer) or (self.runs == "search" and stage != "fit"):
            return
        # The check comes before Lightning makes an engine that could not be made again.
        with run.kept_refusal():
            check_strategy(trainer, restores=self.runs != "search" and not self._keeps_engine)
        if stage != "fit":
            run.call_before(
                stage_loop(trainer), "setup_data", lambda: self._evaluation(trainer, pl_module)
            )
            return
        # This callback must run before a LearningRateFinder, which Lightning puts first, and which
        # needs the size.
        set_callbacks(trainer, sorted(callbacks_of(trainer), key=lambda one: one is not self))
        if self.runs == "both":
            run.record_project(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search, apply the size, and print the plan."""
        run = self._run
        if self.runs == "training":
            # A plan that was refused is none of the run.
            if run.plan is not None:
                self.plan = self._plan_of_fit = with_learning_rates(trainer, run.plan)
                self._report(trainer, self.plan)
            return
        snapshot = run.begin_search()
        if self.runs == "search":
            self._search_only(trainer, pl_module, Path(str(self._given_plan)))
        if is_fast_dev_run(trainer):
            rank_zero_info("BatchFinder does nothing under fast_dev_run, so finder.plan is None")
            return
        if trains_no_more(trainer):
            return
        options = self.options
        # Settings, files and the user's hooks may differ between ranks, so one rank may fail alone.
        with run.warned_of_error() as without_search, run.ranks.fail_together():
            run.raise_refusal()
            check_training(trainer, pl_module, options)
            snapshot = snapshot or project_snapshot(trainer)
            without_search.callback(start_without_search, trainer, snapshot)
            # Lightning has built the loader where configure_optimizers read
            # estimated_stepping_batches.
            discard_train_loader(trainer)
            setting = self._setting(trainer, pl_module)
            given_plan = self._given_plan or self._plan_in_place(setting)
            # It begins with an exchange, so the other ranks end here too if one has failed.
            search = self._search_in(trainer, options, earlier_plan_of(setting.owners))
            # A resumed run continues with it, without a search.
            saved_plan = None
            if run.checkpoint and self._search_on_resume is not True:
                saved_plan = search.plan_in(
                    run.checkpoint, may_search_again=self._search_on_resume == "if_changed"
                )
            if saved_plan is not None:
                plan = saved_plan.continued(trainer, options.target_batch_size)
                # The plan may be of another device, or of another memory_limit.
                limit_bytes = saved_plan.limit_bytes
                setting = search.setting_of_saved(plan, setting, snapshot)
                snapshot.restore_or_warn()
            else:
                plan = search.training(
                    setting, None if self._keeps_engine else snapshot, given_plan
                )
                limit_bytes = plan.limit_bytes
                setting = setting.at(plan.place)
            plan = apply_to_training(setting, plan, run.undo)
            self.plan = self._plan_of_fit = plan
            run.begin_training(plan, setting.owners)
            if options.memory_limit is not None:
                # Otherwise the allocator would grow where it released its cache in the rehearsal.
                run.undo.enter_context(search.device_memory.limit_enforced(limit_bytes))
            if saved_plan is None:
                # Average samples are smaller than many batches of the training.
                knows_largest = options.worst_case != "typical"
                memory = search.device_memory
                run.watch(TrainingWatch(memory, plan, knows_largest_batch=knows_largest))
                self._report(trainer, plan)
                if trainer.is_global_zero:
                    write_missing_plan(self._given_plan, plan)

    def _ranks_of(self, trainer: Trainer) -> Ranks:
        return Ranks(trainer.global_rank, trainer.world_size, goes_on=self.runs == "search")

    def _setting(self, trainer: Trainer, module: LightningModule) -> BatchSizeSetting:
        setting = batch_size_setting(
            trainer,
            module,
            train_source(trainer),
            self.options.batch_arg_name,
            is_budget=self.options.budget,
        )
        setting.check_budget()
        return setting

    def _search_only(self, trainer: Trainer, module: LightningModule, path: Path) -> NoReturn:
        """Search without restoring anything, write the plan, and end the process."""
        try:
            with self._run.ranks.fail_together():
                kept = KeptTrials(self._run.ranks, trials_path(path), strategy_text(trainer))
                search = self._search_in(trainer, self.options, kept=kept)
                plan = find_plan(search, lambda: self._setting(trainer, module), path)
                self._report(trainer, plan)
        finally:
            # No callback saves a checkpoint of what the steps have left.
            set_callbacks(trainer, [self])
        end_process(trainer, path, is_by_variable=self._is_optional)

    def _apply(self, trainer: Trainer, module: LightningModule) -> None:
        """Set what the plan has, before loaders, engine and optimizers exist."""
        run = self._run
        with run.warned_of_error() as without_plan:
            with run.ranks.fail_together():
                search = self._search_in(trainer, self.options)
                # There is a plan, as the arguments were checked.
                applied, setting = apply_given_plan(
                    search, module, self._given_plan or "", run.undo, without_plan
                )
            run.begin_training(applied, setting.owners)
            # The setup of the module, which runs next, may set the size too.
            write_again = partial(setting.write, applied.batch_size)
            run.call_before(trainer.strategy, "barrier", write_again)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Warn once if training needs more memory than the search could see."""
        self._run.begin_step(trainer, batch)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Undo what ``setup`` or a search has left, when a run ends early."""
        self._run.fail(exception)
        # The trainer sends its callbacks to ranks that start as new processes.
        if self.later is not None and "pickle" in error_text(exception).lower():
            add_note(
                exception,
                "BatchFinder: later= must be a named function of a module where ranks start as new"
                " processes, because a lambda cannot reach them.",
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo the limit, and the size of an evaluation: the next ``fit`` starts without them."""
        self._run.end()

    def state_dict(self) -> dict[str, Any]:
        """The plan for a checkpoint, as plain JSON types."""
        if self._plan_of_fit is None:
            return {}
        return {"plan": json.loads(self._plan_of_fit.to_json())}

    # Lightning takes it for its own method, and does not look for two states under one key: its
    # error would not say what to do, as `setup` does.
    update_wrapper(state_dict, Callback.state_dict, assigned=())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Read the plan of a checkpoint, with which a resumed ``fit`` continues."""
        if "plan" not in state_dict or self.runs == "training":
            return
        self._run.load(state_dict)
        # A strategy may load it after the search. A LearningRateFinder loads the checkpoint that it
        # saved after the search, with the same plan.
        plan = self._run.plan
        if plan is not None and state_dict != self.state_dict():
            rank_zero_warn(
                f"BatchFinder searched again and uses batch size {plan.batch_size}, because"
                " this strategy loads the checkpoint (batch size"
                f" {state_dict['plan']['batch_size']!r:.20}) after the search. To keep its size,"
                " set it by hand and remove BatchFinder."
            )

    def _evaluation(self, trainer: Trainer, module: LightningModule) -> None:
        """Search with forward passes before an evaluation whose loaders follow the batch size."""
        run = self._run
        options = self.options
        with run.warned_of_error():
            run.raise_refusal()
            source = stage_source(trainer)
            if getattr(trainer, f"limit_{source.stage}_batches") == 0:
                return
            step = "validation_step" if source.stage == "val" else f"{source.stage}_step"
            check_step(module, step)
            setting = batch_size_setting(
                trainer, module, source, options.batch_arg_name, is_budget=options.budget
            )
            if not source.passed and (earlier := self._plan_in_place(setting)):
                rank_zero_info(
                    f"BatchFinder does not search for {source.hook}: the project has batch size"
                    f" {earlier.batch_size}, which fit has found"
                )
                return
            plan = None
            if setting.place.exists:
                with run.ranks.fail_together():
                    plan = self._search_in(trainer, options).evaluation(
                        setting, project_snapshot(trainer)
                    )
            if plan is None:
                rank_zero_info(
                    f"BatchFinder leaves {source.hook} unchanged: no loader follows"
                    f" `{setting.name}`"
                )
                return
            self.plan = plan
            # The next fit would take the size of this evaluation for the project's own.
            run.undo.callback(setting.place.restorer())
            setting.write(plan.batch_size)
            self._report(trainer, plan)

    def _plan_in_place(self, setting: BatchSizeSetting) -> Plan | None:
        """The verified plan of an earlier fit of this project if it still has the size."""
        plan = earlier_plan_of(setting.owners)
        # Another finder has other arguments.
        if plan is None or plan != self._plan_of_fit or not plan.verified:
            return None
        return plan if setting.at(plan.place).project_size == plan.batch_size else None

    def _search_in(
        self,
        trainer: Trainer,
        options: SearchOptions,
        earlier: Plan | None = None,
        kept: KeptTrials | None = None,
    ) -> TrainerSearch:
        device = trainer.strategy.root_device
        device_memory = self.device_memory(device)
        if device_memory is None:
            raise ValueError(
                f"BatchFinder cannot search, because {device.type} or its allocator counts"
                " no peak memory. Set the batch size by hand."
            )
        return TrainerSearch(
            trainer,
            device_memory,
            options,
            self.policy,
            self._run.ranks,
            later=self.later,
            is_simulated=self._is_simulated,
            earlier=earlier,
            kept=kept,
            parameters=self._run.parameters or parameters_text(trainer.lightning_module),
        )

    def _report(self, trainer: Trainer, plan: Plan) -> None:
        if trainer.is_global_zero:
            print_or_warn(str(plan) if self._verbose else plan.short_text())
