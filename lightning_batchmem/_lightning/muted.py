"""Callbacks, loggers and profilers that steps of a search may read, and that do nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from lightning_batchmem.devices.foreign_values import attributes_of, value_or_none

_READ_FROM_EXPERIMENTS = (str, bytes, int, float, Path, list, tuple, set, dict)


def _nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def muted_callback(callback: Callback) -> Iterator[bool]:
    """Let the hooks of a callback do nothing in the body; yields whether they do."""
    hooks = [name for name in dir(Callback) if name.startswith(("on_", "setup", "teardown"))]
    # A progress bar has the last three.
    silent = [*hooks, "load_state_dict", "print", "enable", "disable"]
    with _attributes(callback, dict.fromkeys(silent, _nothing)) as is_muted:
        yield is_muted


@contextmanager
def muted_logger(logger: Logger) -> Iterator[bool]:
    """Let the methods of a logger do nothing in the body; yields whether they do.

    Its experiment is one that can be read only. It is a property of the class.
    """
    kind = type(logger)
    # The class of a mock has no methods.
    methods = {**_silent_methods(Logger), **_silent_methods(kind)}
    own = {name: value for name, value in vars(kind).items() if name == "experiment"}
    try:
        # A metaclass of the project may refuse it.
        type.__setattr__(kind, "experiment", property(_muted_experiment, _nothing))
        with _attributes(logger, methods) as is_muted:
            yield is_muted
    finally:
        if own:
            type.__setattr__(kind, "experiment", own["experiment"])
        elif "experiment" in vars(kind):
            type.__delattr__(kind, "experiment")


@contextmanager
def muted_profiler(profiler: Profiler) -> Iterator[None]:
    """Let a profiler record nothing in the body."""
    methods = _silent_methods(Profiler)
    # Lightning calls it at every hook.
    methods["profile"] = PassThroughProfiler().profile
    with _attributes(profiler, methods):
        yield


def _silent_methods(kind: type) -> dict[str, Any]:
    """A function that does nothing for each public method of a class."""
    return {
        name: _nothing
        for name in dir(kind)
        # A descriptor of the class may raise any error.
        if name[0] != "_" and callable(value_or_none("A class of the project", getattr, kind, name))
    }


@contextmanager
def _attributes(owner: Any, attributes: dict[str, Any]) -> Iterator[bool]:
    """Give an object these attributes in the body; yields whether it is read with them.

    The object itself stays, since a step may look for it by identity, type or place.
    """
    before = {name: value for name, value in _own(owner).items() if name in attributes}
    try:
        yield _set(owner, attributes)
    finally:
        try:
            _undo(owner, attributes, before)
        except KeyboardInterrupt:
            # The object must be left without them after Ctrl-C too.
            _undo(owner, attributes, before)
            raise


def _set(owner: Any, attributes: dict[str, Any]) -> bool:
    kind = type(owner)
    try:
        for name, value in attributes.items():
            # A property of the class would run code of the user.
            if not hasattr(getattr(kind, name, None), "__set__"):
                # The project may count what is set, or refuse it.
                object.__setattr__(owner, name, value)
        return all(getattr(owner, name) is value for name, value in attributes.items())
    # The class may raise any error where an attribute is read.
    except Exception:  # noqa: BLE001
        return False


def _undo(owner: Any, attributes: dict[str, Any], before: dict[str, Any]) -> None:
    own = _own(owner)
    own.update(before)
    for name in attributes.keys() - before.keys():
        own.pop(name, None)


def _own(owner: Any) -> dict[str, Any]:
    """The dictionary of an object, also where its class hides it or has slots too."""
    state: Any = object.__getstate__(owner)
    return (state[0] if isinstance(state, tuple) else state) or {}


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


def _muted_experiment(logger: Any) -> MutedExperiment:
    """The experiment that a logger has by now; its property would make one, with files."""
    return MutedExperiment(attributes_of(logger).get("_experiment"))


def _readable(value: Any) -> Any:
    is_read = isinstance(value, _READ_FROM_EXPERIMENTS)
    return copy.copy(value) if is_read else MutedExperiment(value)
