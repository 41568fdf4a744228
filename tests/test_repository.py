"""The files for GitHub, for citations and for notebooks."""

import re
from pathlib import Path

import pytest
import torch
import yaml

import lightning_batchmem
from benchmarks.gpu_check import block_to_paste
from tests.helpers.compared import compared_lists
from tests.helpers.notebook import code_cells, run_notebook

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "colab.ipynb"


def read(path):
    return yaml.safe_load((ROOT / path).read_text())


def test_the_citation_has_the_version():
    citation = read("CITATION.cff")
    assert citation["version"] == lightning_batchmem.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_the_lists_of_compared_trainings_are_the_printed_ones():
    assert (ROOT / "docs" / "compared.md").read_text().endswith(compared_lists())


@pytest.mark.parametrize("name", ["ci", "newest"])
def test_commands_of_a_workflow_exist(name):
    (job,) = read(f".github/workflows/{name}.yml")["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    paths = [path for command in commands for path in re.findall(r"[\w./]+/[\w./]+", command)]
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", ["bug", "feature", "gpu"])
def test_issue_forms(name):
    form = read(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert form["name"]
    assert form["description"]
    names = [field["id"] for field in form["body"]]
    assert len(set(names)) == len(names)
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_the_notebook_runs_its_commands_and_skips_the_device(monkeypatch, capsys):
    """.ci/run runs the notebook as it is."""
    commands = []

    def run(command, **arguments):
        commands.append(command[1:])
        assert arguments["cwd"] == ROOT
        return type("Done", (), {"stdout": "printed", "returncode": 0})

    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run_notebook(NOTEBOOK)
    assert commands == [["examples/quickstart.py"]]
    assert capsys.readouterr().out == "printed\nNo CUDA device, so gpu_check is skipped.\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run_notebook(NOTEBOOK)
    assert commands[1:] == [["examples/quickstart.py"], ["-m", "benchmarks.gpu_check"]]
    # A reader should need no more.
    assert len(code_cells(NOTEBOOK)) == 3


def test_the_block_to_paste_has_the_tables_between_two_lines():
    first, table, last, request = block_to_paste("table").splitlines()
    assert first == last == "-" * 80
    assert (table, request) == (
        "table",
        "Please paste the block between the two lines into an issue.",
    )
