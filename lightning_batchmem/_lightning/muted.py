"""Callbacks and loggers that steps of a search may read, and that do nothing."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import NonCallableMock

import numpy as np
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_batchmem.batches.collate import is_large

_PLAIN = (str, bytes, int, float, complex, type(None), Path)
_CONTAINERS = (list, dict, set, tuple, deque)

# Steps may change objects of these types in place, so a muted callback has copies.
_STATE = (
    *_PLAIN,
    set,
    Tensor,
    np.ndarray,
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
)


def muted_callback(callback: Callback) -> Callback:
    """A callback with the attributes of ``callback``, whose hooks do nothing."""
    hooks = [name for name in dir(Callback) if name.startswith(("on_", "setup", "teardown"))]
    # A progress bar has the last three.
    muted: Callback = _muted(callback, [*hooks, "load_state_dict", "print", "enable", "disable"])
    return muted


def muted_logger(logger: Logger) -> Logger:
    """A logger with the attributes and properties of ``logger``, whose methods do nothing."""
    kind = type(logger)
    if hasattr(kind, "_is_muted"):
        return logger
    methods = [name for name in dir(kind) if name[0] != "_" and callable(getattr(kind, name))]
    # The property `experiment` of a logger would make files.
    experiment = MutedExperiment(vars(logger).get("_experiment"))
    muted: Logger = _muted(logger, methods, experiment=property(lambda _: experiment))
    return muted


def _muted(owner: Any, methods: Iterable[str], **replaced: Any) -> Any:
    """An object of a subclass, without calls of its ``__init__``."""
    if isinstance(owner, NonCallableMock):
        # Its class has no methods, and it counts its calls.
        return MutedExperiment(owner)
    kind = type(owner)
    metaclass: Any = type(kind)
    namespace = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__getattribute__": object.__getattribute__,
        "__setattr__": object.__setattr__,
        "_is_muted": True,
        **dict.fromkeys([*methods, "__del__"], _nothing),
        **replaced,
    }
    muted_kind = metaclass(kind.__name__, (_Unregistered, kind), namespace)
    muted = object.__new__(muted_kind)
    vars(muted).update(
        {name: _copied(value) for name, value in vars(owner).items() if name not in namespace}
    )
    return muted


class _Unregistered:
    """Keeps a subclass out of registries of the user, and from required arguments."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Call no method of other base classes."""


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _copied(value: Any) -> Any:
    """A copy of a container, a tensor or a generator; other objects are shared."""
    if not isinstance(value, (*_CONTAINERS, *_STATE)) or isinstance(value, _PLAIN):
        return value
    if is_large(value) or not all(isinstance(leaf, _STATE) for leaf in tree_leaves(value)):
        return copy.copy(value) if isinstance(value, _CONTAINERS) else value
    try:
        return copy.deepcopy(value)
    # A tensor with a graph cannot be copied, and items of a set may raise any error.
    except Exception:  # noqa: BLE001
        return value


class MutedExperiment:
    """Reads like the experiment of a logger, and accepts any chain of attributes, calls and items.

    Numbers, texts and containers are those of the experiment; nothing in it changes.
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
    if value is not None and isinstance(value, (*_PLAIN, *_CONTAINERS)):
        return copy.copy(value)
    return MutedExperiment(value)
