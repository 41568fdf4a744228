"""Every code block of the README and of docs/ runs, and every link and file name exists.

The Python blocks of a page run in order in one namespace, which is empty at first: no page needs
code of another one. Of the commands, those of the package run; the files and modules that others
name must exist, and tests/benchmarks runs those of the benchmarks. The README's two blocks marked
"fresh-start" (installation, tests) run in .ci/run and in a fresh clone instead. tests/gpu runs the
training that the README changes, and the commands of ``simulate``.
"""

import doctest
import importlib
import importlib.util
import pkgutil
import re
import shlex
import shutil
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import lightning_batchmem

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- ([\w :-]+) -->\n\Z")


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    mark: str

    def __str__(self):
        return f"{self.page.name}:{self.line}"


def blocks_of(page):
    text = page.read_text()
    for fence in FENCE.finditer(text):
        mark = MARK.search(text, 0, fence.start())
        # The number is that of the first line inside the block.
        line = text.count("\n", 0, fence.start()) + 2
        yield Block(page, line, fence[1], fence[2], mark[1] if mark else "")


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def test_every_block_is_tested_or_marked():
    languages = ("python", "bash", "yaml", "text", "diff")
    assert {str(block) for block in BLOCKS if block.language not in languages} == set()
    marks = {block.mark for block in BLOCKS if block.language in ("python", "bash") and block.mark}
    assert marks <= {"fresh-start: run", "fresh-start: test"}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
# Lightning issues this warning for the precision in an example.
@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary")
def test_blocks_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    # The module is in sys.modules, so that its classes can be pickled.
    module = types.ModuleType(page.stem.replace("-", "_"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks_of(page):
        if block.language == "python":
            run(block, module)
        elif block.language == "bash" and not block.mark:
            for line in block.text.splitlines():
                check_command(shlex.split(line, comments=True))


def test_the_first_screen_and_the_readme_are_short():
    """The output, after which the text goes on, is the end of the first screen."""
    lines = PAGES[0].read_text().splitlines()
    (shown,) = (block for block in blocks_of(PAGES[0]) if block.text.startswith("BatchFinder: "))
    assert shown.line + len(shown.text.splitlines()) + 2 <= 40
    assert len(lines) <= 100


def run(block, module):
    """Run a Python block; tracebacks have the line numbers of the page."""
    exec(
        compile("\n" * (block.line - 1) + block.text, str(block.page), "exec", dont_inherit=True),
        module.__dict__,
    )


def check_command(words):
    """Run the package's command line; of a script, check that its files exist."""
    match words:
        case ["python", "-m", "lightning_batchmem", *arguments]:
            from lightning_batchmem.__main__ import main

            assert main(arguments) == 0
        case ["python", *arguments]:
            assert [name for name in arguments if "/" in name and not Path(name).is_file()] == []


CONFIGURATIONS = [block for block in BLOCKS if block.language == "yaml" and not block.mark]


@pytest.mark.slow
@pytest.mark.parametrize("block", CONFIGURATIONS, ids=str)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*JsonargparseDeprecationWarning")
def test_yaml_configures_the_cli_example(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # LightningCLI would warn of pytest's arguments.
    monkeypatch.setattr(sys, "argv", ["main.py"])
    example = types.ModuleType("cli_example")
    monkeypatch.setitem(sys.modules, example.__name__, example)
    exec((REPOSITORY / "examples" / "cli" / "main.py").read_text(), example.__dict__)
    Path("block.yaml").write_text(block.text)
    config = REPOSITORY / "examples" / "cli" / "config.yaml"
    arguments = ["--config", str(config), "--config", "block.yaml"]
    cli = example.LightningCLI(example.Classifier, example.Digits, args=arguments, run=False)
    callbacks = yaml.safe_load(block.text)["trainer"]["callbacks"]
    configured = [callback["class_path"].rpartition(".")[2] for callback in callbacks]
    made = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert [name for name in made if name in configured] == configured


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_files_and_modules_exist(page):
    text = page.read_text()
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert importlib.util.find_spec(module), module
    folders = "examples|benchmarks|tests|lightning_batchmem|docs"
    for path in re.findall(rf"`((?:{folders})/[\w./-]+)", text):
        assert (REPOSITORY / path).exists(), path
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        linked = page.parent / link if link else page
        assert linked.exists(), link
        if anchor and linked.suffix == ".md":
            assert anchor in anchors_of(linked), f"{link}#{anchor}"


def anchors_of(page):
    """The anchors that GitHub and MkDocs make of the headings."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pages_are_short():
    lines = {page.name: len(page.read_text().splitlines()) for page in PAGES}
    del lines["README.md"]
    assert len(lines) <= 18
    assert sum(lines.values()) <= 1_367


def test_no_code_is_wider_than_the_column_of_the_site():
    lines = [(str(block), line) for block in BLOCKS for line in block.text.splitlines()]
    assert [where for where, line in lines if len(line) > 80] == []


def test_the_site_has_every_page():
    nav = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]
    listed = {path for entry in nav for path in entry.values()}
    assert listed == {page.name for page in PAGES[1:]} | {"changelog.md"}


def test_examples_in_docstrings():
    packages = pkgutil.walk_packages(lightning_batchmem.__path__, "lightning_batchmem.")
    names = [info.name for info in packages]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    results = [doctest.testmod(module) for module in modules]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0


def test_language_models_get_a_list_of_the_pages(tmp_path):
    # The command in README.md does not install the libraries that build the site.
    pytest.importorskip("mkdocs")
    specification = importlib.util.spec_from_file_location(
        "hooks", REPOSITORY / "docs" / "hooks.py"
    )
    hooks = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(hooks)
    (tmp_path / "page.md").write_text("# Title\n\nWhat is [this](a.md)?\nIt is a page.\n\nMore.\n")
    config = types.SimpleNamespace(
        docs_dir=tmp_path,
        site_dir=tmp_path / "site",
        site_name="name",
        site_description="description",
        nav=[{"A page": "page.md"}, {"Changelog": "changelog.md"}],
    )
    config.site_dir.mkdir()
    hooks.on_post_build(config=config)
    lines = (config.site_dir / "llms.txt").read_text().splitlines()
    assert lines[:3] == ["# name", "", "> description"]
    assert lines[-1] == "- [Title](page.md): What is this? It is a page."
    assert (config.site_dir / "page.md").exists()
