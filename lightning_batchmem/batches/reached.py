"""The objects to which an object leads, found without running any of its code."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

# Objects of these types lead to no others.
_ATOMS = frozenset({str, bytes, int, float, complex, bool, type(None), range})

# Objects of these types have nothing but their items, not even a finalizer.
_CONTAINERS = frozenset({tuple, list, dict})

# A copy shares objects of these types, or cannot be made of them.
_NOT_ENTERED = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
    types.GeneratorType,
    types.CoroutineType,
    weakref.ref,
)


def reached_from(root: object, left_out: Iterable[int] = ()) -> Iterator[Any]:
    """Yield ``root`` and the objects to which it leads, level by level, and each of them once.

    Tuples, lists and dicts are entered, but not yielded: most objects of a data set are such.

    Args:
        root: the first object.
        left_out: ids of objects that are left out, with what only they lead to.
    """
    seen: dict[int, Any] = dict.fromkeys(left_out)
    level: list[Any] = [root]
    while level:
        new = {id(value): value for value in level if type(value) not in _ATOMS}
        for key in new.keys() & seen.keys():
            del new[key]
        yield from (value for value in new.values() if type(value) not in _CONTAINERS)
        # The references keep the objects alive, so that no id is used twice.
        seen |= new
        # The type is asked, since an object may answer for its class with code of its own.
        entered = [value for value in new.values() if not issubclass(type(value), _NOT_ENTERED)]
        level = gc.get_referents(*entered)
        # The collector of garbage does not look into these.
        for value in entered:
            if issubclass(type(value), np.ndarray):
                level.append(value.base)
                level.extend(value.flat if value.dtype.hasobject else ())
            elif type(value) is memoryview:
                level.append(value.obj)
