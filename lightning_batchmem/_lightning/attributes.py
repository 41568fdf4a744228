"""Contents of the objects that a module leads to, restored in place.

The objects themselves stay, because a hook or a closure may hold a reference to them.
"""

from __future__ import annotations

import io
import logging
import random
import socket
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from lightning_batchmem._lightning.packages import in_every_package

# A larger tensor or array that is neither parameter nor buffer is data rather than state, and is
# not copied.
LARGEST_ARRAY_BYTES = 64 * 2**20

# Attributes that lead to more objects than this contain data. The walk goes breadth first and ends
# there, after about a second.
MOST_OBJECTS = 200_000

# Objects of these types do not belong to the module, or are restored elsewhere. AttributeState adds
# classes of Lightning for the same reason.
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

_LIBRARIES = {"torch", "lightning", "pytorch_lightning", "torchmetrics"} | sys.stdlib_module_names

Found = Iterator[tuple[str, Any]]


class AttributeState:
    """Contents of every mutable object that can be reached from ``roots``.

    ``not_restorable`` names the objects that cannot be restored.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        # Arrays are here too, as tensors over the same memory. The caller saves the bytes of all.
        self.tensors: list[Tensor] = []
        self.schedulers: list[Any] = []
        self.not_restorable: list[str] = []
        lightning = (
            "trainer.Trainer",
            "callbacks.Callback",
            "loggers.Logger",
            "core.LightningDataModule",
        )
        self._not_walked = (*_NOT_WALKED, *in_every_package(*lightning))
        self._restores: list[tuple[str, Callable[[], object]]] = []
        # The references keep the objects alive, so that no id is used twice.
        self._seen: dict[int, object] = {}
        pending: deque[tuple[str, Any]] = deque()
        for root in roots:
            # All modules come first, so that neither weights nor structure depend on how far the
            # walk gets.
            modules = root.named_modules() if isinstance(root, Module) else [("", root)]
            for name, module in modules:
                pending += self._add_root(f"{type(root).__name__}.{name}".rstrip("."), module)
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
                self.not_restorable.append(f"{path} ({type(error).__name__})")

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

    def _add_root(self, path: str, root: Any) -> Found:
        self._seen[id(root)] = root
        # A parametrization replaces the class of a module, and the other attributes depend on it.
        if isinstance(root, Module):
            self._later(path, _set_attribute, root, "__class__", type(root))
        yield from self._add_object(path, root)
        yield from _class_containers(root)
        if isinstance(root, Module):
            # The tensors of a ScriptModule are found only here, because no attribute leads to them.
            for tensor in (*root.parameters(recurse=False), *root.buffers(recurse=False)):
                if id(tensor) not in self._seen:
                    self._seen[id(tensor)] = tensor
                    self._add_tensor(path, tensor, registered=True)
            # The dicts of a plain module are those of parameters, buffers, submodules and hooks.
            tables = vars(Module())
            for name, table in list(vars(root).items()):
                if name in tables and isinstance(table, dict):
                    self._seen[id(table)] = table
                    yield from self._add_container(f"{path}.{name}", table)

    def _add(self, path: str, value: Any) -> Found:
        if isinstance(value, types.MethodType):
            yield f"{path}.__self__", value.__self__
        elif isinstance(value, partial):
            yield f"{path}.args", value.args
            yield f"{path}.keywords", value.keywords
        elif isinstance(value, LRScheduler | ReduceLROnPlateau):
            self.schedulers.append(value)
            yield from self._add_object(path, value)
        elif isinstance(value, Dataset):
            yield from _class_containers(value)
        elif isinstance(value, self._not_walked):
            return
        elif isinstance(value, Tensor):
            self._add_tensor(path, value, registered=False)
            yield from self._add_object(path, value)
        elif isinstance(value, np.ndarray):
            yield from self._add_array(path, value)
        elif isinstance(value, random.Random):
            self._later(path, value.setstate, value.getstate())
        elif isinstance(value, torch.Generator | np.random.RandomState):
            self._later(path, value.set_state, value.get_state())
        elif isinstance(value, np.random.Generator):
            self._later(path, setattr, value.bit_generator, "state", value.bit_generator.state)
        elif hasattr(type(value), "__next__") and not hasattr(value, "__dict__"):
            self.not_restorable.append(f"{path} (an iterator, {type(value).__name__})")
        else:
            yield from self._add_container(path, value)
            yield from self._add_object(path, value)

    def _add_tensor(self, path: str, tensor: Tensor, *, registered: bool) -> None:
        if tensor.device.type == "meta":
            return
        # A sparse or nested tensor has no storage of its own.
        if tensor.layout is not torch.strided or tensor.is_nested:
            self._later(path, torch.no_grad()(tensor.copy_), tensor.detach().clone())
            return
        size_bytes = tensor.untyped_storage().nbytes()
        if registered or size_bytes <= LARGEST_ARRAY_BYTES:
            self.tensors.append(tensor)
        else:
            self.not_restorable.append(f"{path} (a tensor of {size_bytes:,} bytes)")

    def _add_array(self, path: str, array: Any) -> Found:
        if array.nbytes > LARGEST_ARRAY_BYTES:
            self.not_restorable.append(f"{path} (an array of {array.nbytes:,} bytes)")
        elif array.dtype.hasobject:
            self._later(path, np.copyto, array, array.copy())
            yield from ((f"{path}[{index}]", item) for index, item in enumerate(array.flat))
        elif array.flags.writeable:
            try:
                self.tensors.append(torch.from_numpy(array))
            except (TypeError, ValueError):
                # torch cannot use the memory of text, of records or with negative strides.
                self._later(path, np.copyto, array, array.copy())

    def _add_container(self, path: str, value: Any) -> Found:
        if isinstance(value, list | deque | tuple | frozenset):
            items = list(value)
            if isinstance(value, list | deque):
                self._later(path, _refill, value, items, value.extend)
            yield from ((f"{path}[{index}]", item) for index, item in enumerate(items))
        elif isinstance(value, dict):
            entries = dict(value)
            self._later(path, _refill, value, entries, value.update)
            yield from ((f"{path}[{_key_text(key)}]", item) for key, item in entries.items())
        elif isinstance(value, set):
            self._later(path, _refill, value, set(value), value.update)
        elif isinstance(value, bytearray):
            self._later(path, value.__setitem__, slice(None), bytes(value))

    def _add_object(self, path: str, value: Any) -> Found:
        attributes = getattr(value, "__dict__", None)
        kept = dict(attributes) if isinstance(attributes, dict) else {}
        # The class may define another __getstate__. With slots the state is a pair.
        state = object.__getstate__(value)
        slots = state[1] if isinstance(state, tuple) else {}
        held = [*kept.items(), *slots.items()]
        if not isinstance(value, Module) and any(
            isinstance(item, _LIVE_RESOURCES) for _, item in held
        ):
            self.not_restorable.append(f"{path} (it holds a lock, a thread, a file or a socket)")
            return
        if isinstance(attributes, dict):
            self._later(path, _refill, attributes, kept, attributes.update)
        for name, item in slots.items():
            self._later(f"{path}.{name}", _set_attribute, value, name, item)
        yield from ((f"{path}.{name}", item) for name, item in held)

    def _later(self, path: str, restore: Callable[..., object], *arguments: Any) -> None:
        self._restores.append((path, partial(restore, *arguments)))


def _class_containers(value: object) -> Found:
    """Mutable containers that are attributes of the user's classes."""
    for kind in type(value).__mro__:
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            for name, item in vars(kind).items():
                is_container = isinstance(item, list | dict | set | deque | bytearray)
                if is_container and not name.startswith("__"):
                    yield f"{kind.__name__}.{name}", item


def _key_text(key: object) -> str:
    return repr(key)[:40] if isinstance(key, _ATOMS) else type(key).__name__


def _set_attribute(value: object, name: str, item: object) -> None:
    # A read-only slot has not changed, so it need not be set.
    if getattr(value, name, None) is not item:
        setattr(value, name, item)


def _refill(container: Any, contents: Any, fill: Callable[[Any], object]) -> None:
    # Unchanged containers are left alone, because another thread would see them empty for a moment.
    if _ids(container) != _ids(contents):
        container.clear()
        fill(contents)


def _ids(container: Any) -> list[int]:
    if isinstance(container, dict):
        return [id(part) for entry in container.items() for part in entry]
    ids = [id(item) for item in container]
    return sorted(ids) if isinstance(container, set) else ids
