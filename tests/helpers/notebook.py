"""Run the code of a notebook without Jupyter, or save its outputs.

    # print what each cell shows
    python -m tests.helpers.notebook examples/notebook.ipynb
    # run it in Jupyter and save the outputs; this needs nbclient and ipykernel
    python -m tests.helpers.notebook --save examples/notebook.ipynb

Save the outputs with a build of torch for CUDA, because the last cell needs one.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 600


def code_cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook that have code."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def run_notebook(path: Path) -> Iterator[str]:
    """Run the cells in order, and yield the text that each of them shows.

    The code must be plain Python.
    """
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for cell in code_cells(path):
        code = ast.parse("".join(cell["source"]))
        last = code.body.pop() if isinstance(code.body[-1], ast.Expr) else None
        name = f"{path.name}, cell {cell['id']}"
        # Jupyter runs a notebook in its folder.
        with contextlib.chdir(path.parent), contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, name, "exec"), namespace)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
                output.write(_view(value))
        yield output.getvalue()


def _view(value: Any) -> str:
    """What a notebook shows for the last expression of a cell."""
    if value is None:
        return ""
    if hasattr(value, "_repr_markdown_"):
        return value._repr_markdown_()
    if hasattr(value, "_repr_png_"):
        return f"a figure of {len(value._repr_png_())} bytes"
    return repr(value)


def save_outputs(path: Path) -> None:
    """Run the cells in Jupyter, with the package beside this file, and save what they show."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=WAIT_SECONDS,
        resources={"metadata": {"path": str(path.parent)}},
        coalesce_streams=True,
        record_timing=False,
    )
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    # It would have the version of Python.
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a notebook.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    path = arguments.path.resolve()
    if arguments.save:
        save_outputs(path)
    else:
        for text in run_notebook(path):
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
