"""Callbacks, loggers and profilers that steps of a search may read, and that do nothing."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from types import MemberDescriptorType
from typing import Any

import numpy as np
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_batchmem.batches.copies import LARGEST_COPIED_BYTES
from lightning_batchmem.batches.loaders import RANDOM_GENERATORS
from lightning_batchmem.devices.foreign_values import attributes_of, value_or_none

# Steps may change objects of these types in place.
_STATE = (Tensor, np.ndarray, *RANDOM_GENERATORS)

# A class that Python code has defined; PyType_GetFlags in the documentation of CPython's C API.
_HEAP_TYPE = 1 << 9

_READ_FROM_EXPERIMENTS = (str, bytes, int, float, Path, list, tuple, set, dict)


def muted_callback(callback: Callback) -> Any:
    """A callback that reads like ``callback``, and whose hooks do nothing."""
    hooks = [name for name in dir(Callback) if name.startswith(("on_", "setup", "teardown"))]
    # Lightning reads it at every hook, and a step should not take longer than in training.
    key = value_or_none("The state_key of a callback", getattr, callback, "state_key")
    # A progress bar has the last three.
    silent = [*hooks, "load_state_dict", "print", "enable", "disable"]
    return _muted(muted_callback, callback, silent, state_key=key)


def muted_logger(logger: Logger) -> Any:
    """A logger that reads like ``logger``, and whose methods do nothing."""
    kind = type(logger)
    methods = [
        name
        for name in dir(kind)
        # A descriptor of the class may raise any error.
        if name[0] != "_" and callable(value_or_none("A class of the project", getattr, kind, name))
    ]
    experiment = cached_property(_muted_experiment)
    return _muted(muted_logger, logger, methods, experiment=experiment)


def muted_profiler(profiler: Profiler) -> Any:
    """A profiler that reads like ``profiler``, and records nothing."""
    methods = [name for name in dir(Profiler) if name[0] != "_"]
    # Lightning calls it at every hook.
    return _muted(muted_profiler, profiler, methods, profile=PassThroughProfiler().profile)


def _muted(
    mute: Callable[[Any], Any], owner: object, silent: Iterable[str], **instead: object
) -> Any:
    """An object of a subclass that reads like ``owner``, which does not change.

    Its methods are those that the owner has, but they read and change copies of the owner's
    containers, tensors and random generators.

    Args:
        mute: the function that makes it.
        owner: the object.
        silent: names of methods that do nothing.
        **instead: attributes of the subclass, instead of those that the owner has.
    """
    kind = type(owner)
    if issubclass(kind, Muted):
        return owner
    slots = [
        name
        for base in kind.__mro__
        for name, value in vars(base).items()
        if isinstance(value, MemberDescriptorType)
    ]
    namespace: dict[str, Any] = {
        # Most attributes are not read, so they are not copied: averaged weights for example.
        **{
            name: cached_property(partial(_copy_of, name))
            for name in (*slots, *attributes_of(owner))
        },
        **dict.fromkeys(silent, _nothing),
        **instead,
        # This class cannot be found by its name. A copy is made of the owner.
        "__reduce_ex__": lambda *_: (mute, (owner,)),
    }
    # A metaclass of the project may register what it makes, and so may its own __new__.
    muted_kind = type.__new__(type(kind), kind.__name__, (Muted, kind), namespace)
    built_in: Any = next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)
    muted = built_in.__new__(muted_kind)
    object.__setattr__(muted, "_muted_owner", owner)
    return muted


def _copy_of(name: str, muted: Any) -> Any:
    return _copied_tree(object.__getattribute__(muted._muted_owner, name))


class Muted:
    """The first base of the class of a muted object, before the class of its owner."""

    __slots__ = ()

    def __init_subclass__(cls, **_: Any) -> None:
        """Keep the class out of the registries of the project."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the owner: a step may compare it."""
        return self._muted_owner.__class__

    # The project may count what is read, or refuse what is set.
    __getattribute__ = object.__getattribute__
    __setattr__ = object.__setattr__

    def __getattr__(self, name: str) -> Any:
        """What the owner makes when it is read, as a mock does."""
        # ``copy.copy`` looks for special methods before the copy has an owner.
        if name.startswith("__") or name == "_muted_owner":
            raise AttributeError(name)
        # A property that fails on the copy would run on the owner.
        if any(name in vars(base) for base in type(self._muted_owner).__mro__):
            raise AttributeError(name)
        return _readable(getattr(self._muted_owner, name))

    def __del__(self) -> None:
        """Do not call the method of the owner."""


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _copied_tree(value: Any) -> Any:
    try:
        return tree_map(_copied, value)
    # Containers contain themselves, or are nested more deeply than Python can call functions.
    except RecursionError:
        return _copied(value)


def _copied(value: Any) -> Any:
    """A copy of state, and of containers with state inside; other objects are shared."""
    # Sets, and containers of the project's own types.
    if isinstance(value, (list, dict, set, deque, bytearray)):
        return copy.copy(value)
    if not isinstance(value, _STATE) or getattr(value, "nbytes", 0) > LARGEST_COPIED_BYTES:
        return value
    # A tensor with a graph cannot be copied otherwise.
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


class MutedExperiment:
    """Accepts any chain of attributes, calls and items, and does nothing.

    Numbers, texts and containers are read from the experiment of a logger: a step may compute with
    them, and would fail with Lightning's DummyExperiment, which has none.
    """

    def __init__(self, target: Any = None) -> None:
        vars(self)["_target"] = target

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the experiment, for ``isinstance``."""
        return MutedExperiment if self._target is None else type(self._target)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _readable(getattr(self._target, name, None))

    def __call__(self, *_: Any, **__: Any) -> Any:
        return MutedExperiment()

    def __getitem__(self, key: Any) -> Any:
        return _readable(self._target.get(key) if hasattr(self._target, "get") else None)

    # Without it Python would request items without an end.
    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._target) if hasattr(self._target, "__iter__") else ())

    def __len__(self) -> int:
        return len(self._target) if hasattr(self._target, "__len__") else 0

    def __bool__(self) -> bool:
        return True

    def __float__(self) -> float:
        return 0.0

    def __enter__(self) -> Any:
        return self

    __setattr__ = __setitem__ = __exit__ = _nothing


def _muted_experiment(muted: Any) -> MutedExperiment:
    """The experiment that a logger has by now; its property would make one, with files."""
    return MutedExperiment(attributes_of(muted._muted_owner).get("_experiment"))


def _readable(value: Any) -> Any:
    is_read = isinstance(value, _READ_FROM_EXPERIMENTS)
    return copy.copy(value) if is_read else MutedExperiment(value)
