"""A hook whose loaders get a batch size that is a constant in the user's code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# This function is private in lightning 2.5.0 to 2.6.6.
from lightning.fabric.utilities.data import _replace_value_in_saved_args
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_batchmem.batches.batch_sampler import batch_sampler_of
from lightning_batchmem.batches.loader_size import set_loader_batch_size
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
