"""Places where the batch size of a project is read and set: an attribute, loaders, or a hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

# This function is private in lightning 2.5.0 to 2.6.6.
from lightning.fabric.utilities.data import _replace_value_in_saved_args
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_batchmem._lightning.data_source import DataSource
from lightning_batchmem._lightning.project_attribute import ProjectAttribute
from lightning_batchmem.batches.batch_sampler import batch_sampler_of
from lightning_batchmem.batches.loader_size import (
    keep_sizes,
    loader_batch_size,
    set_loader_batch_size,
)
from lightning_batchmem.devices.foreign_values import attributes_of


@dataclass(eq=False)
class SizedHook:
    """Takes the place of a hook on its owner, and sets the size of the loaders that it returns.

    Everybody who calls the hook gets loaders of this size: Lightning, also in later epochs, and the
    user's own code. Unlike a closure, it can be copied and pickled with the owner.

    Args:
        owner: the module or datamodule.
        name: the name of the hook, such as ``"train_dataloader"``.
        batch_size: the size of all loaders.
        own: the attribute of the owner itself that had this name, if there was one.
    """

    owner: Any
    name: str
    batch_size: int
    own: Callable[[], Any] | None

    @property
    def __wrapped__(self) -> Callable[[], Any]:
        """The user's hook, which Lightning looks at to see whether there is one."""
        if self.own is not None:
            return self.own
        kind = type(self.owner)
        # The attribute of the instance is this object itself.
        hook: Callable[[], Any] = inspect.getattr_static(kind, self.name).__get__(self.owner, kind)
        return hook

    def __call__(self) -> Any:
        """The loaders of the user's hook, with the size."""
        loaders = self.__wrapped__()
        for loader in loaders_in(loaders):
            if isinstance(loader, DataLoader):
                # A loader that was made before has the size already.
                set_loader_batch_size(loader, self.batch_size)
                _set_for_lightning(loader, self.batch_size)
        return loaders


def loaders_in(loaders: Any) -> list[Any]:
    """The loaders in a collection, or in Lightning's CombinedLoader."""
    return tree_leaves(getattr(loaders, "flattened", loaders))


def _set_for_lightning(loader: DataLoader[Any], batch_size: int) -> None:
    """Set the size in the arguments with which Lightning makes the loader again for several ranks.

    They are recorded while Lightning calls the hook, under private names (lightning 2.5.0 to
    2.6.6).
    """
    for made in (loader, batch_sampler_of(loader)):
        attributes = attributes_of(made)
        if "__pl_saved_args" not in attributes:
            continue
        is_argument, arguments, keywords = _replace_value_in_saved_args(
            "batch_size",
            batch_size,
            attributes["__pl_saved_args"],
            attributes["__pl_saved_kwargs"],
            attributes["__pl_saved_default_kwargs"],
            attributes["__pl_saved_arg_names"],
        )
        if is_argument:
            attributes.update(__pl_saved_args=arguments, __pl_saved_kwargs=keywords)


class SizeNotFollowedError(ValueError):
    """The loaders do not follow the size at this place, but may do so at another one."""


@dataclass(frozen=True)
class InAttribute:
    """An attribute that the project reads when it makes its loaders.

    Args:
        attribute: the attribute, which may not exist.
    """

    attribute: ProjectAttribute

    @property
    def name(self) -> str:
        """The name of the size in sentences."""
        return self.attribute.path

    text = name
    """The place as a plan has it: the path of an attribute, or the call of a hook."""

    @property
    def exists(self) -> bool:
        """Whether the project has this place."""
        return self.attribute.exists

    @property
    def value(self) -> object:
        """The value as the project has it now, of any type; ``None`` without one."""
        return self.attribute.value

    def write(self, batch_size: int) -> None:
        """Set the size.

        Raises:
            ValueError: if it cannot be set.
        """
        try:
            self.attribute.set(batch_size)
        # A setter or a read-only configuration may raise any exception.
        except Exception as error:
            raise SizeNotFollowedError(
                f"`{self.name}` must be an attribute that can be set, got {type(error).__name__}:"
                f" {error}"
            ) from error
        attribute = self.attribute
        if attribute.exists and (actual := attribute.value) != batch_size:
            raise ValueError(
                f"`{self.name}` must keep the value it is set to, got {actual} after it was set to"
                f" {batch_size}. Remove the limit, or pass max_batch_size={actual}."
            )

    def keep(self) -> Callable[[], None]:
        """Record the size; returns a function that restores it."""
        return self.attribute.keep()

    def sets_loaders_of(self, source: DataSource) -> bool:
        """Whether the loaders of this origin get the size after the project has made them."""
        return False


@dataclass(frozen=True)
class InPassedLoaders(InAttribute):
    """The loaders that were passed, and the attribute with the size if there is one."""

    source: DataSource
    exists = True

    @property
    def value(self) -> object:
        # The attribute may be one that nothing reads.
        return next((loader_batch_size(loader) for loader in self.source.passed_loaders()), None)

    def write(self, batch_size: int) -> None:
        loaders = self.source.request().flattened
        sizes = [loader_batch_size(loader) for loader in loaders]
        check_one_size([size for size in sizes if size], self.source.hook, self.name)
        for loader in loaders:
            set_loader_batch_size(loader, batch_size)
        super().write(batch_size)

    def keep(self) -> Callable[[], None]:
        undo = ExitStack()
        undo.callback(super().keep())
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

    def write(self, batch_size: int) -> None:
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


SizePlace = InAttribute | InHook
"""One place of the batch size. Both have the same methods."""


def check_one_size(sizes: Sequence[int], hook: str, name: str) -> None:
    """Raise a ValueError if loaders whose size is set after they were made have several sizes."""
    if len(distinct := sorted(set(sizes))) > 1:
        raise ValueError(
            f"loaders whose size is set after they were made must have one batch size, got"
            f" {', '.join(map(str, distinct))}. Make the one to change in {hook} from an attribute,"
            f" such as `self.{name}`."
        )
