"""Attributes of a project that may be its batch size, by their names and values."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from numbers import Integral
from typing import Any, NamedTuple

from torch.nn import Module

from lightning_batchmem.devices.foreign_values import attributes_of

# Each of them is tried by a request of the loaders.
MOST_CANDIDATES = 8

# Objects between a root, such as the module, and the attribute: `module.cfg.train.batch_size`.
_MOST_STEPS = 2

# Objects that are looked at, and entries of each, so that data in attributes take no time.
_MOST_OBJECTS = 1000
_MOST_ENTRIES = 1000

# "bs", "bsz" and "mbs" are words between underscores, unlike the end of "obs".
_NAMES_A_BATCH = re.compile(r"batch|(?<![a-z])[mg]?bs(z|ize)?(?![a-z])", re.IGNORECASE)

# With another value of these, loaders would have other data, or start processes.
_NEVER = re.compile(r"rank|seed|epoch|fold|worker|jobs|thread|cpu|nproc|num_proc", re.IGNORECASE)

# Objects of these packages hold no size of a project. Containers are walked through anyway.
_LIBRARIES = (
    "torch",
    "lightning",
    "pytorch_lightning",
    "lightning_batchmem",
    "torchmetrics",
    "numpy",
    "builtins",
)


class _Number(NamedTuple):
    """A whole number of a project, and the object or dict that has it."""

    path: str
    value: int
    holder: Any

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def candidate_paths(
    roots: Sequence[Any], sizes: Collection[int], restored: Container[int]
) -> list[str]:
    """Paths of at most :data:`MOST_CANDIDATES` attributes that may be the batch size.

    First come names of a batch, and then numbers that equal a size. Of each of these, the ones with
    a size as their value come first, and then the ones near the roots.

    Args:
        roots: the module, the datamodule and the hyperparameters of both.
        sizes: the batch sizes of the loaders, as the project makes them.
        restored: ids of the objects that are restored after each try. Others are left alone.
    """
    named = []
    equal = []
    for number in _distinct(_numbers_in(roots, restored)):
        # The widths of layers are in parts of the module.
        is_root = any(number.holder is root for root in roots)
        is_in_layer = isinstance(number.holder, Module) and not is_root
        if _NEVER.search(number.name):
            continue
        if _NAMES_A_BATCH.search(number.name):
            named.append(number)
        elif number.value in sizes and not is_in_layer:
            equal.append(number)
    named.sort(key=lambda number: (number.value not in sizes, "size" not in number.name.lower()))
    paths = dict.fromkeys(number.path for number in [*named, *equal])
    return list(paths)[:MOST_CANDIDATES]


def _distinct(numbers: Iterable[_Number]) -> list[_Number]:
    """Each number once, with the first of the paths to it."""
    by_place: dict[tuple[int, str], _Number] = {}
    for number in numbers:
        by_place.setdefault((id(number.holder), number.name), number)
    return list(by_place.values())


def _numbers_in(roots: Sequence[Any], restored: Container[int]) -> Iterator[_Number]:
    """The positive whole numbers of the roots and of objects near them; the nearest come first."""
    level = [("", root) for root in roots]
    # The references keep the objects alive, so that no id is used twice.
    seen = {id(root): root for root in roots}
    for step in range(_MOST_STEPS + 1):
        next_level = []
        for prefix, holder in level:
            for name, value in _entries_of(holder):
                path = f"{prefix}{name}"
                if _is_positive_number(value):
                    yield _Number(path, int(value), holder)
                elif id(value) in restored and id(value) not in seen and len(seen) < _MOST_OBJECTS:
                    seen[id(value)] = value
                    if _is_walked(value):
                        next_level.append((f"{path}.", value))
        level = next_level if step < _MOST_STEPS else []


def _is_positive_number(value: object) -> bool:
    # The class of a lazy proxy may raise any error, its type does not.
    kind: type = type(value)
    return issubclass(kind, Integral) and not issubclass(kind, bool) and int(value) > 0  # type: ignore[call-overload]


def _is_walked(value: object) -> bool:
    package = type(value).__module__.partition(".")[0]
    return issubclass(type(value), Mapping) or package not in _LIBRARIES


def _entries_of(holder: Any) -> list[tuple[str, Any]]:
    """Names and values of a dict, or of the attributes of an object and of its class."""
    entries = []
    is_mapping = issubclass(type(holder), Mapping)
    # The keys of a user's mapping may raise any error.
    try:
        names = list(islice(holder, _MOST_ENTRIES)) if is_mapping else _names_of(holder)
    except Exception:  # noqa: BLE001
        names = []
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            continue
        # An entry of a configuration may be missing, and an attribute may raise any error.
        try:
            value = holder[name] if is_mapping else getattr(holder, name)
        except Exception:  # noqa: BLE001
            value = None
        entries.append((name, value))
    return entries


def _names_of(holder: Any) -> list[str]:
    """Names of the attributes of an object, but not of its properties, which may do work."""
    names = list(islice(attributes_of(holder), _MOST_ENTRIES))
    if isinstance(holder, Module):
        # These tables have other places, and Lightning logs a copy of the hyperparameters.
        of_modules = {*vars(Module()), "_hparams", "_hparams_initial"}
        names = [name for name in names if name not in of_modules]
        names += [name for name, _ in holder.named_children()]
    for kind in type(holder).__mro__:
        if kind.__module__.partition(".")[0] in _LIBRARIES:
            continue
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
        names += [name for name, value in vars(kind).items() if _is_positive_number(value)]
    return list(dict.fromkeys(names))
