"""Places where the batch size of a project is read and set: an attribute, loaders, or a hook."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

# This function is private in lightning 2.5.0 to 2.6.6.
from lightning.fabric.utilities.data import _replace_value_in_saved_args
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.parsing import AttributeDict
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_batchmem._lightning.data_source import DataSource
from lightning_batchmem._lightning.trainer_state import datamodules_of
from lightning_batchmem.batches.batch_sampler import batch_sampler_of
from lightning_batchmem.batches.loader_size import (
    keep_sizes,
    loader_batch_size,
    set_loader_batch_size,
)
from lightning_batchmem.devices.foreign_values import attributes_of


class SizeNotFollowedError(ValueError):
    """The loaders do not follow the size at this place, but may do so at another one."""


@dataclass(frozen=True)
class ProjectAttribute:
    """An attribute of a project, which may not exist: everything to which a path leads.

    Without a dot it is what Lightning's ``lightning_setattr`` sets; the last value is read, as by
    ``lightning_getattr``. Every :data:`SizePlace` has the methods for the size.

    Args:
        trainer: the Trainer.
        module: the module.
        path: the path, such as ``"batch_size"`` or ``"kwargs.batch_size"``.
        owners: the objects from which it leads; ``None`` for the module and the datamodule.

    Attributes:
        source: the loaders that get the size after the project has made them; here ``None``,
            because the project reads the attribute.
    """

    trainer: Trainer
    module: LightningModule
    path: str
    owners: tuple[Any, ...] | None = None
    source = None

    @property
    def attribute(self) -> ProjectAttribute:
        """The attribute of a place; ``None`` if the size is in no attribute."""
        return self

    @property
    def name(self) -> str:
        """The name of the size in sentences."""
        return self.path

    text = name
    """The place as a plan has it: the path of an attribute, or the call of a hook."""

    @property
    def exists(self) -> bool:
        """Whether the project has this place."""
        return bool(self._holders(self.roots))

    @property
    def value(self) -> Any:
        """The value as the project has it now, of any type; ``None`` without one."""
        holders = self._holders(self.roots)
        return _get(holders[-1], self._last_name) if holders else None

    def set(self, value: Any) -> None:
        """Set the value everywhere, but not in the hyperparameters that Lightning logs."""
        for holder in self._holders(self.roots):
            _set(holder, self._last_name, value)

    def write(self, batch_size: int) -> None:
        """Set the size.

        Raises:
            ValueError: if it cannot be set.
        """
        try:
            self.set(batch_size)
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

    def set_logged(self, value: Any) -> None:
        """Set the value in the copy of the hyperparameters that Lightning logs."""
        for holder in self._holders(self._logged):
            _set(holder, self._last_name, value)

    def without(self, params: Any) -> dict[str, Any]:
        """Hyperparameters without the one that leads to the value."""
        items = vars(params) if isinstance(params, Namespace) else dict(params or {})
        return {name: one for name, one in items.items() if name not in self.path.split(".")}

    def drop_logged(self) -> None:
        """Stop Lightning from logging the hyperparameter that leads to the value."""
        for owner in self._owners:
            if logged := _or_empty(owner, "_hparams_initial"):
                owner._hparams_initial = AttributeDict(self.without(logged))

    def restorer(self) -> Callable[[], None]:
        """Record the size; returns a function that restores it."""
        undo = ExitStack()
        for holder in self._holders(self.roots + self._logged):
            undo.callback(_set, holder, self._last_name, _get(holder, self._last_name))
        return undo.close

    @property
    def _last_name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def _owners(self) -> list[Any]:
        if self.owners is not None:
            return list(self.owners)
        return [self.module, *datamodules_of(self.trainer)]

    @property
    def roots(self) -> list[Any]:
        """The objects and dicts from which the path leads."""
        return [root for owner in self._owners for root in (owner, _or_empty(owner, "hparams"))]

    @property
    def _logged(self) -> list[Any]:
        # _hparams_initial is private in lightning 2.5.0 to 2.6.6.
        return [_or_empty(owner, "_hparams_initial") for owner in self._owners]

    def _holders(self, holders: list[Any]) -> list[Any]:
        """The objects or dicts that have the value, at the end of the path from these."""
        for part in self.path.split(".")[:-1]:
            holders = [_get(holder, part) for holder in holders if _has(holder, part)]
        return [holder for holder in holders if _has(holder, self._last_name)]


@dataclass(eq=False)
class SizedHook:
    """Takes the place of a hook on its owner, and sets the size of the loaders that it returns.

    Everybody who calls the hook gets loaders of this size: Lightning, also in later epochs, and the
    user's own code. Unlike a closure, it can be copied and pickled with the owner.

    Args:
        owner: the module or datamodule.
        name: the name of the hook, such as ``"train_dataloader"``.
        batch_size: the size of all loaders.
        replaces: the attribute of the owner itself that had this name, if there was one.
    """

    owner: Any
    name: str
    batch_size: int
    replaces: Callable[[], Any] | None

    @property
    def __wrapped__(self) -> Callable[[], Any]:
        """The user's hook, which Lightning looks at to see whether there is one."""
        if self.replaces is not None:
            return self.replaces
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


