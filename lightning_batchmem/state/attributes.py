"""Attributes of the objects that a training program leads to, restored in place.

The objects themselves stay, because a hook or a closure may hold a reference to them. What is no
attribute of an instance is not restored: ``NOT_RESTORED`` in ``plan/sentences.py`` names it.
"""

from __future__ import annotations

import copyreg
import io
import logging
import math
import random
import socket
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from lightning_batchmem.devices.tensors import tensors_in

# A larger tensor or array that is neither parameter nor buffer is data rather than state, and is
# not copied.
LARGEST_ARRAY_BYTES = 64 * 2**20

# Attributes that lead to more objects than this contain data. The walk goes breadth first and ends
# there, after about a second.
MOST_OBJECTS = 200_000

# Objects of these types are data, or do not belong to the module. The caller of AttributeState
# adds classes of Lightning for the same reason.
_NOT_WALKED = (
    Dataset,
    DataLoader,
    np.memmap,
    logging.Logger,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
)

# An object with one of these as an attribute works with a thread, a file or another process.
_LIVE_RESOURCES = (
    io.IOBase,
    socket.socket,
    threading.Thread,
    type(threading.Lock()),
    type(threading.RLock()),
)

_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)

_CONTAINERS = (dict, list, deque, set, tuple, frozenset, bytearray)

# Paths and values of the objects to which an object leads.
Children = Iterator[tuple[str, Any]]


