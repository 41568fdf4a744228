"""Run the code of a notebook without Jupyter: ``python -m tests.helpers.notebook FILE``."""

import json
import sys
from pathlib import Path
from typing import Any


def code_cells(path: Path) -> list[str]:
    """The code of a notebook, cell by cell; it must be plain Python."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_notebook(path: Path) -> dict[str, Any]:
    """Run the cells in order, in one namespace."""
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(code_cells(path), start=1):
        exec(compile(cell, f"{path.name}, code cell {number}", "exec"), namespace)
    return namespace


if __name__ == "__main__":
    run_notebook(Path(sys.argv[1]).resolve())
