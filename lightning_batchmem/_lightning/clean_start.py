"""The state in which a stage starts: recorded before a search, and entered for each attempt.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.amp import GradScaler
from torch.nn import Module
from torch.utils.data import DataLoader

from lightning_batchmem._lightning.data_source import (
    has_train_loader,
    stage_source,
    validation_source,
)
from lightning_batchmem._lightning.muted import muted_callback, muted_logger, muted_profiler
from lightning_batchmem._lightning.steps import SearchCallback
from lightning_batchmem._lightning.strategies import (
    SEARCH_ONLY_TEXT,
    configure_optimizers_again,
    outer_module,
)
from lightning_batchmem._lightning.trainer_state import (
    OF_OPTIMIZERS,
    call_module_hook,
    callbacks_of,
    datamodules_of,
    in_every_package,
    logger_connector,
    parts_of,
    renew_results,
    set_callbacks,
)
from lightning_batchmem.batches.loader_size import keep_sizes
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.foreign_values import attributes_of, value_or_none
from lightning_batchmem.devices.peaks import PhasePeaks
from lightning_batchmem.state.contents import refill
from lightning_batchmem.state.snapshot import Restored, Snapshot, freeze, restored_parts, unfreeze


class ProjectSnapshot(Snapshot):
    """A snapshot of everything that a search may change, except for the trainer.

    Configuring the optimizers twice may change it too, so it is taken before the first time. An
    optimizer that is configured then has no state, so none is copied.

    Args:
        module: the module.
        loaders: loaders that the project has made already.
        datamodules: the datamodule of the project, if it has one.
        trainer: the trainer, where the module does not have it yet.
        outer: the wrapper around the module that steps change too.
    """

    def __init__(
        self,
        module: LightningModule,
        loaders: Sequence[DataLoader[Any]] = (),
        datamodules: Sequence[LightningDataModule] = (),
        trainer: Trainer | None = None,
        outer: Module | None = None,
    ) -> None:
        # A module and a datamodule may have the trainer of an earlier training. The attribute of
        # the module is private in lightning 2.5.0 to 2.6.6; the property raises an error.
        trainers = [trainer, module._trainer, *(data.trainer for data in datamodules)]
        self.not_walked = [part for one in trainers for part in parts_of(one)]
        super().__init__([outer or module], datamodules, None, self.not_walked, loaders)
        # A hook may return a loader that the project keeps in an attribute.
        restore_sizes = keep_sizes([*loaders, *self.attributes.loaders])
        self._restorers: list[Callable[[], list[str] | None]] = [restore_sizes]
        self._warned: set[str] = set()

    def add(self, restore: Callable[[], list[str] | None]) -> None:
        """Call this function too whenever everything is restored."""
        self._restorers.append(restore)

    def restore(self) -> list[str]:
        """Restore everything, with the sizes of loaders; returns what could not be restored."""
        failed = [text for restore in self._restorers for text in restore() or ()]
        return [*failed, *super().restore()]

    def restore_or_warn(self) -> None:
        """Restore everything, and warn of what could not be restored."""
        # A search restores everything many times.
        if failed := [text for text in self.restore() if text not in self._warned]:
            self._warned.update(failed)
            rank_zero_warn(
                f"BatchFinder could not restore: {'; '.join(failed)}. {SEARCH_ONLY_TEXT}"
            )


def project_snapshot(
    trainer: Trainer, kind: type[ProjectSnapshot] = ProjectSnapshot
) -> ProjectSnapshot:
    """A snapshot of the project of a trainer whose optimizers are not configured yet."""
    sources = [stage_source(trainer)]
    if trainer.training:
        sources.append(validation_source(trainer))
        if has_train_loader(trainer):
            rank_zero_warn(
                "The training loader was built before configure_optimizers (by"
                " estimated_stepping_batches in a setup hook, for example), so values derived from"
                " it belong to the old batch size. Read it in configure_optimizers instead."
            )
    loaders = [loader for source in sources for loader in source.passed_loaders()]
    return kind(
        trainer.lightning_module,
        loaders,
        datamodules_of(trainer),
        trainer,
        outer_module(trainer),
    )


def _muted_parts(trainer: Trainer, snapshot: ProjectSnapshot) -> Restored:
    """A record of the callbacks, loggers and the profiler, which are muted in a search."""
    # mypy does not see attributes that Lightning sets outside the class Trainer.
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    muted = [*callbacks_of(trainer), *trainer.loggers, profiler]
    # A run of a logger may change in a thread, and steps do not get it.
    runs = [attributes_of(logger).get("_experiment") for logger in trainer.loggers]
    model = trainer.strategy.model
    left_out = [
        *snapshot.not_walked,
        *snapshot.attributes.walked,
        model,
        *trainer.optimizers,
        *runs,
    ]
    return restored_parts(
        [("", one) for one in muted], [one for one in left_out if one is not profiler]
    )


@contextmanager
def muted_trainer(
    trainer: Trainer, snapshot: ProjectSnapshot, callbacks: list[Callback]
) -> Iterator[None]:
    """Run the trainer with these callbacks and muted loggers; everything is restored at the end."""
    # The calls run in reverse order, each of them even where another one fails.
    with ExitStack() as undo:
        # What is muted has its own methods again at the very end.
        for logger in trainer.loggers:
            undo.enter_context(muted_logger(logger))
        # mypy does not see attributes that Lightning sets outside the class Trainer.
        undo.enter_context(muted_profiler(trainer.profiler))  # type: ignore[attr-defined]
        # This restores the batch size too.
        undo.callback(snapshot.restore_or_warn)
        connector = logger_connector(trainer)
        schedulers = snapshot.attributes.schedulers
        plugins = (trainer.precision_plugin, trainer.accelerator)
        for owner in (trainer, trainer.state, *plugins, connector, *schedulers):
            _isolate(owner, undo)
        # This makes new dictionaries of metrics.
        connector.reset_metrics()
        # A scheduler that was made for the old batch size may end before the search does.
        freeze(schedulers)
        set_callbacks(trainer, callbacks)
        # Lightning 2.6 broadcasts SIGTERM in every step, but a step of the search may run on one
        # rank only. mypy does not allow the replacement of a method.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        yield


def _isolate(owner: Any, undo: ExitStack) -> None:
    """Let a search change the attributes of a part of the trainer, and of the loops in it."""
    attributes = attributes_of(owner)
    undo.callback(refill, attributes, dict(attributes))
    # Both classes are private in lightning 2.5.0 to 2.6.6.
    loops = in_every_package("loops.loop._Loop")
    progress = in_every_package("loops.progress._BaseProgress")
    for name, value in list(attributes.items()):
        if isinstance(value, loops):
            _isolate(value, undo)
        # These change in place, so the search changes copies.
        elif isinstance(value, (*progress, GradScaler)):
            if isinstance(value, GradScaler):
                # No copy can be made with the state that an error in an earlier step has left. The
                # attribute is private in torch 2.5.1 to 2.14.
                value._per_optimizer_states.clear()
            attributes[name] = copy.deepcopy(value)
    renew_results(owner)


class CleanStart:
    """A trainer whose other callbacks and loggers are muted, in the state in which a stage starts.

    Args:
        trainer: the trainer, in ``on_fit_start`` or before the loaders of another stage are built.
        device_memory: its caches are released before each attempt.
        snapshot: the state outside the trainer.
    """

    def __init__(
        self, trainer: Trainer, device_memory: DeviceMemory, snapshot: ProjectSnapshot
    ) -> None:
        self.phases = PhasePeaks(device_memory)
        self.callbacks = callbacks_of(trainer)
        self.saves_checkpoints = bool(trainer.checkpoint_callbacks)
        # A search may change these objects, by their ids.
        self.restored = snapshot.attributes.restored
        self._trainer = trainer
        self._device_memory = device_memory
        self._snapshot = snapshot
        self._undo = ExitStack()
        self._prepare: Callable[[], None] = lambda: None
        self._muted = self._record_muted(snapshot)
        _warn_of(snapshot.not_restorable)

    def restore_sizes_of(self, loaders: Sequence[DataLoader[Any]]) -> None:
        """Restore the sizes of these loaders too, to which no attribute may lead."""
        self._snapshot.add(keep_sizes(loaders))

    def restore_collate(self, loaders: Sequence[DataLoader[Any]]) -> None:
        """Restore what the collate functions of these loaders change too, and warn of the rest."""
        named = [("collate_fn", loader.collate_fn) for loader in loaders]
        restored = restored_parts(
            named, [*self._snapshot.not_walked, *self._snapshot.attributes.walked]
        )
        self._snapshot.add(restored.restore)
        # The snapshot names what belongs to loaders that were passed.
        known = {key for state in self._snapshot.states for key in state.restored}
        if any(id(collate) not in known for _, collate in named):
            _warn_of(restored.not_restorable)

    @contextmanager
    def entered(self, prepare: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Enter the state, and restore everything at the end.

        Args:
            prepare: what comes before each request of loaders.
        """
        self._prepare = prepare
        with self._undo:
            self._enter()
            prepare()
            yield
        # With empty caches, training starts as if nothing had been allocated before.
        self._device_memory.release_cached()

    def reset_for_loaders(self) -> None:
        """Restore everything, and enter the state in which loaders are requested again."""
        self.reset()
        self._prepare()

    def reset(self) -> None:
        """Restore everything, drop gradients, release caches, and enter the state again."""
        self._leave()
        self._device_memory.release_cached()
        self._enter()

    def reset_with_caches(self) -> None:
        """Restore everything and enter the state again, but keep the caches of the device."""
        self._leave()
        # Optimizers of these steps may be part of a cycle.
        gc.collect()
        self._enter()

    def _leave(self) -> None:
        self._undo.close()
        self._trainer.lightning_module.zero_grad(set_to_none=True)

    def _enter(self) -> None:
        trainer = self._trainer
        # A new one has seen no batch.
        self.search_callback = SearchCallback(self.phases)
        enter = self._undo.enter_context
        for callback in self.callbacks:
            enter(muted_callback(callback))
        enter(muted_trainer(trainer, self._snapshot, [*self.callbacks, self.search_callback]))
        self._undo.callback(self._restore_strategy, self._of_strategy())
        self._undo.callback(self._muted.restore)
        if trainer.training:
            self._undo.callback(self._clear_optimizers)

    def _restore_strategy(self, recorded: dict[str, object]) -> None:
        """Restore attributes of the strategy, but not its optimizers, which are new."""
        attributes = vars(self._trainer.strategy)
        new = {name: value for name, value in attributes.items() if name in OF_OPTIMIZERS}
        refill(attributes, {**recorded, **new})

    def _of_strategy(self) -> dict[str, object]:
        # A record of the optimizers would keep them alive, and some make their state at once.
        attributes = vars(self._trainer.strategy).items()
        return {name: value for name, value in attributes if name not in OF_OPTIMIZERS}

    def _record_muted(self, snapshot: ProjectSnapshot) -> Restored:
        return _muted_parts(self._trainer, snapshot)

    def start_training(self) -> None:
        """Configure new optimizers, and call the first hooks of the module."""
        configure_optimizers_again(self._trainer)
        self._call_first_hooks()

    def _call_first_hooks(self) -> None:
        freeze(config.scheduler for config in self._trainer.strategy.lr_scheduler_configs)
        for hook in ("on_fit_start", "on_train_start"):
            call_module_hook(self._trainer, hook)

    def _clear_optimizers(self) -> None:
        """Clear the states of the optimizers, which are configured again before the next step.

        After an error they are not, and a callback may save a checkpoint.
        """
        for optimizer in self._trainer.optimizers:
            value_or_none("The state of an optimizer", _clear_state, optimizer)
        unfreeze(config.scheduler for config in self._trainer.strategy.lr_scheduler_configs)


def _warn_of(not_restorable: list[str]) -> None:
    if not_restorable:
        rank_zero_warn(
            "BatchFinder cannot restore these if a training step changes them: "
            + "; ".join(not_restorable[:10])
            + f". {SEARCH_ONLY_TEXT}"
        )


def _clear_state(optimizer: Any) -> None:
    optimizer.state.clear()
