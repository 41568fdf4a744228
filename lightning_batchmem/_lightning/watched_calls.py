"""Functions that are called before Lightning requests a batch, and before what follows a step.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning.pytorch import Trainer

from lightning_batchmem._lightning.data_source import stage_loop


@dataclass
class _Watched:
    """Calls functions, and then a method. Unlike a closure, it can be pickled.

    Args:
        owner: the object with the method.
        method: its name.
        of_project: what a project has set in place of the method; None for the method itself.
        called: the functions.
    """

    owner: Any
    method: str
    of_project: Any
    called: list[Callable[[], object]] = field(default_factory=list)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        for function in self.called:
            function()
        if self.of_project is not None:
            return self.of_project(*arguments, **keywords)
        return getattr(type(self.owner), self.method)(self.owner, *arguments, **keywords)

    def remove(self, function: Callable[[], object]) -> None:
        """Call this function no more, and leave the owner as it was if it was the last one."""
        self.called.remove(function)
        # A project may have set something else since.
        if not self.called and vars(self.owner).get(self.method) is self:
            delattr(self.owner, self.method)
            if self.of_project is not None:
                setattr(self.owner, self.method, self.of_project)


class _Call(NamedTuple):
    owner: Any
    method: str
    function: Callable[[], object]


class WatchedCalls:
    """Calls functions at the moments of a stage that limit the time of its steps.

    The hooks of a callback come too late: those of other callbacks may have run before.

    Args:
        trainer: the Trainer, in the stage.
        on_own: called before the batches of the stage are requested.
        on_validation: called before those of an evaluation within the training.
        after_step: called before an evaluation within the training, the end of an epoch, and the
            making of a checkpoint.
        at_end: called when the work of a batch has ended, before the hooks that follow.
    """

    def __init__(
        self,
        trainer: Trainer,
        on_own: Callable[[], object],
        on_validation: Callable[[], object],
        after_step: Callable[[], object],
        at_end: Callable[[], object],
    ) -> None:
        loop = stage_loop(trainer)
        own_loop = loop.epoch_loop if trainer.training else loop
        self._fetchers = {own_loop: loop._data_fetcher}
        calls = [
            _Call(own_loop, "_on_before_fetch", on_own),
            _Call(own_loop.batch_progress, "increment_processed", at_end),
            _Call(trainer, "save_checkpoint", after_step),
        ]
        if trainer.training:
            val_loop = own_loop.val_loop
            self._fetchers[val_loop] = val_loop._data_fetcher
            calls += [
                _Call(val_loop, "_on_before_fetch", on_validation),
                _Call(val_loop.batch_progress, "increment_processed", at_end),
                _Call(loop, "on_advance_end", after_step),
                _Call(val_loop, "run", after_step),
            ]
        self._watched = []
        for owner, method, function in calls:
            watched = vars(owner).get(method)
            # Several profilers share the attribute.
            if not isinstance(watched, _Watched):
                watched = _Watched(owner, method, watched)
                setattr(owner, method, watched)
            watched.called.append(function)
            self._watched.append((watched, function))
        self._hand_over()

    def close(self) -> None:
        """Call the functions no more."""
        for watched, function in self._watched:
            watched.remove(function)
        self._hand_over()

    def _hand_over(self) -> None:
        """Let the fetchers that exist call the methods of their loops.

        A loop hands its method to a new fetcher when an epoch begins.
        """
        for loop, fetcher in self._fetchers.items():
            if fetcher is not None:
                fetcher._start_profiler = loop._on_before_fetch
