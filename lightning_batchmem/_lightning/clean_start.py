"""The state in which a stage starts: recorded before a search, and entered for each attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.data_source import DataSource
from lightning_batchmem._lightning.hooks import PhaseCallback, mute_callbacks_and_loggers
from lightning_batchmem._lightning.module_state import ModuleState
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.trainer_state import (
    Loop,
    RandomStates,
    TrainerState,
    callbacks_of,
    datamodules_of,
)
from lightning_batchmem.batches.loaders import keep_sizes, state_of
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.peaks import PhasePeaks


@dataclass(frozen=True)
class RecordedState:
    """Everything outside the trainer that a search may change.

    Configuring the optimizers twice may change it too, so it is recorded before the first time.
    """

    random: RandomStates
    module: ModuleState

    @classmethod
    def record(cls, trainer: Trainer, module: LightningModule, source: DataSource) -> RecordedState:
        random = RandomStates()
        others = [state_of(source.passed_loaders()), *datamodules_of(trainer)]
        return cls(random, ModuleState(module, others))

    def restore(self) -> None:
        self.module.restore()
        self.random.restore()


class CleanStart:
    """A trainer whose other callbacks and loggers are muted, in the state in which a stage starts.

    It is a context: everything is restored at its end. ``again`` restores everything and enters the
    state once more.

    Args:
        trainer: the trainer, in ``on_fit_start`` or before the loaders of another stage are built.
        device_memory: its caches are released before each attempt.
        phases: the phases of a step, which the only callback that is not muted marks.
        recorded: the state outside the trainer.
        settings: the places of the batch sizes that a search sets.
        loop: the loop of the stage.
    """

    def __init__(
        self,
        trainer: Trainer,
        device_memory: DeviceMemory,
        phases: PhasePeaks,
        recorded: RecordedState,
        settings: Sequence[BatchSizeSetting],
        loop: Loop,
    ) -> None:
        self.callbacks = callbacks_of(trainer)
        # It is called at the end of each entry, when the loaders of the stage are known.
        self.prepare: Callable[[], None] = lambda: None
        self._trainer = trainer
        self._device_memory = device_memory
        self._callback = PhaseCallback(phases)
        self._recorded = recorded
        self._settings = settings
        self._loop = loop
        self._undo = ExitStack()
        not_restorable = recorded.module.not_restorable
        if not_restorable:
            rank_zero_warn(
                "BatchFinder cannot restore these if a training step changes them: "
                + "; ".join(not_restorable[:10])
            )

    def __enter__(self) -> CleanStart:
        self._enter_state()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave_state()
        if error is None:
            # With empty caches, training starts as if nothing had been allocated before.
            self._device_memory.release_cached()

    def again(self) -> None:
        """Restore everything, drop optimizer states and gradients, and release caches."""
        self._leave_state()
        self._trainer.lightning_module.zero_grad(set_to_none=True)
        self._device_memory.release_cached()
        self._enter_state()

    def _enter_state(self) -> None:
        schedulers = self._recorded.module.schedulers
        # The calls run in reverse order, each of them even where another one fails. An error in the
        # user's hooks, which `prepare` calls, restores everything at once.
        with ExitStack() as undo:
            undo.callback(self._recorded.random.restore)
            for setting in self._settings:
                undo.callback(keep_sizes(setting.source.passed_loaders()))
            # This restores the batch size too, where it is in an attribute.
            undo.callback(self._recorded.module.restore)
            undo.callback(TrainerState(self._trainer, self._loop, schedulers).restore)
            mute_callbacks_and_loggers(self._trainer, self._callback)
            self.prepare()
            self._undo = undo.pop_all()

    def _leave_state(self) -> None:
        self._undo.close()
        if self._trainer.state.fn == TrainerFn.FITTING:
            # New optimizers are configured before the next step.
            for optimizer in self._trainer.optimizers:
                optimizer.state.clear()
