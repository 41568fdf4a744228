"""Optimizers that hold other optimizers, and the hooks of their steps.

torch calls the hooks of a step where ``Optimizer.__init__`` has run. Wrappers such as Lookahead and
AcceleratedOptimizer do not call it, and their step is one of the optimizer that they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_batchmem.devices.foreign_values import attributes_of, value_or_none
from lightning_batchmem.devices.tensors import tensors_in

STEP = "The step of an optimizer"


def with_held(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and those that it holds, directly or in a collection, the nearest first.

    Those that hold each other are there once.
    """
    found = [optimizer]
    for one in found:
        yield one
        for value in list(attributes_of(one).values()):
            found += [
                held
                for held in _items_of(value)
                # The class that an object says it has may raise an error.
                if issubclass(type(held), Optimizer) and not any(held is one for one in found)
            ]


def _items_of(value: Any) -> list[Any]:
    if type(value) is dict:
        return list(value.values())
    return list(value) if type(value) in (list, tuple) else [value]


class StepHooks:
    """Hooks that torch calls before and after the steps of optimizers, until they are removed."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def add(
        self,
        optimizer: Any,
        after: Callable[..., object],
        before: Callable[..., object] | None = None,
    ) -> bool:
        """Add hooks to the nearest optimizer in this one whose hooks torch calls.

        Returns:
            Whether they are called.
        """
        for one in with_held(optimizer):
            if value_or_none(STEP, _calls_hooks, one):
                return value_or_none(STEP, self._add, one, after, before) or False
        return False

    def _add(
        self, optimizer: Any, after: Callable[..., object], before: Callable[..., object] | None
    ) -> bool:
        self._handles.append(optimizer.register_step_post_hook(after))
        if before is not None:
            self._handles.append(optimizer.register_step_pre_hook(before))
        return True

    def remove(self) -> None:
        """Remove all of them."""
        while self._handles:
            value_or_none(STEP, lambda handle: handle.remove(), self._handles.pop())


def _calls_hooks(optimizer: Any) -> bool:
    # Both names are those of torch 2.5.1 to 2.14. A wrapper may have the dictionaries only.
    return getattr(optimizer.step, "hooked", False) and hasattr(
        optimizer, "_optimizer_step_post_hooks"
    )


def state_tensors(optimizers: Iterable[Any]) -> list[Tensor]:
    """Return the tensors in the states of optimizers, and of optimizers that these hold."""
    return tensors_in([one.state for optimizer in optimizers for one in with_held(optimizer)])
