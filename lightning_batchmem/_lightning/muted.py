"""Callbacks, loggers and profilers that steps of a search may read, and that do nothing."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_batchmem.batches.loaders import RANDOM_GENERATORS
from lightning_batchmem.devices.foreign_values import attributes_of, value_or_none
from lightning_batchmem.state.walked_kinds import LARGEST_ARRAY_BYTES

# Steps may change objects of these types in place.
_STATE = (Tensor, np.ndarray, *RANDOM_GENERATORS)

_READ_FROM_EXPERIMENTS = (str, bytes, int, float, Path, list, tuple, set, dict)


def muted_callback(callback: Callback) -> Any:
    """A callback that reads like ``callback``, and whose hooks do nothing."""
    hooks = [name for name in dir(Callback) if name.startswith(("on_", "setup", "teardown"))]
    # A progress bar has the last three.
    muted = _muted(callback, [*hooks, "load_state_dict", "print", "enable", "disable"])
    # Lightning reads it at every hook, and a step should not take longer than in training.
    vars(muted)["state_key"] = value_or_none(
        "The state_key of a callback", getattr, callback, "state_key"
    )
    return muted


def muted_logger(logger: Logger) -> Any:
    """A logger that reads like ``logger``, and whose methods do nothing."""
    if isinstance(logger, Muted):
        return logger
    kind = type(logger)
    methods = [name for name in dir(kind) if name[0] != "_" and _is_callable(kind, name)]
    muted = _muted(logger, methods)
    # The property of the logger would make files.
    vars(muted)["experiment"] = MutedExperiment(attributes_of(logger).get("_experiment"))
    return muted


def muted_profiler(profiler: Profiler) -> Any:
    """A profiler that reads like ``profiler``, and records nothing."""
    if isinstance(profiler, Muted):
        return profiler
    methods = [name for name in dir(Profiler) if name[0] != "_"]
    muted = _muted(profiler, methods)
    # Lightning calls it at every hook.
    vars(muted)["profile"] = PassThroughProfiler().profile
    return muted


def _muted(owner: object, silent: Iterable[str]) -> Any:
    """A proxy whose class has the name and the special methods of the owner's class.

    Python looks these up in the class of an object, and a step may read the name.
    """
    kind = type(owner)
    special = {
        name: getattr(kind, name)
        for name in dir(kind)
        if name.startswith("__") and name not in (*dir(Muted), "__del__")
        if _is_callable(kind, name)
    }
    return type(kind.__name__, (Muted,), special)(owner, silent)


def _is_callable(kind: type, name: str) -> bool:
    """Whether an attribute of a class can be called; a descriptor of it may raise any error."""
    return callable(value_or_none("A class of the project", getattr, kind, name))


class Muted:
    """Reads like an object of the project, which does not change.

    Methods run on copies of its containers, tensors and random generators.

    Args:
        owner: the object.
        silent: names of methods that do nothing.
    """

    def __init__(self, owner: object, silent: Iterable[str]) -> None:
        vars(self).update(dict.fromkeys(silent, _nothing), _muted_owner=owner)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the owner, for ``isinstance``."""
        return type(self._muted_owner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # ``copy.copy`` looks for special methods before the copy has an owner.
            raise AttributeError(name)
        owner = vars(self)["_muted_owner"]
        attributes = vars(owner)
        if name in attributes:
            value = vars(self)[name] = _copied_tree(attributes[name])
            return value
        kind = type(owner)
        in_classes = [vars(base)[name] for base in kind.__mro__ if name in vars(base)]
        if not in_classes:
            # The owner makes this attribute when it is read, as a mock does.
            return _readable(getattr(owner, name))
        value = in_classes[0]
        # Methods and properties read and change this object instead of the owner.
        return value.__get__(self, kind) if hasattr(value, "__get__") else value


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
    # Here are sets, and containers whose types are those of the project.
    if isinstance(value, (list, dict, set, deque, bytearray)):
        return copy.copy(value)
    if not isinstance(value, _STATE) or getattr(value, "nbytes", 0) > LARGEST_ARRAY_BYTES:
        return value
    # A tensor with a graph cannot be copied otherwise.
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


class MutedExperiment:
    """Accepts any chain of attributes, calls and items, and does nothing.

    Numbers, texts and containers are those of the experiment of a logger.
    """

    def __init__(self, target: Any = None) -> None:
        vars(self)["_target"] = target

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the experiment, for ``isinstance``."""
        target = vars(self)["_target"]
        return MutedExperiment if target is None else type(target)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _readable(getattr(vars(self)["_target"], name, None))

    def __setattr__(self, name: str, value: object) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Any:
        return MutedExperiment()

    def __getitem__(self, key: Any) -> Any:
        target = vars(self)["_target"]
        return _readable(target.get(key) if hasattr(target, "get") else None)

    def __setitem__(self, key: Any, value: object) -> None:
        pass

    # Without it Python would request items without an end.
    def __iter__(self) -> Iterator[Any]:
        target = vars(self)["_target"]
        return iter(list(target) if hasattr(target, "__iter__") else ())

    def __len__(self) -> int:
        target = vars(self)["_target"]
        return len(target) if hasattr(target, "__len__") else 0

    def __bool__(self) -> bool:
        return True

    def __float__(self) -> float:
        return 0.0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _readable(value: Any) -> Any:
    is_read = isinstance(value, _READ_FROM_EXPERIMENTS)
    return copy.copy(value) if is_read else MutedExperiment(value)