class AttributeState:
    """Contents of every mutable object to which attributes and items of ``roots`` lead.

    ``not_restorable`` names the objects that cannot be restored. ``schedulers`` and ``loaders`` are
    the schedulers of learning rates and the DataLoaders that were reached.

    Args:
        roots: modules, and objects that are walked whatever their type is.
        named: other objects with their names in messages.
        not_walked: types of objects that do not belong to the roots.
    """

    def __init__(
        self,
        roots: Iterable[object],
        named: Mapping[str, object] | None = None,
        not_walked: Iterable[type] = (),
    ) -> None:
        # Arrays are here too, as tensors over the same memory. The caller saves the bytes of all.
        self.tensors: list[Tensor] = []
        self.not_restorable: list[str] = []
        self._not_walked = (*_NOT_WALKED, *not_walked)
        self._restores: list[tuple[str, Callable[[], object]]] = []
        # The references keep the objects alive, so that no id is used twice.
        self._seen: dict[int, object] = {}
        self._left_out: set[int] = set()
        pending: deque[tuple[str, Any]] = deque()
        for root in roots:
            # All modules come first, so that neither weights nor structure depend on how far the
            # walk gets.
            modules = root.named_modules() if isinstance(root, Module) else [("", root)]
            for name, module in modules:
                pending += self._add_root(f"{type(root).__name__}.{name}".rstrip("."), module)
        for name, value in (named or {}).items():
            if isinstance(value, self._not_walked):
                self.not_restorable.append(f"{name} ({type(value).__name__})")
            # These tensors are state, whatever their size is.
            self._add_state_tensors(name, value)
            pending.append((name, value))
        while pending:
            path, value = pending.popleft()
            if isinstance(value, _ATOMS) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if len(self._seen) > MOST_OBJECTS:
                self.not_restorable.append(
                    f"{path} and deeper objects (more than {MOST_OBJECTS:,})"
                )
                break
            try:
                pending += self._add(path, value)
            # An attribute of a user's object may raise any exception.
            except Exception as error:  # noqa: BLE001
                self._left_out.add(id(value))
                self.not_restorable.append(f"{path} ({type(error).__name__})")
        reached = self._seen.values()
        self.schedulers = [value for value in reached if isinstance(value, LRScheduler)]
        self.loaders = [value for value in reached if isinstance(value, DataLoader)]

    @property
    def restored(self) -> dict[int, object]:
        """The objects whose contents are restored, by their ids."""
        return {
            key: value
            for key, value in self._seen.items()
            if key not in self._left_out and not isinstance(value, self._not_walked)
        }

    def restore(self) -> list[str]:
        """Restore all contents; returns the objects for which this failed."""
        failed = []
        for path, restore in self._restores:
            try:
                restore()
            # The other objects must still be restored, whatever exception this one raises.
            except Exception as error:  # noqa: BLE001
                failed.append(f"{path} ({type(error).__name__})")
        return failed

    def _add_root(self, path: str, root: Any) -> Children:
        self._seen[id(root)] = root
        # A parametrization replaces the class of a module, and the other attributes depend on it.
        self._later(path, _set_attribute, root, "__class__", type(root))
        yield from self._add_object(path, root)
        if isinstance(root, Optimizer):
            self._add_state_tensors(path, list(root.state.values()))
        if isinstance(root, Module):
            # The tensors of a ScriptModule are found only here, because no attribute leads to them.
            for tensor in (*root.parameters(recurse=False), *root.buffers(recurse=False)):
                self._seen[id(tensor)] = tensor
                self._add_tensor(path, tensor, math.inf)
            # The dicts of a plain module are those of parameters, buffers, submodules and hooks.
            for name in vars(Module()):
                table = vars(root).get(name)
                if isinstance(table, dict):
                    self._seen[id(table)] = table
                    yield from self._add_container(f"{path}.{name}", table)

    def _add_state_tensors(self, path: str, value: object) -> None:
        for tensor in tensors_in(value):
            if id(tensor) not in self._seen:
                self._seen[id(tensor)] = tensor
                self._add_tensor(path, tensor, math.inf)

    def _add(self, path: str, value: Any) -> Children:
        if isinstance(value, types.MethodType):
            yield f"{path}.__self__", value.__self__
        elif isinstance(value, partial):
            yield f"{path}.args", value.args
            yield f"{path}.keywords", value.keywords
        elif isinstance(value, self._not_walked):
            return
        elif isinstance(value, np.ndarray):
            yield from self._add_array(path, value)
        elif isinstance(value, random.Random):
            self._later(path, value.setstate, value.getstate())
        elif isinstance(value, torch.Generator | np.random.RandomState):
            self._later(path, value.set_state, value.get_state())
        elif isinstance(value, np.random.Generator):
            yield f"{path}.bit_generator", value.bit_generator
        elif isinstance(value, np.random.BitGenerator):
            self._later(path, setattr, value, "state", value.state)
        # An open file is an iterator too, and some have a __dict__.
        elif isinstance(value, io.IOBase) or (
            hasattr(type(value), "__next__") and not hasattr(value, "__dict__")
        ):
            self.not_restorable.append(f"{path} (an iterator, {type(value).__name__})")
        else:
            if isinstance(value, Tensor):
                self._add_tensor(path, value, LARGEST_ARRAY_BYTES)
            yield from self._add_container(path, value)
            yield from self._add_object(path, value)

    def _add_tensor(self, path: str, tensor: Tensor, largest_bytes: float) -> None:
        if tensor.device.type == "meta":
            return
        # A sparse or nested tensor has no storage of its own.
        if tensor.layout is not torch.strided or tensor.is_nested:
            self._later(path, torch.no_grad()(tensor.copy_), tensor.detach().clone())
            return
        size_bytes = tensor.untyped_storage().nbytes()
        if size_bytes <= largest_bytes:
            self.tensors.append(tensor)
        else:
            self.not_restorable.append(f"{path} (a tensor of {size_bytes:,} bytes)")

    def _add_array(self, path: str, array: Any) -> Children:
        if array.nbytes > LARGEST_ARRAY_BYTES:
            self.not_restorable.append(f"{path} (an array of {array.nbytes:,} bytes)")
            return
        if array.flags.writeable:
            try:
                self.tensors.append(torch.from_numpy(array))
            except (TypeError, ValueError):
                # torch cannot use the memory of objects, text, records or with negative strides.
                self._later(path, np.copyto, array, array.copy())
        if array.dtype.hasobject:
            yield from self._add_container(path, tuple(array.flat))

    def _add_container(self, path: str, value: Any) -> Children:
        if isinstance(value, bytearray):
            self._later(path, value.__setitem__, slice(None), bytes(value))
        elif isinstance(value, _CONTAINERS):
            contents: Any = dict(value) if isinstance(value, dict) else list(value)
            if hasattr(value, "clear"):
                self._later(path, refill, value, contents)
            entries = contents.items() if isinstance(value, dict) else enumerate(contents)
            yield from ((f"{path}[{_key_text(key)}]", item) for key, item in entries)

    def _add_object(self, path: str, value: Any) -> Children:
        attributes = getattr(value, "__dict__", {})
        contents = dict(attributes)
        # The class may define another __getstate__. With slots the state is a pair.
        state = object.__getstate__(value)
        slots = state[1] if isinstance(state, tuple) else {}
        entries = {**contents, **slots}
        if not isinstance(value, Module) and any(
            isinstance(item, _LIVE_RESOURCES) for item in entries.values()
        ):
            self._left_out.add(id(value))
            self.not_restorable.append(f"{path} (it holds a lock, a thread, a file or a socket)")
            return
        self._later(path, refill, attributes, contents)
        for name, item in slots.items():
            self._later(f"{path}.{name}", _set_attribute, value, name, item)
        # copyreg, which pickle uses too, names all slots; those without a value are not in a state.
        for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
            if not hasattr(value, name):
                self._later(f"{path}.{name}", _delete_slot, value, name)
        yield from ((f"{path}.{name}", item) for name, item in entries.items())

    def _later(self, path: str, restore: Callable[..., object], *arguments: Any) -> None:
        self._restores.append((path, partial(restore, *arguments)))


def _key_text(key: object) -> str:
    return repr(key)[:40] if isinstance(key, _ATOMS) else type(key).__name__


def _set_attribute(value: object, name: str, item: object) -> None:
    # A read-only slot has not changed, so it need not be set.
    if getattr(value, name, None) is not item:
        setattr(value, name, item)


def _delete_slot(value: object, name: str) -> None:
    if hasattr(value, name):
        # The class may be a frozen dataclass.
        object.__delattr__(value, name)


def refill(container: Any, contents: Any) -> None:
    """Give a list, deque, set or dict these contents again.

    The contents of a set are a list, in the order of the set.
    """
    # Unchanged containers are left alone, because another thread would see them empty for a moment.
    if _ids(container) != _ids(contents):
        container.clear()
        fill = container.extend if isinstance(container, list | deque) else container.update
        fill(contents)


def _ids(container: Any) -> list[int]:
    values = container.values() if isinstance(container, dict) else ()
    return [id(item) for item in (*container, *values)]
