"""Names of both packages of Lightning."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def end_of_tuning(trainer: object) -> BaseException:
    """An exception that ends ``fit`` without an error, as after a tuner."""
    # _TunerExitException is private in lightning 2.5.0 to 2.6.6.
    exception: BaseException = lightning_name(trainer, "utilities.exceptions._TunerExitException")()
    return exception


def lightning_name(owner: object, path: str) -> Any:
    """The object at ``path``, such as ``"loops.loop._Loop"``, in the package of ``owner``.

    The owner is a trainer or a loop, and its class decides which Lightning package is used.
    """
    modules = [f"{kind.__module__}." for kind in type(owner).__mro__]
    for package in _PACKAGES:
        if any(module.startswith(f"{package}.") for module in modules):
            return _attribute(package, path)
    return _attribute(_PACKAGES[0], path)


def in_every_package(*paths: str) -> tuple[Any, ...]:
    """``paths`` in each of the packages that is imported."""
    packages = [package for package in _PACKAGES if package in sys.modules]
    return tuple(_attribute(package, path) for package in packages for path in paths)


def _attribute(package: str, path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{package}.{module}"), name)
