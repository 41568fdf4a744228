"""Figures in Jupyter, whose kernel is that of this environment."""

import pytest

from tests.ecosystem.twice import MARKS, MISSING

pytestmark = MARKS
PLAN = """
from lightning_batchmem import Plan, Trial
from lightning_batchmem.plan.records import Chosen, TrialMemory

trials = tuple(Trial(size, "ok", TrialMemory({"forward": 2**20 * size})) for size in (2, 4))
plan = Plan(Chosen(4, "memory", ""), trials, 2**30)
"""


@pytest.mark.parametrize("first", ["", "%matplotlib inline", "from matplotlib import pyplot"])
def test_a_figure_is_shown_once(first):
    nbformat = pytest.importorskip("nbformat", reason=MISSING)
    nbclient = pytest.importorskip("nbclient", reason=MISSING)
    pytest.importorskip("ipykernel", reason=MISSING)
    cells = map(nbformat.v4.new_code_cell, (f"{first}\n{PLAN}", "plan.plot()"))
    notebook = nbformat.v4.new_notebook(cells=list(cells))
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    (output,) = notebook.cells[-1].outputs
    assert output["data"]["image/png"].startswith("iVBOR")
