"""Places where the batch size of a project is read and set: an attribute, loaders, or a hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from lightning_batchmem._lightning.data_source import DataSource
from lightning_batchmem._lightning.project_attribute import ProjectAttribute
from lightning_batchmem._lightning.sized_hook import SizedHook
from lightning_batchmem.batches.loader_size import (
    keep_sizes,
    loader_batch_size,
    set_loader_batch_size,
)


class SizeNotFollowedError(ValueError):
    """The loaders do not follow the size at this place, but may do so at another one."""


class SizePlace(Protocol):
    """One place of the batch size."""

    @property
    def name(self) -> str:
        """The name of the size in sentences."""

    @property
    def text(self) -> str:
        """The place as a plan has it: the path of an attribute, or the call of a hook."""

    @property
    def attribute(self) -> ProjectAttribute | None:
        """The attribute that is set too if it exists; ``None`` if none is set."""

    @property
    def exists(self) -> bool:
        """Whether the project has this place."""

    @property
    def value(self) -> object:
        """The value as the project has it now, of any type; ``None`` without one."""

    def write(self, batch_size: int, *, also_logged: bool = False) -> None:
        """Set the size; with ``also_logged`` in the hyperparameters that Lightning logs too.

        Raises:
            ValueError: if it cannot be set.
        """

    def keep(self) -> Callable[[], None]:
        """Record the size; returns a function that restores it."""

    def sets_loaders_of(self, source: DataSource) -> bool:
        """Whether the loaders of this origin get the size after the project has made them."""


@dataclass(frozen=True)
class InAttribute:
    """An attribute that the project reads when it makes its loaders."""

    attribute: ProjectAttribute

    @property
    def name(self) -> str:
        return self.attribute.path

    @property
    def text(self) -> str:
        return self.attribute.path

    @property
    def exists(self) -> bool:
        return self.attribute.exists

    @property
    def value(self) -> object:
        return self.attribute.value

    def write(self, batch_size: int, *, also_logged: bool = False) -> None:
        try:
            self.attribute.set(batch_size, also_logged=also_logged)
        # A setter or a read-only configuration may raise any exception.
        except Exception as error:
            raise SizeNotFollowedError(
                f"`{self.name}` must be an attribute that can be set, got {type(error).__name__}:"
                f" {error}"
            ) from error
        if self.exists and (actual := self.value) != batch_size:
            raise ValueError(
                f"`{self.name}` must keep the value it is set to, got {actual} after it was set to"
                f" {batch_size}. Remove the limit, or pass max_batch_size={actual}."
            )

    def keep(self) -> Callable[[], None]:
        return self.attribute.keep()

    def sets_loaders_of(self, source: DataSource) -> bool:
        return False


@dataclass(frozen=True)
class InPassedLoaders:
    """The loaders that were passed, and the attribute with the size if there is one."""

    source: DataSource
    in_attribute: InAttribute
    exists = True

    @property
    def name(self) -> str:
        return self.in_attribute.name

    @property
    def text(self) -> str:
        return self.in_attribute.text

    @property
    def attribute(self) -> ProjectAttribute:
        return self.in_attribute.attribute

    @property
    def value(self) -> object:
        if self.in_attribute.exists:
            return self.in_attribute.value
        return next((loader_batch_size(loader) for loader in self.source.passed_loaders()), None)

    def write(self, batch_size: int, *, also_logged: bool = False) -> None:
        loaders = self.source.request().flattened
        sizes = [loader_batch_size(loader) for loader in loaders]
        check_one_size([size for size in sizes if size], self.source.hook, self.name)
        for loader in loaders:
            set_loader_batch_size(loader, batch_size)
        self.in_attribute.write(batch_size, also_logged=also_logged)

    def keep(self) -> Callable[[], None]:
        undo = ExitStack()
        undo.callback(self.in_attribute.keep())
        undo.callback(keep_sizes(self.source.passed_loaders()))
        return undo.close

    def sets_loaders_of(self, source: DataSource) -> bool:
        return source is self.source


@dataclass(frozen=True)
class InHook:
    """The loaders that a hook returns, where no attribute decides their size.

    Args:
        source: the hook.
        project_size: the size in the user's code, where it is known.
    """

    source: DataSource
    project_size: int | None = None
    exists = True
    name = "batch_size"
    attribute = None

    @property
    def text(self) -> str:
        return f"{self.source.hook}()"

    @property
    def value(self) -> object:
        hook = self._attributes.get(self.source.hook)
        return hook.batch_size if isinstance(hook, SizedHook) else self.project_size

    def write(self, batch_size: int, *, also_logged: bool = False) -> None:
        name = self.source.hook
        hook = self._attributes.get(name)
        own = hook.own if isinstance(hook, SizedHook) else hook
        # A copy of the hook may have been made with the owner, so it is not changed.
        self._attributes[name] = SizedHook(self.source.owner, name, batch_size, own)

    def keep(self) -> Callable[[], None]:
        name = self.source.hook
        if name in self._attributes:
            return partial(self._attributes.__setitem__, name, self._attributes[name])
        return partial(self._attributes.pop, name, None)

    def sets_loaders_of(self, source: DataSource) -> bool:
        return source is self.source

    @property
    def _attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = vars(self.source.owner)
        return attributes


def check_one_size(sizes: Sequence[int], hook: str, name: str) -> None:
    """Raise a ValueError if loaders whose size is set after they were made have several sizes."""
    if len(distinct := sorted(set(sizes))) > 1:
        raise ValueError(
            f"loaders whose size is set after they were made must have one batch size, got"
            f" {', '.join(map(str, distinct))}. Make the one to change in {hook} from an attribute,"
            f" such as `self.{name}`."
        )
