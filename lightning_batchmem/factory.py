"""Callbacks without a change of code, through entry points of Lightning.

Lightning calls the entry points in every Trainer, so this module imports little.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable
from typing import Any

VARIABLE = "LIGHTNING_BATCHMEM"


def callbacks() -> list[Any]:
    """Return the callbacks that :data:`VARIABLE` names, for a Trainer of ``lightning.pytorch``.

    ``profile`` is a MemoryProfiler, ``find`` a BatchFinder too, and ``apply`` a BatchFinder that
    only applies its plan. Options follow as ``find:memory_limit=0.9,target_batch_size=256``.

    Returns:
        At most one callback, which adds the others in its ``setup`` unless the Trainer has them.

    Raises:
        ValueError: for another word or option.
    """
    if not _setting():
        return []
    from lightning_batchmem.batch_finder import BatchFinder
    from lightning_batchmem.callback_adder import CallbackAdder
    from lightning_batchmem.memory_profiler import MemoryProfiler

    return [CallbackAdder(_callbacks_of_setting(BatchFinder, MemoryProfiler))]


def callbacks_of_pytorch_lightning() -> list[Any]:
    """Return the same as :func:`callbacks`, for a Trainer of ``pytorch_lightning``."""
    if not _setting():
        return []
    from lightning_batchmem.pytorch_lightning import BatchFinder, CallbackAdder, MemoryProfiler

    return [CallbackAdder(_callbacks_of_setting(BatchFinder, MemoryProfiler))]


def parse_options(texts: Iterable[str]) -> dict[str, Any]:
    """Options from texts such as ``"memory_limit=0.9"``; see :func:`parse_value`.

    Raises:
        ValueError: for a text without an equals sign.
    """
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"options must be NAME=VALUE, got {text!r:.80}")
        options[name.strip()] = parse_value(value.strip())
    return options


def parse_value(text: str) -> Any:
    """Parse ``text`` as a Python literal, or return it unchanged.

    ``true``, ``false`` and ``none`` count as literals.
    """
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    # These are all the errors of malformed and of deeply nested texts.
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _setting() -> str:
    return os.environ.get(VARIABLE, "").strip()


def _callbacks_of_setting(finder_class: Any, profiler_class: Any) -> list[Any]:
    """The callbacks that the variable names; its options go to the first one."""
    word, _, texts = _setting().partition(":")
    classes_by_word = {
        "profile": [profiler_class],
        "find": [finder_class, profiler_class],
        "apply": [finder_class],
    }
    if word not in classes_by_word:
        words = ", ".join(f'"{known_word}"' for known_word in classes_by_word)
        raise ValueError(
            f"{VARIABLE} must be one of {words}, perhaps with options as in"
            f" find:max_batch_size=64, got {word!r:.80}"
        )
    first_class, *other_classes = classes_by_word[word]
    try:
        options = parse_options(texts.split(",") if texts else ())
        if word == "apply":
            options["apply"] = True
        # A script that runs without the variable has to run with it too.
        first = first_class.optional(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{VARIABLE}={word}: {error}") from error
    return [first, *(kind.optional() for kind in other_classes)]
