"""The state in which a stage starts, entered again by each attempt of a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_batchmem._lightning.hooks import (
    mute_callbacks_and_loggers,
)
from lightning_batchmem._lightning.module_state import ModuleState
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.trainer_state import (
    Loop,
    RandomStates,
    TrainerState,
)
from lightning_batchmem.batches.loaders import keep_sizes
from lightning_batchmem.devices.base import DeviceMemory


@dataclass
class Attempts:
    """Attempts of a search, each from the state before it; everything is restored afterwards."""

    trainer: Trainer
    device: DeviceMemory
    callback: Callback
    random: RandomStates
    module_state: ModuleState
    _current: ExitStack = field(default_factory=ExitStack, init=False)

    def restoring(self, settings: Sequence[BatchSizeSetting], loop: Loop) -> ExitStack:
        """Prepare the trainer for an attempt without other callbacks.

        Closing the result restores everything.
        """
        # The calls run in reverse order, each of them even where another one fails.
        with ExitStack() as undo:
            undo.callback(self.random.restore)
            for setting in settings:
                undo.callback(keep_sizes(setting.source.passed_loaders()))
            # This restores the batch size too, where it is in an attribute.
            undo.callback(self.module_state.restore)
            undo.callback(TrainerState(self.trainer, loop, self.module_state.schedulers).restore)
            mute_callbacks_and_loggers(self.trainer, self.callback)
            return undo.pop_all()

    @contextmanager
    def begin(self, start: Callable[[], ExitStack]) -> Iterator[None]:
        """Run the body in an attempt, also when it is restarted in between."""
        self._current = start()
        try:
            yield
        finally:
            self._close()
        # With empty caches, training starts as if nothing had been allocated before.
        self.device.release_cached()

    def restart(self, start: Callable[[], ExitStack]) -> None:
        """Restore everything, drop optimizer states and gradients, and release caches.

        This is the state in which training starts.
        """
        self._close()
        self.trainer.lightning_module.zero_grad(set_to_none=True)
        self.device.release_cached()
        self._current = start()

    def _close(self) -> None:
        self._current.close()
        if self.trainer.state.fn == TrainerFn.FITTING:
            # New optimizers are configured before the next step.
            for optimizer in self.trainer.optimizers:
                optimizer.state.clear()
