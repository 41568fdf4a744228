"""The moments at which Lightning requests a batch from a loader.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer


@dataclass
class _Fetch:
    """Calls a function, and then the method of the loop. Unlike a closure, it can be pickled."""

    loop: Any
    called: Callable[[], object]

    def __call__(self) -> None:
        self.called()
        type(self.loop)._on_before_fetch(self.loop)


class WatchedFetches:
    """Calls functions before Lightning requests a batch from the loaders of a Trainer.

    Args:
        trainer: the Trainer.
        on_own: called before the batches of the current stage.
        on_validation: called before those of an evaluation within the training.
    """

    def __init__(
        self,
        trainer: Trainer,
        on_own: Callable[[], object],
        on_validation: Callable[[], object],
    ) -> None:
        # mypy does not see that a stage has a loop.
        loop: Any = trainer._active_loop
        self._loops = {loop: loop._data_fetcher}
        called = {loop: on_own}
        if trainer.training:
            epoch_loop = loop.epoch_loop
            val_loop = epoch_loop.val_loop
            self._loops = {epoch_loop: loop._data_fetcher, val_loop: val_loop._data_fetcher}
            called = {epoch_loop: on_own, val_loop: on_validation}
        for one in self._loops:
            # A loop hands this method to its fetcher when an epoch begins.
            one._on_before_fetch = _Fetch(one, called[one])
        self._hand_over()

    def close(self) -> None:
        """Call the functions no more."""
        for loop in self._loops:
            vars(loop).pop("_on_before_fetch", None)
        self._hand_over()

    def _hand_over(self) -> None:
        """Let the fetchers that exist call the methods of their loops."""
        for loop, fetcher in self._loops.items():
            if fetcher is not None:
                fetcher._start_profiler = loop._on_before_fetch
