"""The variables that the functions of a loop refer to: bound again, and compared after a search."""

from __future__ import annotations

import logging
import random
import re
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# The walk goes breadth first and ends after so many objects, which takes less than a second. Of one
# container only the first entries are compared, since a data set has the same type as a counter.
MOST_OBJECTS = 50_000
MOST_ENTRIES = 1_000

_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)

# These do not change in a step, or are data.
_NOT_WALKED = (
    Dataset,
    DataLoader,
    logging.Logger,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
)

Contents = dict[str, Any]


class LoopVariables:
    """The variables of functions, and of the functions of the same file to which they refer.

    These are variables of enclosing functions and global ones. Each is bound to its value again,
    which restores a counter. The contents of objects are compared only: to restore an object that
    the user did not name could do harm, if it is a connection or a progress bar for example.

    Args:
        functions: the functions, or other objects that can be called.
        is_recorded: whether an object is restored elsewhere.
    """

    def __init__(self, functions: Iterable[object], is_recorded: Callable[[object], bool]) -> None:
        self._is_recorded = is_recorded
        self._values: list[tuple[str, Any]] = []
        self._bindings: list[Callable[[], object]] = []
        pending = list(functions)
        walked: list[Any] = []
        while pending:
            function, bound = _function_behind(pending.pop())
            self._values += [(type(one).__name__, one) for one in bound]
            if function is None or function in walked:
                continue
            walked.append(function)
            for name, value, bind in _variables(function):
                self._values.append((name, value))
                self._bindings.append(partial(bind, value))
                behind, _ = _function_behind(value)
                if behind is not None and _belongs_to(behind, function):
                    pending.append(value)
        # The references keep the objects alive, so that no id is used twice.
        self._before, self._alive = self._contents()

    def bind_again(self) -> None:
        """Give every variable its value again."""
        for bind in self._bindings:
            bind()

    def changed(self) -> list[str]:
        """The variables, or their attributes and entries, whose contents have changed."""
        after, _ = self._contents()
        changes: list[str] = []
        for path in {**self._before, **after}:
            one, other = self._before.get(path), after.get(path)
            # NaN differs from itself.
            if one is not other and one != other:
                variable, *parts = re.split(r"(?=[.\[])", path)
                name = "".join([variable, *parts[:1]])
                if variable not in changes and name not in changes:
                    changes.append(name)
        return changes

    def _contents(self) -> tuple[Contents, dict[int, object]]:
        """What tells one state of the objects from another, by path; and the objects themselves."""
        contents: Contents = {}
        seen: dict[int, object] = {}
        pending = deque(self._values)
        while pending and len(seen) < MOST_OBJECTS:
            path, value = pending.popleft()
            if isinstance(value, _ATOMS):
                contents[path] = value
            elif not (
                id(value) in seen or isinstance(value, _NOT_WALKED) or self._is_recorded(value)
            ):
                seen[id(value)] = value
                contents[path] = (id(value), _state_of(value))
                pending += _children(path, value)
        return contents, seen


def _function_behind(value: Any) -> tuple[types.FunctionType | None, list[object]]:
    """The function that a call runs, and the objects to which it is bound."""
    bound: list[object] = []
    while True:
        if hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        elif isinstance(value, types.FunctionType):
            return value, bound
        elif isinstance(value, partial):
            bound += [*value.args, *value.keywords.values()]
            value = value.func
        elif isinstance(value, types.MethodType):
            bound.append(value.__self__)
            value = value.__func__
        elif callable(value) and isinstance(type(value).__call__, types.FunctionType):
            bound.append(value)
            value = type(value).__call__
        else:
            return None, bound


def _belongs_to(behind: types.FunctionType, function: types.FunctionType) -> bool:
    """Whether a function is of the same file, or was made inside another one.

    Most others belong to libraries, whose variables are none of the loop.
    """
    return behind.__globals__ is function.__globals__ or "<locals>" in behind.__qualname__


def _variables(
    function: types.FunctionType,
) -> Iterator[tuple[str, Any, Callable[[Any], object]]]:
    """Names and values of variables, and a function that binds each."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # The cell of a variable that has no value yet is empty.
        if cell != types.CellType():
            yield name, cell.cell_contents, partial(setattr, cell, "cell_contents")
    variables = function.__globals__
    for name in _names(function.__code__):
        if name in variables:
            yield name, variables[name], partial(variables.__setitem__, name)


def _names(code: types.CodeType) -> Iterator[str]:
    """The names in a function and in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _state_of(value: Any) -> object:
    """What differs after a change of the object itself; ``None`` if only attributes can differ."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, dict | list | deque | set):
        return len(value)
    if hasattr(type(value), "__next__") and not hasattr(value, "__dict__"):
        # The position of a plain iterator cannot be read, so it counts as changed.
        return object()
    return None


def _children(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in islice(value.items(), MOST_ENTRIES):
            yield f"{path}[{key!r:.40}]", item
    elif isinstance(value, list | deque | tuple):
        for index, item in enumerate(islice(value, MOST_ENTRIES)):
            yield f"{path}[{index}]", item
    for name, item in getattr(value, "__dict__", {}).items():
        yield f"{path}.{name}", item
