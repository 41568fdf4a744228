"""The gradients of a micro batch whose backward pass failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

# A parameter, its gradient, and a number that changes when backward adds to the gradient.
_Reading = tuple[Tensor, Tensor | None, int | None]


def read_gradients(optimizer: Optimizer) -> list[_Reading]:
    """Read what :class:`Gradients` compares after an error."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(parameter, parameter.grad, _version(parameter.grad)) for parameter in parameters]


class Gradients:
    """Gradients of earlier micro batches, which stay exact while a batch is repeated in parts.

    A backward pass that fails has added the gradients of some parameters. These have the whole
    batch, so what the parts compute for them is dropped. This is exact only if one backward pass
    adds to each of them once, which the parts show.

    Args:
        before: the gradients before the step; none if the step clears them.
    """

    def __init__(self, before: list[_Reading]) -> None:
        self._kept: list[tuple[Tensor, Tensor | None, bool]] = []
        for parameter, gradient, version in before:
            is_same = parameter.grad is gradient and _version(parameter.grad) == version
            self._kept.append((parameter, parameter.grad, not is_same))
        # Whether the failed attempt may have added only a part of a gradient.
        self.may_be_partial = False

    def begin(self) -> None:
        """Let the parts begin without gradients."""
        for parameter, _, _ in self._kept:
            parameter.grad = None

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count how often the backward pass of a part adds to what the failed attempt changed."""
        added: set[int] = set()

        def note(parameter: Tensor) -> None:
            if id(parameter) in added:
                self.may_be_partial = True
            added.add(id(parameter))

        handles = [
            # torch does not annotate this method.
            parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
            for parameter, _, is_complete in self._kept
            if is_complete and parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def complete(self) -> None:
        """Add the gradients of the parts to those that were kept."""
        for parameter, kept, is_complete in self._kept:
            if kept is None:
                continue
            if parameter.grad is not None and not is_complete:
                kept.add_(parameter.grad)
            parameter.grad = kept


def _version(gradient: Tensor | None) -> int | None:
    # _version is private in torch 2.5 to 2.14.
    return None if gradient is None else gradient._version
