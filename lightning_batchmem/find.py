"""The search without a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_batchmem._lightning.clean_start import ProjectSnapshot, muted_trainer
from lightning_batchmem._lightning.places import ProjectAttribute, loaders_in
from lightning_batchmem._lightning.strategies import (
    trains_in_other_processes,
    warn_of_untested_torch,
)
from lightning_batchmem._lightning.trainer_state import (
    call_once_before,
    callbacks_of,
    end_of_tuning,
    in_every_package,
    set_callbacks,
)
from lightning_batchmem.batch_finder import BatchFinder
from lightning_batchmem.loop.search import plan_of_loop
from lightning_batchmem.loop.training_loop import training_loop
from lightning_batchmem.plan.options import (
    Objective,
    SearchOptions,
    check_switches,
    names_our_arguments,
)
from lightning_batchmem.plan.plan import Plan, check_plan

_Arguments = ParamSpec("_Arguments")


def _only_with_trainer(find: Callable[_Arguments, Plan]) -> Callable[_Arguments, Plan]:
    """Refuse a call for a loop by what to call instead, before Python counts its arguments."""

    @wraps(find)
    def checked(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> Plan:
        first = [*arguments, keywords.get("trainer")][0]
        if not isinstance(first, in_every_package("trainer.Trainer")):
            raise ValueError(
                "find_batch_size takes the Trainer first, and then the module, got"
                f" {first!r:.80}. For a loop without a Trainer call"
                " find_batch_size_of_loop(step, make_batch, model=..., optimizer=...)."
            )
        return find(*arguments, **keywords)

    return checked


@_only_with_trainer
def find_batch_size(
    trainer: Trainer,
    model: LightningModule,
    datamodule: LightningDataModule | None = None,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    **options: Any,
) -> Plan:
    """Compute the batch size without a training.

    The search is the one that :class:`~lightning_batchmem.BatchFinder` makes in ``trainer.fit``.
    The hooks ``prepare_data``, ``setup`` and ``teardown`` run; callbacks and loggers of the trainer
    do not. The plan is not printed; a line shows the progress if the trainer has a progress bar.
    Afterwards attributes of the model and the datamodule, the trainer and all random states are as
    before, so set the size yourself.

    Args:
        trainer: the Trainer of the later training.
        model: the module to train.
        datamodule: the data to train with.
        train_dataloaders: loaders to train with, instead of a datamodule.
        val_dataloaders: loaders of validation, with ``train_dataloaders``.
        **options: arguments of :class:`~lightning_batchmem.BatchFinder`.

    Returns:
        The plan; ``plan.batch_size`` is in samples for each rank.

    Raises:
        ValueError: for an argument out of range, a trainer that would not train or that trains in
            other processes (``ddp_spawn``), and a project whose batch size cannot be set.
        NothingFitsError: when no size fits.

    Example:
        >>> from lightning_batchmem import find_batch_size
        >>> plan = find_batch_size(trainer, model, memory_limit=0.9)  # doctest: +SKIP
        >>> model.batch_size = plan.batch_size  # doctest: +SKIP
    """
    # A compiled model wraps the module.
    if not isinstance(getattr(model, "_orig_mod", model), in_every_package("core.LightningModule")):
        raise ValueError(f"model must be a LightningModule, got {model!r:.80}")
    kinds = in_every_package("core.LightningDataModule")
    if datamodule is not None and not isinstance(datamodule, kinds):
        raise ValueError(
            f"datamodule must be a LightningDataModule, got {datamodule!r:.80}. Pass loaders as"
            " train_dataloaders=."
        )
    finder = SearchOnly(**options)
    return finder.search(trainer, model, datamodule, train_dataloaders, val_dataloaders)


@names_our_arguments
def find_batch_size_of_loop(
    step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    *,
    model: Module | Sequence[Module],
    optimizer: Optimizer | Sequence[Optimizer],
    state: object = (),
    fabric: Fabric | None = None,
    objective: Objective = "memory",
    memory_limit: int | float | str | None = None,
    max_batch_size: int | None = None,
    min_batch_size: int | None = None,
    multiple_of: int | None = None,
    plan: Plan | str | Path | None = None,
    verbose: bool = False,
) -> Plan:
    """Compute the batch size of a loop without a Trainer, in plain PyTorch or with Fabric.

    The search runs ``step(make_batch(n))`` at several sizes, and prints the plan as
    :class:`~lightning_batchmem.BatchFinder` does. Afterwards the model, the optimizer, ``state``,
    all gradients and all random states are as before, so set the size yourself. Under
    ``torch.distributed`` all ranks call it; the rank with the least room decides.

    The peaks of forward, backward and optimizer step are measured where ``step`` calls ``backward``
    and ``Optimizer.step``. Without such a call the time before it is all "forward": a step that
    takes gradients by ``torch.autograd.grad`` has no "backward", and a compiled optimizer step is
    part of backward.

    Args:
        step: runs forward, backward and the optimizer steps on a batch. What it returns is not
            used.
        make_batch: returns a batch of this many samples. It should be the worst batch of its size,
            with the longest samples for example: there is no ``worst_case``, because the samples
            are not known. Its time counts.
        model: the module that it trains, or a list of them.
        optimizer: its optimizer, or a list of them.
        state: a list of the other objects that a step changes: schedulers, a GradScaler, averaged
            weights, random generators. Schedulers do not step in the search. Nothing else is
            restored.
        fabric: the ``lightning.fabric.Fabric`` that set up model and optimizer.
        objective: as in :class:`~lightning_batchmem.BatchFinder`, and so are the others.
        memory_limit: the most memory that this process may take.
        max_batch_size: the largest size to consider; ``None``: 1,048,576.
        min_batch_size: the smallest size to consider.
        multiple_of: sizes are rounded down to a multiple of it.
        plan: an earlier plan to use again.
        verbose: print the whole plan.

    Returns:
        The plan; ``plan.batch_size`` is in samples for each rank.

    Raises:
        ValueError: for an argument out of range.
        NothingFitsError: when no size fits.

    Example:
        >>> from lightning_batchmem import find_batch_size_of_loop
        >>> plan = find_batch_size_of_loop(
        ...     step, make_batch, model=model, optimizer=optimizer
        ... )  # doctest: +SKIP
    """
    warn_of_untested_torch()
    loop = training_loop(step, make_batch, model, optimizer, state, fabric)
    options = SearchOptions(
        objective=objective,
        memory_limit=memory_limit,
        max_batch_size=max_batch_size,
        min_batch_size=min_batch_size,
        multiple_of=multiple_of,
        # The length of an epoch is not known.
        min_steps_per_epoch=None,
    )
    if objective in ("auto", "recipe"):
        raise ValueError(
            'objective cannot be "auto" or "recipe" for a loop, whose own batch size is not known,'
            f" got {objective!r}. Leave it out for the largest size that fits."
        )
    check_plan(plan)
    check_switches(verbose=verbose)
    return plan_of_loop(loop, options, plan, verbose=verbose)


class SearchOnly(BatchFinder):
    """A BatchFinder that ends ``fit`` after the search."""

    # The callbacks of the training.
    callbacks: list[Callback]

    def search(
        self,
        trainer: Trainer,
        model: LightningModule,
        datamodule: LightningDataModule | None,
        train_dataloaders: Any,
        val_dataloaders: Any,
    ) -> Plan:
        """Call ``fit`` up to the end of the search, and restore everything.

        Raises:
            ValueError: for a trainer that would not train, or not in this process, and for
                arguments of two runs.
        """
        if self.runs != "both":
            raise ValueError(
                "then and apply must be left out for find_batch_size, which returns the plan"
            )
        # A plan that is made in another process does not come back.
        if not trains_in_other_processes(trainer):
            data = [datamodule, *loaders_in(train_dataloaders), *loaders_in(val_dataloaders)]
            with self._alone(trainer, model, data):
                trainer.fit(model, train_dataloaders, val_dataloaders, datamodule)
        # A trainer that was refused has not called `setup`.
        plan: Plan | None = vars(self).get("plan")
        if plan is None:
            raise ValueError(
                "find_batch_size cannot search: the trainer has fast_dev_run, no batches or"
                " epochs, or a strategy that starts other processes. Pass one that trains in this"
                " process."
            )
        return plan

    @contextmanager
    def _alone(self, trainer: Trainer, model: LightningModule, data: list[Any]) -> Iterator[None]:
        """Let the trainer have no other callback, and restore everything at the end."""
        self.callbacks = callbacks_of(trainer)
        loaders = [item for item in data if isinstance(item, DataLoader)]
        kinds = in_every_package("core.LightningDataModule")
        datamodules = [item for item in data if isinstance(item, kinds)]
        # A compiled model wraps the module.
        module = getattr(model, "_orig_mod", model)
        snapshot = ProjectSnapshot(module, loaders, datamodules, trainer)
        # The path may lead through a class, which is not restored.
        owners = (module, *datamodules)
        snapshot.add(
            ProjectAttribute(trainer, module, self.options.batch_arg_name, owners).restorer()
        )
        strategy = trainer.strategy
        outer = strategy.model
        with muted_trainer(trainer, snapshot, [self]):
            cancel = call_once_before(
                strategy, "setup_environment", lambda: self.mute_callbacks_of_model(trainer)
            )
            try:
                yield
            finally:
                cancel()
                # The wrapper of FSDP1 would keep its shards on the device.
                strategy.model = outer
                strategy.optimizers = []
                strategy.lr_scheduler_configs = []
        # A training starts with empty caches.
        device_memory = self.device_memory(strategy.root_device)
        if device_memory is not None:
            device_memory.release_cached()

    def mute_callbacks_of_model(self, trainer: Trainer) -> None:
        """Remove the callbacks that ``configure_callbacks`` of the module has added."""
        self.callbacks = [*self.callbacks, *callbacks_of(trainer)]
        set_callbacks(trainer, [self])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search with the callbacks of the training in place, because some of them need memory."""
        set_callbacks(trainer, self.callbacks)
        try:
            super().on_fit_start(trainer, pl_module)
        finally:
            set_callbacks(trainer, [self])
        raise end_of_tuning(trainer)

    def _report(self, trainer: Trainer, plan: Plan) -> None:
        """Do not print the plan, because it is returned."""
