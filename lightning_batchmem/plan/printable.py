"""Texts of others as a terminal may show them."""

from __future__ import annotations

# Notes and reasons are shorter, and to wrap a word takes the square of its length.
_MOST_CHARACTERS = 2_000


def printable(text: str) -> str:
    """A text in one line, whose control characters are written as escapes."""
    if text.isprintable():
        return text
    return "".join(map(_printable_character, text))


def shown(text: str) -> str:
    """A printable text, which is cut off where it is longer than a person would read."""
    is_long = len(text) > _MOST_CHARACTERS
    return printable(text[:_MOST_CHARACTERS]) + (" ..." if is_long else "")


def _printable_character(character: str) -> str:
    if character.isprintable():
        return character
    # No-break spaces and line ends too.
    return " " if character.isspace() else character.encode("unicode_escape").decode()
