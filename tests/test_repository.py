"""The files for GitHub, for citations and for notebooks."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
import yaml

import lightning_batchmem
from benchmarks.gpu_check import block_to_paste
from tests.helpers.notebook import code_cells, run_notebook

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "colab.ipynb"


def read(path):
    return yaml.safe_load((ROOT / path).read_text())


def test_the_citation_has_the_version():
    citation = read("CITATION.cff")
    assert citation["version"] == lightning_batchmem.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


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


@pytest.fixture
def python_without_the_package(tmp_path):
    """Python of a new environment, which has all packages of this one except this package."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    others = tmp_path / "others"
    others.mkdir()
    for folder in map(Path, sys.path):
        for entry in folder.glob("*") if folder.name in ("site-packages", "dist-packages") else ():
            link = others / entry.name
            if "lightning_batchmem" not in entry.name and not link.is_symlink():
                link.symlink_to(entry)
    (own,) = environment.glob("lib/python*/site-packages")
    (own / "others.pth").write_text(str(others))
    return environment / "bin" / "python"


@pytest.fixture
def clone(tmp_path):
    """What the first two cells of the notebook use, with a quickstart that only imports."""
    clone = tmp_path / "clone"
    for name in ("lightning_batchmem", "examples", "tests/helpers"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    quickstart = clone / "examples" / "quickstart.py"
    imports = re.findall(r"^(?:import|from) .*\n", quickstart.read_text(), re.MULTILINE)
    assert any("lightning_batchmem" in line for line in imports)
    quickstart.write_text("".join(imports))
    return clone


def test_the_notebook_installs_the_package_where_only_its_source_is(
    python_without_the_package, clone
):
    """.ci/run runs the whole quickstart."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONPATH", None)

    def run(*arguments):
        return subprocess.run(
            [python_without_the_package, *arguments],
            # As in IPython, the working directory is on the path of modules, and has the source.
            cwd=clone,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    # pip makes a wheel in an environment of its own, with what pyproject.toml requires for that.
    if run("-m", "pip", "download", "--dest", clone / "fetched", "hatchling").returncode != 0:
        pytest.skip("pip cannot fetch hatchling, which it needs to install the package")
    shown = ("-m", "pip", "show", "lightning-batchmem")
    assert run(*shown).returncode == 1
    ran = run("-m", "tests.helpers.notebook", clone / "examples" / NOTEBOOK.name)
    assert ran.returncode == 0, ran.stdout
    assert f"Location: {python_without_the_package.parents[1]}" in run(*shown).stdout


def test_the_block_to_paste_has_the_tables_between_two_lines():
    first, table, last, request = block_to_paste("table").splitlines()
    assert first == last == "-" * 80
    assert (table, request) == (
        "table",
        "Please paste the block between the two lines into an issue.",
    )
