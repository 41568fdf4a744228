"""The files for GitHub and for citations."""

import re
from pathlib import Path

import pytest
import yaml

import lightning_batchmem
from benchmarks.gpu_check import block_to_paste

ROOT = Path(__file__).parents[1]


def read(path):
    return yaml.safe_load((ROOT / path).read_text())


def test_the_citation_has_the_version():
    citation = read("CITATION.cff")
    assert citation["version"] == lightning_batchmem.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_one_sentence_says_everywhere_what_the_package_does():
    project = (ROOT / "pyproject.toml").read_text()
    (tagline,) = re.findall(r'^description = "(.*)"$', project, re.MULTILINE)
    assert read("CITATION.cff")["title"] == f"lightning-batchmem: {tagline}"
    assert f'\nsite_description: "{tagline}"\n' in (ROOT / "mkdocs.yml").read_text()
    assert f"\n**{tagline}.**\n" in (ROOT / "README.md").read_text()


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


def test_the_block_to_paste_has_the_tables_between_two_lines():
    first, table, last, request = block_to_paste("table").splitlines()
    assert first == last == "-" * 80
    assert (table, request) == (
        "table",
        "Please paste the block between the two lines into an issue.",
    )
