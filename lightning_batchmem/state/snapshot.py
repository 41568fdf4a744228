"""State of a training program: recorded before a search, and written back in place."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

# The table is private in torch 2.5.1 to 2.14.
from torch.distributed._composable_state import _module_state_mapping
from torch.nn import Module
from torch.nn.parameter import is_lazy

from lightning_batchmem.devices.foreign_values import attributes_of
from lightning_batchmem.state.attributes import AttributeState
from lightning_batchmem.state.contents import OF_DATA, OF_PARTS, OF_PROJECT
from lightning_batchmem.state.saved_storages import SavedStorages


def freeze(schedulers: Iterable[Any]) -> None:
    """Keep the learning rate in steps of a search."""
    for scheduler in schedulers:
        # One with slots only cannot be kept from stepping, and its slots are restored.
        attributes_of(scheduler)["step"] = lambda *_, **__: None


def unfreeze(schedulers: Iterable[Any]) -> None:
    """Undo :func:`freeze`: a checkpoint contains the attributes of a scheduler."""
    for scheduler in schedulers:
        attributes_of(scheduler).pop("step", None)


class Restored:
    """Contents of objects and the bytes of their tensors, recorded once and restored in place.

    Args:
        states: walks over the objects.

    Attributes:
        states: the same.
    """

    _keeps_tensors = True

    def __init__(self, *states: AttributeState) -> None:
        self.states = states
        self._tensors = [
            saved for state in states for saved in state.tensors if self._keeps_tensors
        ]
        self._storages = SavedStorages(flat for saved in self._tensors for flat in saved.flats)

    @property
    def not_restorable(self) -> list[str]:
        """Names of the objects that cannot be restored."""
        return [name for state in self.states for name in state.not_restorable]

    def __enter__(self) -> Restored:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> list[str]:
        """Restore everything; returns the objects for which this failed."""
        try:
            return self._restore()
        except KeyboardInterrupt:
            # A loop of the user, for example in a notebook, may go on after Ctrl-C.
            self._restore()
            raise

    def _restore(self) -> list[str]:
        failed = [name for state in self.states for name in state.restore()]
        for saved in self._tensors:
            saved.restore_place()
        self._storages.write_back()
        for saved in self._tensors:
            saved.restore_gradient()
        return failed


def restored_parts(
    named: Iterable[tuple[str, object]], left_out: Iterable[object] = ()
) -> Restored:
    """A record of parts of a training that may have data inside, which are left alone.

    Args:
        named: the parts with their names in messages.
        left_out: objects that do not belong to them.
    """
    return Restored(AttributeState([], named, left_out, OF_PARTS))


class ShardedModules:
    """The table in which torch keeps the state of modules that ``fully_shard`` has sharded.

    The entry of a module is not an attribute of it. A module that has an entry cannot be sharded.
    """

    def __init__(self) -> None:
        self._entries = dict(_module_state_mapping)

    def restore(self, restored: Container[int]) -> None:
        """Restore the entries of modules with these ids; the others are not part of a search."""
        for module in list(_module_state_mapping):
            if id(module) in restored and module not in self._entries:
                del _module_state_mapping[module]
        for module, entry in self._entries.items():
            if id(module) in restored:
                _module_state_mapping[module] = entry


class Snapshot(Restored):
    """What the steps of a search may change, recorded once and restored in place.

    These are the random states of the process, and parameters, buffers, gradients, flags, hooks and
    plain attributes of the objects below, also in the loaders and data sets that they lead to.

    Args:
        modules: the modules.
        others: other objects, whose contents are recorded whatever their type is.
        named: further objects with their names in messages.
        not_walked: objects that do not belong to the program.
        loaders: loaders that no attribute leads to.
    """

    def __init__(
        self,
        modules: Sequence[Module],
        others: Iterable[object] = (),
        named: Mapping[str, object] | None = None,
        not_walked: Iterable[object] = (),
        loaders: Sequence[object] = (),
    ) -> None:
        self._restore_random = record_random_states()
        self._sharded = ShardedModules()
        for module in modules:
            for name, parameter in module.named_parameters():
                if self._keeps_tensors and is_lazy(parameter):
                    raise ValueError(
                        "every parameter must be initialized before the search, got the lazy"
                        f" parameter {name!r}; run one forward pass before, or in configure_model"
                    )
        self.attributes = AttributeState(
            [*modules, *others], [*(named or {}).items()], not_walked, OF_PROJECT
        )
        data = [*self.attributes.data, *(("a loader", loader) for loader in loaders)]
        super().__init__(self.attributes, AttributeState([], data, self.attributes.walked, OF_DATA))

    def _restore(self) -> list[str]:
        try:
            failed = super()._restore()
            self._sharded.restore(self.attributes.restored)
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
