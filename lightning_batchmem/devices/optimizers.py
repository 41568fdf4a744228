"""Optimizers that hold other optimizers, and the hooks of their steps.

torch calls the hooks of a step where ``Optimizer.__init__`` has run. Wrappers such as Lookahead and
AcceleratedOptimizer do not call it, and their step is one of the optimizer that they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.devices.tensors import tensors_in

_STEP = "The step of an optimizer"


def with_held(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and those that it holds, directly or in a collection, the nearest first.

    Those that hold each other are there once.
    """
    found = [optimizer]
    for one in found:
        yield one
        for value in list(getattr(one, "__dict__", {}).values()):
            values = value.values() if isinstance(value, dict) else value
            items = values if isinstance(value, dict | list | tuple) else (value,)
            # The class that an object says it has may raise an error.
            found += [
                held
                for held in items
                if issubclass(type(held), Optimizer) and not any(held is one for one in found)
            ]


def with_step_hooks(optimizer: Any) -> Optimizer | None:
    """Return the nearest optimizer in this one whose hooks torch calls in a step; None without."""
    for one in with_held(optimizer):
        if value_or_none(_STEP, _calls_hooks, one):
            return one  # type: ignore[no-any-return]
    return None


def call_after_steps(optimizer: Any, hook: Callable[..., object]) -> RemovableHandle | None:
    """Let torch call a hook after each step; None if it calls none for this optimizer."""
    hooked = with_step_hooks(optimizer)
    return None if hooked is None else value_or_none(_STEP, hooked.register_step_post_hook, hook)


def _calls_hooks(optimizer: Any) -> bool:
    # Both names are those of torch 2.5.1 to 2.14. A wrapper may have the dictionaries only.
    return getattr(optimizer.step, "hooked", False) and hasattr(
        optimizer, "_optimizer_step_post_hooks"
    )


def state_tensors(optimizers: Iterable[Any]) -> list[Tensor]:
    """Return the tensors in the states of optimizers, and of optimizers that these hold."""
    return tensors_in([one.state for optimizer in optimizers for one in with_held(optimizer)])
