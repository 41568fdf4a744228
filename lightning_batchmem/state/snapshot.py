"""State of a training program: recorded before a search, and written back in place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from lightning_batchmem.devices.tensors import plain_tensors
from lightning_batchmem.state.attributes import AttributeState, refill
from lightning_batchmem.state.saved_storages import SavedStorages


def freeze(schedulers: Iterable[Any]) -> None:
    """Keep the learning rate in steps of a search."""
    for scheduler in schedulers:
        vars(scheduler)["step"] = lambda *_, **__: None


def unfreeze(schedulers: Iterable[Any]) -> None:
    """Undo :func:`freeze`: a checkpoint contains the attributes of a scheduler."""
    for scheduler in schedulers:
        vars(scheduler).pop("step", None)


class Snapshot:
    """What the steps of a search may change, recorded once and restored in place.

    These are the random states of the process, and parameters, buffers, gradients, flags, hooks and
    plain attributes of the objects below.

    Args:
        modules: the modules.
        others: other objects, whose contents are recorded whatever their type is.
        named: further objects with their names in messages.
        not_walked: types of objects that do not belong to the program.
    """

    def __init__(
        self,
        modules: Sequence[Module],
        others: Iterable[object] = (),
        named: Mapping[str, object] | None = None,
        not_walked: Iterable[type] = (),
    ) -> None:
        self._restore_random = record_random_states()
        for module in modules:
            for name, parameter in module.named_parameters():
                if is_lazy(parameter):
                    raise ValueError(
                        "every parameter must be initialized before the search, got the lazy"
                        f" parameter {name!r}; run one forward pass before, or in configure_model"
                    )
        self.attributes = AttributeState([*modules, *others], named, not_walked)
        tensors = self.attributes.tensors
        leaves = [tensor for tensor in tensors if tensor.is_leaf]
        self._leaves = [(leaf, leaf.detach(), leaf.requires_grad) for leaf in leaves]
        self._gradients = [
            (leaf, leaf.grad.detach().to("cpu", copy=True))
            for leaf in leaves
            if leaf.grad is not None
        ]
        # Hooks on tensors are in no dictionary of an object, so they are recorded here. Both names
        # are private in torch 2.5.1 to 2.14.
        names = ("_backward_hooks", "_post_accumulate_grad_hooks")
        self._hooks = [
            (leaf, name, dict(getattr(leaf, name) or {})) for leaf in leaves for name in names
        ]
        # Of a DTensor, the shard of this rank is saved.
        self._storages = SavedStorages(
            plain for t in tensors if not is_lazy(t) for plain in plain_tensors(t)
        )

    def restore(self) -> list[str]:
        """Restore everything; returns the objects for which this failed."""
        try:
            return self._restore()
        except KeyboardInterrupt:
            # A loop of the user, for example in a notebook, may go on after Ctrl-C.
            self._restore()
            raise

    def _restore(self) -> list[str]:
        try:
            failed = self.attributes.restore()
            for leaf, alias, requires_grad in self._leaves:
                if leaf.grad_fn is not None:
                    # A step wrote a value with its graph into this tensor.
                    leaf.detach_()
                if leaf.data_ptr() != alias.data_ptr() or leaf.shape != alias.shape:
                    leaf.data = alias
                leaf.requires_grad_(requires_grad)
                leaf.grad = None
            for leaf, name, recorded_hooks in self._hooks:
                hooks = getattr(leaf, name)
                if hooks is not None:
                    # The dictionary itself is filled again, because handles of the user refer to
                    # it.
                    refill(hooks, recorded_hooks)
            self._storages.write_back()
            for leaf, gradient in self._gradients:
                leaf.grad = gradient.to(leaf.device, copy=True)
        finally:
            self._restore_random()
        return failed


def record_random_states() -> Callable[[], None]:
    """Record the random states of this process; returns a function that restores them."""
    restores: list[Callable[[], object]] = [
        partial(random.setstate, random.getstate()),
        # NumPy's own annotations of both functions differ.
        partial(np.random.set_state, np.random.get_state()),
        partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    if torch.cuda.is_available():
        restores.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))

    def restore() -> None:
        for restore_one in restores:
            restore_one()

    return restore
