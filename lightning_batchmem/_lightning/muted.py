"""Callbacks, loggers and profilers that do nothing for a while."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from lightning_batchmem._lightning.trainer_state import replaced
from lightning_batchmem.devices.foreign_values import attributes_of

_READ_FROM_EXPERIMENTS = (str, bytes, int, float, Path, list, tuple, set, dict)


def _nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def muted_callback(callback: Callback) -> Iterator[None]:
    """Silence the hooks of a callback in the body."""
    hooks = [name for name in dir(Callback) if name.startswith(("on_", "setup", "teardown"))]
    # A progress bar has the last three.
    silent = [*hooks, "load_state_dict", "print", "enable", "disable"]
    with replaced(callback, **dict.fromkeys(silent, _nothing)):
        yield


@contextmanager
def muted_logger(logger: Logger) -> Iterator[None]:
    """Silence the methods of a logger in the body; its experiment can be read."""
    kind: Any = type(logger)
    # The class of a mock has no methods.
    methods = {**_silent_methods(Logger), **_silent_methods(kind)}
    # The experiment is a property of the class.
    of_kind = {name: value for name, value in vars(kind).items() if name == "experiment"}
    kind.experiment = property(_muted_experiment, _nothing)
    try:
        with replaced(logger, **methods):
            yield
    finally:
        del kind.experiment
        for name, value in of_kind.items():
            setattr(kind, name, value)


@contextmanager
def muted_profiler(profiler: Profiler) -> Iterator[None]:
    """Silence a profiler in the body."""
    # Lightning calls the last one at every hook.
    methods = {**_silent_methods(Profiler), "profile": PassThroughProfiler().profile}
    with replaced(profiler, **methods):
        yield


def _silent_methods(kind: type) -> dict[str, Any]:
    """A function that does nothing for each public method of a class."""
    names = [name for name in dir(kind) if name[0] != "_"]
    return {name: _nothing for name in names if callable(getattr(kind, name, None))}


class MutedExperiment:
    """Accepts any chain of attributes, calls and items, and does nothing.

    Numbers, texts and containers are read from the attributes of a real experiment: a step may
    compute with them, and would fail with Lightning's DummyExperiment, which has none.
    """

    def __init__(self, target: Any = None) -> None:
        vars(self)["_target"] = target

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the experiment, for ``isinstance``."""
        return MutedExperiment if self._target is None else type(self._target)

    def __float__(self) -> float:
        return 0.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._target, name, None)
        is_read = isinstance(value, _READ_FROM_EXPERIMENTS)
        return copy.copy(value) if is_read else MutedExperiment(value)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return MutedExperiment()

    # Python would request items without an end.
    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    __getitem__ = __call__
    __setattr__ = __setitem__ = __exit__ = _nothing


def _muted_experiment(logger: Any) -> MutedExperiment:
    """The experiment that a logger has by now; its property would make one, with files."""
    return MutedExperiment(attributes_of(logger).get("_experiment"))
