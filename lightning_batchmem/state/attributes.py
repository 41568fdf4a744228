"""Attributes of the objects that a training program leads to, restored in place.

The objects themselves stay, because a hook or a closure may hold a reference to them. Only
attributes of instances are restored: ``docs/limits.md`` names the rest.
"""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lightning_batchmem.devices.tensors import plain_tensors, tensors_in
from lightning_batchmem.state.contents import (
    ATOMS,
    CONTAINERS,
    DATA,
    LARGEST_COPIED_BYTES,
    LIVE_RESOURCES,
    METHODS,
    NOT_WALKED,
    OF_PROJECT,
    WalkLimits,
    contents_of,
    defines,
    key_text,
    refill,
    restore_object,
    restore_of,
    set_slot,
)
from lightning_batchmem.state.saved_storages import SavedTensor

_LONGEST_TEXT = 200


@dataclass(slots=True)
class Path:
    """The way to an object. Its text is not kept, since all texts of a long chain are long."""

    parent: Path | None
    name: str

    def __str__(self) -> str:
        names: list[str] = []
        path: Path | None = self
        while path is not None:
            names.append(path.name)
            path = path.parent
        text = "".join(reversed(names))
        half = _LONGEST_TEXT // 2
        return text if len(text) <= _LONGEST_TEXT else f"{text[:half]}...{text[-half:]}"


# Names and values of the objects to which an object leads.
Children = Iterator[tuple[str, Any]]


