"""Optimizers that wrap other optimizers, and the hooks of their steps.

torch calls the hooks of a step where ``Optimizer.__init__`` has run. Wrappers such as Lookahead and
AcceleratedOptimizer do not call it, and their step is a step of the optimizer inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_batchmem.devices.foreign_values import attributes_of, value_or_none
from lightning_batchmem.devices.tensors import tensors_in

STEP = "The step of an optimizer"


def with_wrapped(optimizer: Any) -> list[Any]:
    """List an optimizer and those that it wraps, in attributes or in lists, the nearest first."""
    found = [optimizer]
    for one in found:
        for value in attributes_of(one).values():
            items = value if type(value) in (list, tuple) else [value]
            # Two may hold each other. The class that an object says it has may raise an error.
            found += [
                item for item in items if issubclass(type(item), Optimizer) and item not in found
            ]
    return found


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
        """Add hooks to the nearest optimizer in this one that calls them.

        Returns:
            Whether they are called.
        """
        return value_or_none(STEP, self._add, optimizer, after, before) or False

    def _add(
        self, optimizer: Any, after: Callable[..., object], before: Callable[..., object] | None
    ) -> bool:
        for one in with_wrapped(optimizer):
            # Both names are private in torch 2.5.1 to 2.14. A wrapper may have the dictionaries
            # only.
            if getattr(one.step, "hooked", False) and hasattr(one, "_optimizer_step_post_hooks"):
                self._handles.append(one.register_step_post_hook(after))
                if before is not None:
                    self._handles.append(one.register_step_pre_hook(before))
                return True
        return False

    def remove(self) -> None:
        """Remove all of them."""
        while self._handles:
            self._handles.pop().remove()


def state_tensors(optimizers: Iterable[Any]) -> list[Tensor]:
    """Return the tensors in the states of optimizers, and of optimizers that these wrap."""
    return tensors_in([one.state for optimizer in optimizers for one in with_wrapped(optimizer)])
