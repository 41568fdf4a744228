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
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

LARGEST_ARRAY_BYTES = 64 * 2**20
"""A tensor or array above this that is neither parameter nor buffer is data rather than state, and is not copied."""

_MOST_OBJECTS = 1_000_000
"""Where more is reachable, the attributes hold data; the walk ends there."""

_NOT_THE_MODULES_OWN = (
    Trainer,
    Callback,
    Logger,
    LightningDataModule,
    Dataset,
    DataLoader,
    Optimizer,
    LRScheduler,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    np.memmap,
    logging.Logger,
)
"""Kept by other means, or not the module's to change."""

_LIVE_RESOURCES = (io.IOBase, socket.socket, threading.Thread, type(threading.Lock()), type(threading.RLock()))
"""An object that holds one of these is connected to the world outside; to set back its inside would break it."""

_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


class KeptAttributes:
    """The contents of every mutable object that is reachable from some modules.

    Args:
        roots: modules and data modules; each is walked even where its kind is passed over further down.

    Attributes:
        tensors: all strided tensors that were met, parameters and buffers among them; their bytes are for the caller to
            keep.
        passed_over: what was met and cannot be put back, for people.
    """

    def __init__(self, roots: Iterable[LightningModule | LightningDataModule]) -> None:
        self.tensors: list[Tensor] = []
        self.passed_over: list[str] = []
        self._restores: list[Callable[[], object]] = []
        self._seen: dict[int, object] = {}  # keeps the objects alive, so that no id is used twice
        own = {id(tensor) for root in roots if isinstance(root, LightningModule) for tensor in _registered(root)}
        pending: list[tuple[str, Any]] = []
        for root in roots:
            self._seen[id(root)] = root
            pending += self._keep_object(type(root).__name__, root)
        while pending:
            path, value = pending.pop()
            if isinstance(value, _ATOMS) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if len(self._seen) > _MOST_OBJECTS:
                self.passed_over.append(f"{path} and what comes after it (more than {_MOST_OBJECTS:,} objects)")
                break
            pending += self._keep(path, value, id(value) in own)

    def put_back(self) -> None:
        """Give every object its contents again."""
        for restore in self._restores:
            restore()

    def _keep(self, path: str, value: Any, registered: bool) -> Iterator[tuple[str, Any]]:
        if isinstance(value, _NOT_THE_MODULES_OWN):
            return
        if isinstance(value, Tensor):
            self._keep_tensor(path, value, registered)
        elif isinstance(value, np.ndarray):
            self._keep_array(path, value)
        elif isinstance(value, torch.Generator):
            self._restores.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._restores.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            self._restores.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        else:
            yield from self._keep_container(path, value)
            yield from self._keep_object(path, value)

    def _keep_tensor(self, path: str, tensor: Tensor, registered: bool) -> None:
        if tensor.device.type == "meta":
            return
        if not registered and tensor.numel() * tensor.element_size() > LARGEST_ARRAY_BYTES:
            self.passed_over.append(f"{path} (a tensor of {tensor.numel() * tensor.element_size():,} bytes)")
        elif tensor.layout is torch.strided:
            self.tensors.append(tensor)
        else:  # sparse: no storage of its own
            self._restores.append(partial(_copy_into, tensor, tensor.detach().clone()))

    def _keep_array(self, path: str, array: Any) -> None:
        if array.nbytes > LARGEST_ARRAY_BYTES:
            self.passed_over.append(f"{path} (an array of {array.nbytes:,} bytes)")
        elif array.flags.writeable:
            self._restores.append(partial(np.copyto, array, array.copy()))

    def _keep_container(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, list | deque | tuple | frozenset):
            items = list(value)
            if isinstance(value, list | deque):
                self._restores.append(partial(_refill, value, items, value.extend))
            yield from ((f"{path}[{index}]", item) for index, item in enumerate(items))
        elif isinstance(value, dict):
            entries = dict(value)
            self._restores.append(partial(_refill, value, entries, value.update))
            yield from ((f"{path}[{key!r}]", item) for key, item in entries.items())
        elif isinstance(value, set):
            members = set(value)
            self._restores.append(partial(_refill, value, members, value.update))

    def _keep_object(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict):
            return
        kept = dict(attributes)
        if any(isinstance(held, _LIVE_RESOURCES) for held in kept.values()) and not isinstance(value, torch.nn.Module):
            self.passed_over.append(f"{path} (it holds a lock, a thread, a file or a socket)")
            return
        self._restores.append(partial(_refill, attributes, kept, attributes.update))
        yield from ((f"{path}.{name}", item) for name, item in kept.items())


def _registered(module: LightningModule) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


@torch.no_grad()
def _copy_into(tensor: Tensor, kept: Tensor) -> None:
    tensor.copy_(kept)


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
