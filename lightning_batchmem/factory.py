"""Callbacks without a change of code, through entry points of Lightning.

Lightning calls the entry points in every Trainer, so this module imports little.
"""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Iterable
from importlib import import_module
from typing import Any

VARIABLE = "LIGHTNING_BATCHMEM"

_CALLBACKS = {"profile": ("MemoryProfiler",), "find": ("BatchFinder", "MemoryProfiler")}


def callbacks() -> list[Any]:
    """Return the callbacks that :data:`VARIABLE` names, for a Trainer of ``lightning.pytorch``.

    ``profile`` is a MemoryProfiler, ``find`` a BatchFinder too. Options follow as
    ``find:memory_limit=0.9,target_batch_size=256``.

    Returns:
        At most one callback, which adds the others in its ``setup`` unless the Trainer has them.

    Raises:
        ValueError: for another word or option.
    """
    return _callbacks("lightning_batchmem")


def callbacks_of_pytorch_lightning() -> list[Any]:
    """Return the same as :func:`callbacks`, for a Trainer of ``pytorch_lightning``."""
    return _callbacks("lightning_batchmem.pytorch_lightning")


def parse_options(texts: Iterable[str]) -> dict[str, Any]:
    """Options from texts such as ``"memory_limit=0.9"``; see :func:`parse_value`."""
    pairs = [(text, *text.partition("=")) for text in texts]
    if wrong := [text for text, _, equals, _ in pairs if not equals]:
        raise ValueError(f"options must be NAME=VALUE, got {wrong[0]!r}")
    return {name.strip(): parse_value(value.strip()) for _, name, _, value in pairs}


def parse_value(text: str) -> Any:
    """The Python literal in ``text``, or the text itself if it is no literal.

    ``true``, ``false`` and ``none`` count as literals.
    """
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text


def _callbacks(home: str) -> list[Any]:
    if not (setting := os.environ.get(VARIABLE, "").strip()):
        return []
    word, _, rest = setting.partition(":")
    if word not in _CALLBACKS:
        words = ", ".join(f'"{known}"' for known in _CALLBACKS)
        raise ValueError(f"{VARIABLE} must be one of {words}, got {word!r}")
    module = import_module(home)
    hooks = import_module("lightning_batchmem._lightning.hooks")
    first, *others = (getattr(module, name) for name in _CALLBACKS[word])
    options = parse_options(rest.split(",") if rest else ())
    names = list(inspect.signature(first).parameters)
    if unknown := [name for name in options if name not in names]:
        raise ValueError(
            f"{VARIABLE}={word} must have options of {first.__name__} ({', '.join(names)}), got"
            f" {unknown[0]!r}"
        )
    adder = vars(module).get("CallbackAdder", hooks.CallbackAdder)
    return [adder([first(**options), *(other() for other in others)])]
