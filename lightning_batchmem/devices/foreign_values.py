"""Values from what is not part of this package: batches, optimizers, loggers, the kernel, drivers.

Reading any of them may raise any error. A run that would go on without the value goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lightning.pytorch.utilities import rank_zero_warn

T = TypeVar("T")

# The subjects that could not be read in the current run.
_warned: set[str] = set()


def begin_run() -> None:
    """Let each subject be warned of once more."""
    _warned.clear()


def value_or_none(subject: str, read: Callable[..., T | None], *arguments: Any) -> T | None:
    """Return what a function returns, or None, with one warning for a run, after any error.

    Args:
        subject: what is read, as the beginning of a sentence.
        read: a function that returns the value.
        *arguments: its arguments.
    """
    try:
        return read(*arguments)
    # The code that runs here belongs to others.
    except Exception as error:  # noqa: BLE001
        if subject not in _warned:
            rank_zero_warn(f"{subject} cannot be read: {error_text(error)}")
            _warned.add(subject)
        return None


def attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes that an object itself has: no copy of them, unless there are none."""
    attributes = value_or_none("The attributes of an object", getattr, value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, unless its class refuses notes."""
    value_or_none("An error", BaseException.add_note, error, note)


def error_text(error: BaseException) -> str:
    """Return the type of an error, and the first line of its text.

    Source: the text of `torch._utils.ExceptionWrapper`, 2.5.1 to 2.14, ends with the error that a
    worker has raised.
    """
    try:
        lines = str(error).strip().splitlines()
    # An error may have been made without what its text needs.
    except Exception:  # noqa: BLE001
        lines = []
    if lines and "in DataLoader worker process" in lines[0]:
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
