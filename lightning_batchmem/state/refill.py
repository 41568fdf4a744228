"""The way to an object, and its contents, given to it again in place."""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np

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


def set_attribute(value: object, name: str, item: object) -> None:
    """Set an attribute of an object, in its dictionary or in a slot."""
    # A read-only slot has not changed, so it need not be set.
    if getattr(value, name, None) is not item:
        # The class may be a frozen dataclass.
        object.__setattr__(value, name, item)


def restore_object(value: Any, kind: type, attributes: Any, contents: dict[str, Any]) -> None:
    """Give an object its class, its dictionary and the contents of that again."""
    # A parametrization replaces the class of a module, and the other attributes depend on it.
    if type(value) is not kind:
        object.__setattr__(value, "__class__", kind)
    if getattr(value, "__dict__", attributes) is not attributes:
        object.__setattr__(value, "__dict__", attributes)
    refill(attributes, contents)


def delete_slot(value: object, name: str) -> None:
    """Delete the value of a slot if there is one."""
    if hasattr(value, name):
        # The class may be a frozen dataclass.
        object.__delattr__(value, name)


def restore_array(array: Any, saved: Any) -> None:
    """Give an array with memory of its own the shape and the items of its copy again."""
    if array.size != saved.size:
        array.resize(saved.shape, refcheck=False)
    array.shape = saved.shape
    is_writeable = array.flags.writeable
    array.flags.writeable = True
    np.copyto(array, saved)
    array.flags.writeable = is_writeable


def contents_of(container: Any) -> Any:
    """The contents of a container: a dict of those of a mapping, and otherwise a list."""
    kind = _plain_kind(container)
    if hasattr(kind, "items"):
        return dict(kind.items(container))
    return list(kind.__iter__(container))


def refill(container: Any, contents: Any) -> str | None:
    """Give a list, deque, set or dict these contents again; returns what could not be restored.

    The contents of a set are a list, in the order of the set.
    """
    # Unchanged containers are left alone, because another thread would see them empty for a moment.
    # A copy of a large one takes longer than the comparison.
    present = container if type(container) in (dict, list) else contents_of(container)
    if _are_same(present, contents):
        return None
    if isinstance(container, set):
        return _refill_set(container, contents)
    kind = _plain_kind(container)
    kind.clear(container)
    if isinstance(contents, dict):
        for key, item in contents.items():
            # The update of an OrderedDict calls a method of the user's class.
            kind.__setitem__(container, key, item)
    else:
        kind.extend(container, contents)
    return None


def _plain_kind(container: Any) -> Any:
    """The class of Python's own that a container has; a class of the user may do anything else."""
    kinds = type(container).__mro__
    return next(kind for kind in kinds if kind.__module__ in ("builtins", "collections"))


def _refill_set(container: set[Any], contents: list[Any]) -> str | None:
    kept = set(map(id, contents))
    present = set(map(id, container))
    # The order depends on the history of a set, and that of an empty one is lost.
    container.difference_update([item for item in container if id(item) not in kept])
    container.update(item for item in contents if id(item) not in present)
    # The next `pop` depends on the last one too, which the order does not show.
    is_in_order = kept <= present and _are_same(contents_of(container), contents)
    return None if is_in_order else "the order of a set"


def _are_same(contents: Any, others: Any) -> bool:
    """Whether two lists or dicts have the same objects in the same order."""
    if len(contents) != len(others):
        return False
    if isinstance(contents, dict) and not all(map(is_, contents.values(), others.values())):
        return False
    return all(map(is_, contents, others))
