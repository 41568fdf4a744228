"""Keep what a module's attributes hold, and put it back in place.

Every mutable object that can be reached from a module is noted with its contents, and gets them back: the same list,
the same tensor, the same metric. Nothing is exchanged for a copy, so a hook or a closure that holds one never notices.
"""

from __future__ import annotations

import io
import logging
import random
import socket
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.nn import Module
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

LARGEST_ARRAY_BYTES = 64 * 2**20
"""A tensor or array above this that is neither parameter nor buffer is data rather than state, and is not copied."""

MOST_OBJECTS = 200_000
"""Where more is reachable, the attributes hold data; the walk, breadth first, ends there (it takes about a second)."""

_NOT_THE_MODULES_OWN = (
    Trainer,
    Callback,
    Logger,
    LightningDataModule,
    Dataset,
    DataLoader,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    np.memmap,
    logging.Logger,
)
"""Kept by other means, or not the module's to change."""

_LIVE_RESOURCES = (io.IOBase, socket.socket, threading.Thread, type(threading.Lock()), type(threading.RLock()))
"""An object that holds one of these is connected to the world outside; to set back its inside would break it."""

_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


class AttributeState:
    """The contents of every mutable object that can be reached from some others.

    Args:
        roots: modules, data modules, optimizers, schedulers; each is walked even where its kind is passed over deeper.

    Attributes:
        tensors: all strided tensors that were met, every parameter and buffer of the roots among them, and arrays as
            tensors over the same memory; their bytes are for the caller to keep.
        schedulers: the learning-rate schedulers that were met.
        not_restorable: what was met and cannot be put back, for people.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self.tensors: list[Tensor] = []
        self.schedulers: list[Any] = []
        self.not_restorable: list[str] = []
        self._restores: list[tuple[str, Callable[[], object]]] = []
        self._seen: dict[int, object] = {}  # keeps the objects alive, so that no id is used twice
        pending: deque[tuple[str, Any]] = deque()
        for root in roots:
            # all modules first, so that neither weights nor structure depend on how far the walk gets
            modules = root.named_modules() if isinstance(root, Module) else [("", root)]
            for name, module in modules:
                pending += self._keep_root(f"{type(root).__name__}.{name}".rstrip("."), module)
        while pending:
            path, value = pending.popleft()
            if isinstance(value, _ATOMS) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if len(self._seen) > MOST_OBJECTS:
                self.not_restorable.append(f"{path} and what lies as deep (more than {MOST_OBJECTS:,} objects)")
                break
            try:
                pending += self._keep(path, value)
            except Exception as error:  # noqa: BLE001 - a user's object may refuse to be looked at in any way it likes
                self.not_restorable.append(f"{path} ({type(error).__name__})")

    def restore(self) -> list[str]:
        """Give every object its contents again.

        Returns:
            What refused to take them, for people.
        """
        refused = []
        for path, restore in self._restores:
            try:
                restore()
            except Exception as error:  # noqa: BLE001 - one object that refuses must not keep the others from theirs
                refused.append(f"{path} ({type(error).__name__})")
        return refused

    def _keep_root(self, path: str, root: Any) -> Iterator[tuple[str, Any]]:
        self._seen[id(root)] = root
        if isinstance(root, Module):  # parametrizations exchange it, and without it the rest cannot be put back
            self._later(path, _set_class, root, type(root))
        found = list(self._keep_object(path, root))
        if isinstance(root, Module):
            for tensor in (*root.parameters(recurse=False), *root.buffers(recurse=False)):
                if id(tensor) not in self._seen:  # also those of a ScriptModule, which no attribute leads to
                    self._seen[id(tensor)] = tensor
                    self._keep_tensor(path, tensor, registered=True)
            tables = vars(Module())  # of parameters, buffers, submodules and hooks
            for name in [name for name, value in vars(root).items() if name in tables and isinstance(value, dict)]:
                table = vars(root)[name]
                self._seen[id(table)] = table
                found += self._keep_container(f"{path}.{name}", table)
        yield from found

    def _keep(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, types.MethodType):
            yield f"{path}.__self__", value.__self__
        elif isinstance(value, partial):
            yield f"{path}.args", value.args
            yield f"{path}.keywords", value.keywords
        elif isinstance(value, LRScheduler | ReduceLROnPlateau):
            self.schedulers.append(value)
            yield from self._keep_object(path, value)
        elif isinstance(value, _NOT_THE_MODULES_OWN):
            return
        elif isinstance(value, Tensor):
            self._keep_tensor(path, value, registered=False)
            yield from self._keep_object(path, value)
        elif isinstance(value, np.ndarray):
            yield from self._keep_array(path, value)
        elif isinstance(value, torch.Generator):
            self._later(path, value.set_state, value.get_state())
        elif isinstance(value, random.Random):
            self._later(path, value.setstate, value.getstate())
        elif isinstance(value, np.random.RandomState):
            self._later(path, value.set_state, value.get_state())
        elif isinstance(value, np.random.Generator):
            self._later(path, setattr, value.bit_generator, "state", value.bit_generator.state)
        else:
            yield from self._keep_container(path, value)
            yield from self._keep_object(path, value)

    def _keep_tensor(self, path: str, tensor: Tensor, *, registered: bool) -> None:
        if tensor.device.type == "meta":
            return
        if tensor.layout is not torch.strided or tensor.is_nested:  # no storage of its own
            self._later(path, _copy_into, tensor, tensor.detach().clone())
            return
        size_bytes = tensor.untyped_storage().nbytes()
        if registered or size_bytes <= LARGEST_ARRAY_BYTES:
            self.tensors.append(tensor)
        else:
            self.not_restorable.append(f"{path} (a tensor of {size_bytes:,} bytes)")

    def _keep_array(self, path: str, array: Any) -> Iterator[tuple[str, Any]]:
        if array.nbytes > LARGEST_ARRAY_BYTES:
            self.not_restorable.append(f"{path} (an array of {array.nbytes:,} bytes)")
        elif array.dtype.hasobject:
            self._later(path, np.copyto, array, array.copy())
            yield from ((f"{path}[{index}]", item) for index, item in enumerate(array.flat))
        elif array.flags.writeable:
            try:
                self.tensors.append(torch.from_numpy(array))
            except (TypeError, ValueError):  # text, records, negative strides
                self._later(path, np.copyto, array, array.copy())

    def _keep_container(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
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

    def _keep_object(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        attributes = getattr(value, "__dict__", None)
        kept = dict(attributes) if isinstance(attributes, dict) else {}
        names = [name for kind in type(value).__mro__ for name in _slot_names(kind)]
        slots = {name: getattr(value, name) for name in names if hasattr(value, name)}
        held = [*kept.items(), *slots.items()]
        if not isinstance(value, Module) and any(isinstance(item, _LIVE_RESOURCES) for _, item in held):
            self.not_restorable.append(f"{path} (it holds a lock, a thread, a file or a socket)")
            return
        if isinstance(attributes, dict):
            self._later(path, _refill, attributes, kept, attributes.update)
        for name, item in slots.items():
            self._later(f"{path}.{name}", _set_slot, value, name, item)
        yield from ((f"{path}.{name}", item) for name, item in held)

    def _later(self, path: str, restore: Callable[..., object], *arguments: Any) -> None:
        self._restores.append((path, partial(restore, *arguments)))


def _slot_names(kind: type) -> list[str]:
    if kind.__module__ == "builtins" or issubclass(kind, Tensor | np.ndarray):
        return []
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    hidden = f"_{kind.__name__.lstrip('_')}"  # of names with two leading underscores
    return [hidden + name if name.startswith("__") else name for name in names if not name.endswith("__")]


def _key_text(key: object) -> str:
    return repr(key)[:40] if isinstance(key, _ATOMS) else type(key).__name__


@torch.no_grad()
def _copy_into(tensor: Tensor, kept: Tensor) -> None:
    tensor.copy_(kept)


def _set_class(module: Module, kind: type) -> None:
    if type(module) is not kind:
        module.__class__ = kind


def _set_slot(value: object, name: str, item: object) -> None:
    if getattr(value, name, None) is not item:  # what cannot be changed need not be put back
        setattr(value, name, item)


def _refill(container: Any, contents: Any, fill: Callable[[Any], object]) -> None:
    # what is unchanged is left alone: nobody else in the process then sees it empty for a moment
    if len(container) == len(contents) and _same(container, contents):
        return
    container.clear()
    fill(contents)


def _same(container: Any, contents: Any) -> bool:
    if isinstance(contents, dict):
        pairs = zip(container.items(), contents.items(), strict=True)
        return all(key is other and item is kept for (key, item), (other, kept) in pairs)
    if isinstance(contents, set):
        return bool(container == contents)
    return all(one is other for one, other in zip(container, contents, strict=True))
