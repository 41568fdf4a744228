"""The one way to print a table: in Markdown, which people can read as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from lightning_batchmem.plan.printing import shown

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
