"""Lightning's two packages, ``lightning.pytorch`` and ``pytorch_lightning``: the same code, different classes."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def lightning_name(owner: object, path: str) -> Any:
    """``path``, such as ``"loops.loop._Loop"``, in the package of the class of ``owner``: a trainer or a loop."""
    modules = [f"{kind.__module__}." for kind in type(owner).__mro__]
    package = next((p for p in _PACKAGES if any(module.startswith(f"{p}.") for module in modules)), _PACKAGES[0])
    return _attribute(package, path)


def in_every_package(*paths: str) -> tuple[Any, ...]:
    """``paths`` in each of the packages that is imported."""
    return tuple(_attribute(package, path) for package in _PACKAGES if package in sys.modules for path in paths)


def _attribute(package: str, path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{package}.{module}"), name)
