"""The gradients of a micro batch whose backward pass failed."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer


class Gradients:
    """Gradients of earlier micro batches, which stay exact while a batch is repeated in parts.

    A backward pass that fails has added the gradients of some parameters. These have the whole
    batch, so what the parts compute for them is dropped.

    Args:
        optimizer: the optimizer of the parameters.
        are_cleared: whether this micro batch clears the gradients, so that nothing has to stay.
    """

    def __init__(self, optimizer: Optimizer, *, are_cleared: bool) -> None:
        self._parameters: list[Tensor] = []
        if not are_cleared:
            self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._before = [(p.grad, _version(p.grad)) for p in self._parameters]
        self._kept: list[tuple[Tensor, Tensor | None, bool]] = []

    def keep(self) -> None:
        """Keep the gradients as they are now, at the start of the step or after its failure."""
        for parameter, (before, version) in zip(self._parameters, self._before, strict=True):
            gradient = parameter.grad
            is_complete = gradient is not before or _version(gradient) != version
            self._kept.append((parameter, gradient, is_complete))

    def begin(self) -> None:
        """Let the parts begin without gradients."""
        for parameter, _, _ in self._kept:
            parameter.grad = None

    def complete(self) -> None:
        """Add the gradients of the parts to those that were kept."""
        for parameter, kept, is_complete in self._kept:
            if kept is None:
                continue
            if parameter.grad is not None and not is_complete:
                kept.add_(parameter.grad)
            parameter.grad = kept


def _version(gradient: Tensor | None) -> int | None:
    """A number that changes when a backward pass adds to the gradient."""
    # _version is private in torch 2.5 to 2.13.
    return None if gradient is None else gradient._version
