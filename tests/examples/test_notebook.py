"""The notebook runs without Jupyter, and its saved outputs are those of this version."""

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from PIL import Image

import lightning_batchmem
from tests.helpers.notebook import ROOT, code_cells

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
CELLS = {cell["id"]: cell for cell in code_cells(NOTEBOOK)}
# The rows of a plan that depend on how fast the machine is.
OF_SPEED = {"note", "speed"}


def saved_text(name):
    """The text that a cell shows in the file, which may be Markdown."""
    texts = []
    for output in CELLS[name]["outputs"]:
        data = output.get("data", {})
        texts += output.get("text") or data.get("text/markdown") or data.get("text/plain", [])
    return "".join(texts)


def names_in(text):
    """The names of the rows of a plan, and the first cells of the rows of tables."""
    rows = set(re.findall(r"^  ([a-z]+) {2,}\S", text, re.MULTILINE))
    return (rows - OF_SPEED) | set(re.findall(r"^\| ([^|]+?) *\|", text, re.MULTILINE))


def test_the_cells_ran_once_in_their_order_and_each_has_its_output():
    assert [cell["execution_count"] for cell in CELLS.values()] == [*range(1, len(CELLS) + 1)]
    empty = [name for name, cell in CELLS.items() if not cell["outputs"]]
    # It defines the project.
    assert empty == ["project"]
    outputs = [output for cell in CELLS.values() for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result"}
    # Warnings and the progress of a search would be here.
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    # A reader should need no more.
    assert len(CELLS) <= 9


def test_the_outputs_are_of_this_version():
    """RELEASING.md has the command that makes them again."""
    version = lightning_batchmem.__version__
    assert saved_text("imports").startswith(f"lightning-batchmem {version}, torch ")
    # Where the larger size is slower, because the machine had other work, the plan is another one.
    assert "32 -> 48 samples a step, 57 -> 38 steps" in saved_text("fit")


def test_the_figures_are_saved_as_pictures():
    for name in ("search", "steps"):
        (output,) = CELLS[name]["outputs"]
        picture = base64.b64decode(output["data"]["image/png"])
        assert Image.open(io.BytesIO(picture)).size == (640, 480)


def test_the_file_is_small_and_names_nothing_of_the_machine():
    assert NOTEBOOK.stat().st_size < 400_000
    text = NOTEBOOK.read_text()
    metadata = json.loads(text)["metadata"]
    assert metadata["language_info"] == {"name": "python"}
    assert all(cell["metadata"] == {} for cell in CELLS.values())
    assert re.findall(r"/(?:home|root|tmp|usr|work|Users)\b", text) == []


def test_texts_have_at_most_80_columns():
    for name in CELLS:
        assert [line for line in saved_text(name).splitlines() if len(line) > 80] == []


@pytest.mark.slow
def test_the_notebook_runs_and_shows_the_rows_that_are_saved(tmp_path):
    for name in (NOTEBOOK.name, "gpt.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    program = (
        "import json, sys; from pathlib import Path;"
        "from tests.helpers.notebook import run_notebook;"
        "print(json.dumps(list(run_notebook(Path(sys.argv[1])))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / NOTEBOOK.name)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = dict(zip(CELLS, json.loads(done.stdout), strict=True))
    for name in ("fit", "plan"):
        assert names_in(shown[name]) == names_in(saved_text(name)), name
    assert {"training", "memory", "why"} <= names_in(saved_text("fit"))
    assert "peak of the process" in names_in(saved_text("fit"))
    assert shown["search"].startswith("a figure of ")
    assert "\n  32 -> " in shown["objectives"]
    assert {"RTX-4090", "A100-80GB"} <= names_in(saved_text("simulate"))
    if torch.version.cuda is None:
        # A sentence, and no traceback.
        assert re.fullmatch(r"error: .*\bCUDA\b.*", shown["simulate"].strip())
    else:
        assert names_in(shown["simulate"]) == names_in(saved_text("simulate"))
