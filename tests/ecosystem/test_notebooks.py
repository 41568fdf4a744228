"""Figures and texts in Jupyter, whose kernel is that of this environment."""

import pytest

from tests.ecosystem.twice import MARKS, MISSING

pytestmark = MARKS
PLAN = """
from lightning_batchmem import Plan, Trial
from lightning_batchmem.plan.records import Chosen, TrialMemory

trials = tuple(Trial(size, "ok", TrialMemory({"forward": 2**20 * size})) for size in (2, 4))
plan = Plan(Chosen(4, "memory", ""), trials, 2**30)
"""


PROGRESS = """
from lightning_batchmem.plan.printing import print_or_warn
from lightning_batchmem.search.progress import SearchProgress

with SearchProgress(enabled=True):
    pass
print_or_warn("the plan")
"""


def outputs_of(*codes):
    """What the last cell of a notebook shows."""
    nbformat = pytest.importorskip("nbformat", reason=MISSING)
    nbclient = pytest.importorskip("nbclient", reason=MISSING)
    pytest.importorskip("ipykernel", reason=MISSING)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in codes])
    nbclient.NotebookClient(
        notebook, kernel_name="python3", timeout=120, coalesce_streams=True
    ).execute()
    return notebook.cells[-1].outputs


@pytest.mark.parametrize("first", ["", "%matplotlib inline", "from matplotlib import pyplot"])
def test_a_figure_is_shown_once(first):
    (output,) = outputs_of(f"{first}\n{PLAN}", "plan.plot()")
    assert output["data"]["image/png"].startswith("iVBOR")


def test_a_search_writes_plain_lines():
    (output,) = outputs_of(PROGRESS)
    first, last, plan = output["text"].splitlines()
    assert (output["name"], plan) == ("stdout", "the plan")
    assert first == "BatchFinder: searching for a batch size."
    assert last == "BatchFinder: 0 s, 0 runs"
