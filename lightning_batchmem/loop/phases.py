"""The begin of backward and of an optimizer step in a loop that has no hooks of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_batchmem.devices.optimizers import StepHooks
from lightning_batchmem.devices.peaks import PhasePeaks


@contextmanager
def marked_phases(phases: PhasePeaks, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Mark the phases of the steps in the body; :meth:`.PhasePeaks.watch` marks their ends.

    Backward begins at a call of ``torch.autograd.backward``, which ``Tensor.backward`` calls too.
    Hooks of modules would break the graph of a compiled one, so there are none. An optimizer step
    that is compiled is not marked.

    Backward lasts until the next optimizer steps, so clipping is part of it. An optimizer that gets
    a closure steps after the backward pass in it.
    """
    backward = torch.autograd.backward
    # These optimizers are in a step whose closure makes the gradients.
    in_closure: set[int] = set()

    def marked_backward(*arguments: Any, **keywords: Any) -> None:
        phases.enter("backward")
        backward(*arguments, **keywords)
        if in_closure:
            phases.enter("optimizer_step")

    def before_step(optimizer: Optimizer, arguments: Any, keywords: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        # The first argument is the optimizer itself.
        if any(callable(value) for value in (*arguments[1:], *keywords.values())):
            in_closure.add(id(optimizer))
        else:
            phases.enter("optimizer_step")

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            in_closure.discard(id(optimizer))

    with ExitStack() as undo:
        vars(torch.autograd).update(backward=marked_backward)
        undo.callback(vars(torch.autograd).update, backward=backward)
        hooks = StepHooks()
        undo.callback(hooks.remove)
        for optimizer in optimizers:
            hooks.add(optimizer, after_step, before_step)
        yield
