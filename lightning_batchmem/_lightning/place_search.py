"""Find the place of the batch size: set a candidate, request the loaders, see if they follow.

The candidates are attributes of the project, by their names and values. If the loaders follow none
of them, their hook is the place.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from numbers import Integral
from typing import Any, NamedTuple

from torch.nn import Module

from lightning_batchmem._lightning.clean_start import CleanStart
from lightning_batchmem._lightning.places import (
    InHook,
    ProjectAttribute,
    SizeNotFollowedError,
    check_one_size,
)
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem.batches.loaders import StageLoaders
from lightning_batchmem.devices.foreign_values import attributes_of
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.search.ranks import Ranks

# Each of them is tried by a request of the loaders.
MOST_CANDIDATES = 8

# Objects between a root, such as the module, and the attribute: `module.cfg.train.batch_size`.
_MOST_STEPS = 2

# A vocabulary has more entries, and words of it may name a batch.
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


def find_place(
    setting: BatchSizeSetting,
    batch_size: int,
    clean_start: CleanStart,
    ranks: Ranks,
) -> tuple[BatchSizeSetting, StageLoaders]:
    """The setting at a place that the loaders follow, and the loaders at ``batch_size``.

    It is the given place if the loaders follow there, or if the user has named it. Otherwise it is
    the attribute that most loaders follow; of several, such as a number of a configuration and one
    that refers to it, the first. If there is none, it is the hook. All ranks find the same place.

    Args:
        setting: the setting at the place that the options name.
        batch_size: the size to set.
        clean_start: the state before the first request.
        ranks: the processes that search together.

    Raises:
        ValueError: if the loaders follow at no place.
    """
    loaders = None
    try:
        loaders = setting.loaders_for(batch_size)
    except SizeNotFollowedError:
        if setting.name != SearchOptions.batch_arg_name:
            raise
    if all(ranks.exchange(loaders is not None)) and loaders is not None:
        return setting, loaders
    clean_start.reset_for_loaders()
    project_loaders, sizes = setting.loaders_of_project()
    # A hook may return a loader that is a global variable.
    clean_start.restore_sizes_of(project_loaders)
    roots = ProjectAttribute(setting.trainer, setting.module, "").roots
    paths_of_ranks = ranks.exchange(candidate_paths(roots, sizes, clean_start.restored))
    followers_at: dict[str, int] = {}
    for path in paths_of_ranks[0]:
        # A rank may have other attributes.
        if all(path in paths for paths in paths_of_ranks):
            clean_start.reset_for_loaders()
            followers = _followers(setting.at(path), batch_size, max(sizes))
            followers_at[path] = min(ranks.exchange(followers))
    clean_start.reset_for_loaders()
    try:
        if any(followers_at.values()):
            found = setting.at(max(followers_at, key=lambda path: followers_at[path]))
        else:
            check_one_size(sizes, setting.source.hook, setting.name)
            found = replace(setting, place=InHook(setting.source), project_size=sizes[0])
        return found, found.loaders_for(batch_size)
    except ValueError as error:
        if not followers_at:
            raise
        tried = ", ".join(f"`{path}`" for path in followers_at)
        raise ValueError(f"{error} The loaders follow none of {tried}.") from error


def _followers(setting: BatchSizeSetting, size: int, largest_size: int) -> int:
    """Set the size twice and request the loaders; returns how many of them follow."""
    # No loader has this size already, and a hook that only lowers it does not follow.
    other_size = size * max(2, largest_size // size + 1)
    # With another value, a hook of the user may raise any error, or leave the script.
    try:
        sizes = setting.sizes_at(size)
        other_sizes = setting.sizes_at(other_size)
    except (Exception, SystemExit):  # noqa: BLE001
        return 0
    if len(sizes) != len(other_sizes) or size not in sizes:
        return 0
    return sum(
        one % size == 0 and one * other_size == other * size
        for one, other in zip(sizes, other_sizes, strict=True)
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
    for number in _numbers_in(roots, restored):
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
                elif id(value) in restored and id(value) not in seen:
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
    with suppress(Exception):
        for name in islice(holder, _MOST_ENTRIES) if is_mapping else _names_of(holder):
            # An entry of a configuration may be missing, and an attribute may raise any error.
            with suppress(Exception):
                if isinstance(name, str) and name.isidentifier():
                    entries.append((name, holder[name] if is_mapping else getattr(holder, name)))
    return entries


def _names_of(holder: Any) -> list[str]:
    """Names of the attributes of an object, but not of its properties, which may do work."""
    names = list(attributes_of(holder))
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