@dataclass(frozen=True)
class InPassedLoaders:
    """The loaders that were passed, and the attribute with the size if there is one.

    Args:
        attribute: the attribute, which may not exist.
        source: the loaders.
    """

    attribute: ProjectAttribute
    source: DataSource
    exists = True

    @property
    def name(self) -> str:
        return self.attribute.name

    text = name

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
        self.attribute.write(batch_size)

    def restorer(self) -> Callable[[], None]:
        undo = ExitStack()
        undo.callback(self.attribute.restorer())
        undo.callback(keep_sizes(self.source.passed_loaders()))
        return undo.close


@dataclass(frozen=True)
class InHook:
    """The loaders that a hook returns, where no attribute decides their size.

    Args:
        source: the hook.
    """

    source: DataSource
    exists = True
    name = "batch_size"
    attribute = None

    @property
    def text(self) -> str:
        return f"{self.source.hook}()"

    @property
    def value(self) -> object:
        hook = self._attributes.get(self.source.hook)
        return hook.batch_size if isinstance(hook, SizedHook) else None

    def write(self, batch_size: int) -> None:
        name = self.source.hook
        hook = self._attributes.get(name)
        replaces = hook.replaces if isinstance(hook, SizedHook) else hook
        # A copy of the hook may have been made with the owner, so it is not changed.
        self._attributes[name] = SizedHook(self.source.owner, name, batch_size, replaces)

    def restorer(self) -> Callable[[], None]:
        name = self.source.hook
        undo = ExitStack()
        if name in self._attributes:
            undo.callback(self._attributes.__setitem__, name, self._attributes[name])
        else:
            undo.callback(self._attributes.pop, name, None)
        return undo.close

    @property
    def _attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = vars(self.source.owner)
        return attributes


SizePlace = ProjectAttribute | InPassedLoaders | InHook
"""One place of the batch size. All have the same methods."""


def check_one_size(sizes: Sequence[int], hook: str, name: str) -> None:
    """Raise a ValueError if loaders that get the size after they were made have several sizes."""
    if len(distinct := sorted(set(sizes))) > 1:
        raise ValueError(
            f"loaders whose size is set after they were made must have one batch size, got"
            f" {', '.join(map(str, distinct))}. Make the one to change in {hook} from an attribute,"
            f" such as `self.{name}`."
        )


def _or_empty(owner: Any, name: str) -> Any:
    return _get(owner, name) if _has(owner, name) else {}


def _has(holder: Any, name: str) -> bool:
    # A property of the user may raise any exception.
    try:
        return name in holder if isinstance(holder, Mapping) else hasattr(holder, name)
    except Exception:  # noqa: BLE001
        return False


def _get(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, Mapping) else getattr(holder, name)


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, MutableMapping):
        holder[name] = value
    else:
        setattr(holder, name, value)