class AttributeState:
    """Contents of every mutable object to which attributes and items of ``roots`` lead.

    ``not_restorable`` names the objects that cannot be restored. The walk also lists the
    ``schedulers`` of learning rates, the DataLoaders (``loaders``), and ``data``: loaders and data
    sets with their names. Data are walked only if they are among ``named``, with limits of their
    own.

    Args:
        roots: modules, and objects that are walked whatever their type is.
        named: other objects with their names in messages.
        not_walked: objects that do not belong to the roots.
        limits: what is left out.
    """

    def __init__(
        self,
        roots: Iterable[object],
        named: Iterable[tuple[str, object]] = (),
        not_walked: Iterable[object] = (),
        limits: WalkLimits = OF_PROJECT,
    ) -> None:
        # The caller saves their bytes.
        self.tensors: list[SavedTensor] = []
        self.not_restorable: list[str] = []
        self.schedulers: list[LRScheduler] = []
        self.loaders: list[DataLoader[Any]] = []
        self.data: list[tuple[str, object]] = []
        self._limits = limits
        self._array_bytes = 0
        self._restores: list[tuple[Path, Callable[[], object]]] = []
        # The references keep the objects alive, so that no id is used twice.
        self._seen = {id(value): value for value in not_walked}
        self._left_out = set(self._seen)
        self._most_objects = len(self._seen) + limits.most_objects
        self._pending: deque[tuple[Path, Any]] = deque()
        self._walk(roots, named)

    @property
    def walked(self) -> list[object]:
        """The objects that were reached, apart from data."""
        data = {id(value) for _, value in self.data}
        return [value for key, value in self._seen.items() if key not in data]

    @property
    def restored(self) -> dict[int, object]:
        """The objects whose contents are restored, by their ids."""
        return {key: value for key, value in self._seen.items() if key not in self._left_out}

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

    def _walk(self, roots: Iterable[object], named: Iterable[tuple[str, object]]) -> None:
        for root in roots:
            # All modules come first, so that neither weights nor structure depend on how far the
            # walk gets.
            modules = root.named_modules() if isinstance(root, Module) else [("", root)]
            for name, module in modules:
                path = Path(None, f"{type(root).__name__}.{name}".rstrip("."))
                self._visit(self._add_root, path, module)
        for name, value in named:
            self._visit(self._add_named, Path(None, name), value)
        while self._pending:
            path, value = self._pending.popleft()
            if id(value) in self._seen:
                continue
            if len(self._seen) >= self._most_objects:
                most = f"more than {self._limits.most_objects:,}"
                self._report_data(Path(path, " and deeper objects"), most)
                break
            self._seen[id(value)] = value
            self._visit(self._add, path, value)

    def _visit(self, add: Callable[[Path, Any], Children], path: Path, value: Any) -> None:
        """Record an object, and put the objects to which it leads into the queue."""
        try:
            for name, child in add(path, value):
                if not issubclass(type(child), ATOMS):
                    self._pending.append((Path(path, name), child))
        # A question to a user's object may raise any exception.
        except Exception as error:  # noqa: BLE001
            self._left_out.add(id(value))
            self._report(path, type(error).__name__)

    def _report(self, path: Path, why: str) -> None:
        self.not_restorable.append(f"{path} ({why})")

    def _report_data(self, path: Path, why: str) -> None:
        if self._limits.names_data:
            self._report(path, why)

    def _add_root(self, path: Path, root: Any) -> Children:
        self._seen[id(root)] = root
        yield from self._add_object(path, root)
        if isinstance(root, Optimizer):
            yield from self._add_state_tensors(path, list(root.state.values()))
        if isinstance(root, Module):
            # The tensors of a ScriptModule are found only here, because no attribute leads to them.
            tensors = [
                *root.named_parameters(recurse=False),
                *root.named_buffers(recurse=False),
            ]
            for name, tensor in tensors:
                for suffix, value in self._add_state_tensors(path, tensor):
                    yield f".{name}{suffix}", value
            # The tables of a plain module are those of parameters, buffers, submodules and hooks.
            for name in vars(Module()):
                table = vars(root).get(name)
                if isinstance(table, dict):
                    self._seen[id(table)] = table
                    for suffix, value in self._add_container(Path(path, f".{name}"), table):
                        yield f".{name}{suffix}", value

    def _add_named(self, path: Path, value: Any) -> Children:
        if id(value) in self._left_out or isinstance(value, (*NOT_WALKED, *DATA)):
            # Of data, only the small parts are restored.
            self._report_data(path, type(value).__name__)
        elif self._limits.names_data:
            yield from self._add_state_tensors(path, value)
        yield "", value

    def _add_state_tensors(self, path: Path, value: object) -> Children:
        """Record tensors that are state whatever their size is."""
        for tensor in tensors_in(value):
            if id(tensor) not in self._seen:
                self._seen[id(tensor)] = tensor
                self._add_tensor(path, tensor, math.inf)
                yield from self._add_object(path, tensor)
                # An average of a parameter, in an attribute of it, is as large as the parameter.
                yield from self._add_state_tensors(
                    path, list(getattr(tensor, "__dict__", {}).values())
                )

    def _add(self, path: Path, value: Any) -> Children:
        if isinstance(value, LRScheduler):
            self.schedulers.append(value)
        # Most objects of data are containers of Python's own, which have nothing else.
        if type(value) in CONTAINERS:
            yield from self._add_container(path, value)
        elif isinstance(value, METHODS):
            yield ".__self__", value.__self__
        elif isinstance(value, partial):
            yield ".func", value.func
            yield ".args", value.args
            yield ".keywords", value.keywords
        elif isinstance(value, NOT_WALKED):
            self._left_out.add(id(value))
        elif isinstance(value, DATA) and self._limits.names_data:
            self._left_out.add(id(value))
            self.data.append((str(path), value))
            if isinstance(value, DataLoader):
                self.loaders.append(value)
        elif isinstance(value, np.ndarray):
            yield from self._add_array(path, value)
        else:
            restore = restore_of(value)
            # Some files have a __dict__, and each of them is an iterator.
            is_iterator = defines(value, "__next__") and (
                isinstance(value, io.IOBase) or not hasattr(value, "__dict__")
            )
            is_live = isinstance(value, LIVE_RESOURCES)
            if is_live or (is_iterator and not restore):
                self._left_out.add(id(value))
                report = self._report_data if is_live else self._report
                report(path, type(value).__name__)
                return
            if restore:
                self._record(path, restore)
            if isinstance(value, Tensor):
                self._add_tensor(path, value, LARGEST_COPIED_BYTES)
            # A loader makes another one in each epoch. The name is private in torch 2.5.1 to 2.14.
            if isinstance(value, DataLoader):
                self._seen[id(value._iterator)] = value._iterator
            yield from self._add_container(path, value)
            is_whole = isinstance(value, Module)
            yield from self._add_object(path, value, () if is_whole else self._limits.left_with)

    def _add_tensor(self, path: Path, tensor: Tensor, largest_bytes: float) -> None:
        # A sparse or nested tensor has no storage of its own.
        if tensor.layout is not torch.strided or tensor.is_nested:
            if tensor.device.type != "meta":
                self._record(path, torch.no_grad()(tensor.copy_), tensor.detach().clone())
            return
        storage = tensor.untyped_storage()
        # The storage of a fake tensor, which has no values either, is there too.
        if storage.device.type == "meta":
            return
        # A view of a parameter adds no bytes. FSDP1 leaves such views in the modules.
        if self._has_room(storage.nbytes(), largest_bytes) or self._is_saved(tensor):
            self.tensors.append(SavedTensor(tensor))
        else:
            self._report_data(path, f"a tensor of {storage.nbytes():,} bytes")

    def _is_saved(self, tensor: Tensor) -> bool:
        saved = {flat.data_ptr() for one in self.tensors for flat in one.flats}
        parts = plain_tensors(tensor)
        return all(part.untyped_storage().data_ptr() in saved for part in parts)

    def _add_array(self, path: Path, array: Any) -> Children:
        if not self._has_room(array.nbytes):
            self._report_data(path, f"an array of {array.nbytes:,} bytes")
            return
        if array.flags.writeable:
            self._record(path, np.copyto, array, array.copy())
        # A masked array has its mask there.
        yield from self._add_object(path, array)

    def _has_room(self, size_bytes: int, largest_bytes: float = LARGEST_COPIED_BYTES) -> bool:
        if size_bytes > largest_bytes or self._array_bytes + size_bytes > self._limits.most_bytes:
            return False
        self._array_bytes += size_bytes
        return True

    def _add_container(self, path: Path, value: Any) -> Children:
        if not isinstance(value, CONTAINERS) or len(value) > self._limits.most_items:
            return
        contents = contents_of(value)
        if hasattr(value, "clear"):
            self._record(path, refill, value, contents)
        if len(contents) > self._limits.most_entered:
            return
        if isinstance(contents, dict):
            # Every object of a user's class can be a key.
            yield from ((f"[key {key_text(key)}]", key) for key in contents)
            yield from ((f"[{key_text(key)}]", item) for key, item in contents.items())
        else:
            yield from ((f"[{index}]", item) for index, item in enumerate(contents))

    def _add_object(self, path: Path, value: Any, left_with: tuple[type, ...] = ()) -> Children:
        attributes = getattr(value, "__dict__", {})
        contents = dict(attributes)
        # The class may define another __getstate__. With slots the state is a pair.
        state = object.__getstate__(value)
        slots = state[1] if isinstance(state, tuple) else {}
        # What a DTensor keeps in its slots are its shard and the mesh.
        if defines(value, "__tensor_flatten__"):
            slots = {}
        entries = {**contents, **slots}
        if any(issubclass(type(item), left_with) for item in entries.values()):
            self._left_out.add(id(value))
            self._report(path, "it holds a lock, a thread, a file or a socket")
            return
        self._record(path, restore_object, value, type(value), attributes, contents)
        for name, item in slots.items():
            self._record(Path(path, f".{name}"), set_slot, value, name, item)
        yield from ((f".{name}", item) for name, item in entries.items())

    def _record(self, path: Path, restore: Callable[..., object], *arguments: Any) -> None:
        self._restores.append((path, partial(restore, *arguments)))
