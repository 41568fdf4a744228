"""Texts of others as a terminal may show them, and files of others as they may be read."""

from __future__ import annotations

import stat
from pathlib import Path

# Notes and reasons are shorter, and to wrap a word takes the square of its length.
_MOST_CHARACTERS = 2_000

# A plan with a thousand trials is smaller.
_MOST_MIB = 16


def printable(text: str) -> str:
    """A text in one line, whose control characters are written as escapes."""
    if text.isprintable():
        return text
    return "".join(map(_printable_character, text))


def shown(text: str) -> str:
    """A printable text, which is cut off where it is longer than a person would read."""
    is_long = len(text) > _MOST_CHARACTERS
    return printable(text[:_MOST_CHARACTERS]) + (" ..." if is_long else "")


def read_small(path: Path) -> str:
    """The text of a regular file of at most 16 MiB.

    Raises:
        OSError: if there is no such file, or it cannot be read.
        ValueError: if it is another kind of file, larger, or not UTF-8.
    """
    check_regular(path)
    most_bytes = _MOST_MIB * 2**20
    with path.open("rb") as file:
        # The size that a file system tells may be 0, as in /proc.
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it is larger than {_MOST_MIB} MiB")
    return content.decode("utf-8")


def check_regular(path: Path) -> None:
    """Raise a ValueError unless it is a regular file.

    To open a pipe could take forever, and a device may have no end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")


def _printable_character(character: str) -> str:
    if character.isprintable():
        return character
    # No-break spaces and line ends too.
    return " " if character.isspace() else character.encode("unicode_escape").decode()
