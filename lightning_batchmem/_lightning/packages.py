"""Names of both packages of Lightning."""

from __future__ import annotations

import sys
from pkgutil import resolve_name
from typing import Any

_UNIFIED = "lightning.pytorch"
_STANDALONE = "pytorch_lightning"


def end_of_tuning(trainer: object) -> BaseException:
    """An exception that ends ``fit`` without an error, as after a tuner."""
    # _TunerExitException is private in lightning 2.5.0 to 2.6.6.
    exception: BaseException = lightning_name(trainer, "utilities.exceptions._TunerExitException")()
    return exception


def lightning_name(owner: object, path: str) -> Any:
    """The object at ``path``, such as ``"loops.loop._Loop"``, in the package of ``owner``.

    The owner is a trainer or a loop, and its class decides which Lightning package is used.
    """
    kinds = type(owner).__mro__
    is_standalone = any(kind.__module__.startswith(f"{_STANDALONE}.") for kind in kinds)
    package = _STANDALONE if is_standalone else _UNIFIED
    return resolve_name(f"{package}.{path}")


def in_every_package(*paths: str) -> tuple[Any, ...]:
    """``paths`` in each of the packages that is imported."""
    packages = [package for package in (_UNIFIED, _STANDALONE) if package in sys.modules]
    return tuple(resolve_name(f"{package}.{path}") for package in packages for path in paths)
