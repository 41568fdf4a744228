"""What is printed: tables, text that a terminal can show, and errors that must not end a run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

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


class StandardOutput:
    """Standard output, which keeps the first error instead of raising it.

    It is a file for rich, whose console ends the process when a pipe is closed.

    Attributes:
        error: the first error; nothing is written after it.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        # A live display of rich replaces the stream by one that prints above the display.
        stream = getattr(sys, "stdout", None)
        self._stream: Any = getattr(stream, "rich_proxied_file", None) or stream
        self.encoding: str = getattr(stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether this is a terminal, which gets colours."""
        try:
            return bool(self._stream.isatty())
        # A closed stream raises an error, and a stream of a project may have no such method.
        except Exception:  # noqa: BLE001
            return False

    def write(self, text: str) -> int:
        """Write a text, unless there was an error before."""
        # A program without a console has no stream.
        if self.error is None and self._stream is not None:
            try:
                encoded = text.encode(self.encoding, "backslashreplace")
                self._stream.write(encoded.decode(self.encoding))
                self._stream.flush()
            # As in isatty.
            except Exception as error:  # noqa: BLE001
                self.error = error
        return len(text)

    def flush(self) -> None:
        """Do nothing: each text is written at once."""


def why_not_printed(text: str) -> str:
    """Print a text.

    Returns:
        Why it could not be printed. It is empty if it was printed, or if nobody reads the pipe.
    """
    output = StandardOutput()
    # A console of rich would show HTML in a notebook instead.
    output.write(f"{text}\n")
    error = output.error
    if isinstance(error, BrokenPipeError | None):
        return ""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def print_or_warn(text: str) -> None:
    """Print a text; a warning says why that fails."""
    if reason := why_not_printed(text):
        warnings.warn(f"Standard output cannot be written: {reason}", stacklevel=2)


# In columns. It is wider than any table, because rich would break the lines of a wider one.
_WIDTH = 10_000


def table_text(headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """A table in Markdown, whose cells are padded so that its columns are aligned.

    Args:
        headings: the names of the columns.
        rows: the cells of each row.
        left: the first columns, which have words. The others have numbers, and end at the right.
    """
    table = Table(box=MARKDOWN)
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="left" if column < left else "right")
    for cells in rows:
        table.add_row(*(shown(cell).replace("|", r"\|") for cell in cells))
    text = StringIO()
    # Without a file, rich writes to standard output even if it has nothing to write, and this may
    # fail. In a notebook it would show the table at once.
    console = Console(
        file=text, width=_WIDTH, color_system=None, markup=False, emoji=False, force_jupyter=False
    )
    console.print(table)
    return text.getvalue().strip()
