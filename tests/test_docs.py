"""Every code block of the README and of docs/ runs.

Python blocks of a page run in their order in one namespace, as a reader would paste them; ``Classifier`` is that of the
first block of Getting started, and ``module`` one of it. Commands run where they take seconds; of others it is checked
that they could. The two blocks of the README that make an environment, and train or test in it, carry a mark, and are
the only ones left out: fresh-start, the script that reads the mark, runs both in a clone in an empty folder, and
.ci/run runs the tests by the second.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
import runpy
import shlex
import shutil
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
START = REPOSITORY / "docs" / "getting-started.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- ([\w :-]+) -->\n\Z")
OURS = ("lightning_batchmem", "benchmarks")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary"),  # Lightning's own
    # as in tests/examples/test_cli.py: Lightning's own calls of jsonargparse
    pytest.mark.filterwarnings(r"ignore:\s*By default only one JsonargparseDeprecationWarning"),
    pytest.mark.filterwarnings(r"ignore:\s*set_config_read_mode was deprecated in v4\.39"),
    pytest.mark.filterwarnings(r"ignore:\s*``ArgumentParser\.add_instantiator`` was deprecated in v4\.49"),
    pytest.mark.filterwarnings(r"ignore:\s*``instantiate_classes`` was deprecated in v4\.49"),
    pytest.mark.filterwarnings(r"ignore:\s*skip_none parameter was deprecated in v4\.49"),
]


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for fence in FENCE.finditer(text):
        mark = MARK.search(text, 0, fence.start())
        line = text.count("\n", 0, fence.start()) + 2  # of the first line inside
        yield Block(page, line, fence[1], fence[2], mark[1] if mark else "")


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUNNABLE = [
    block for block in BLOCKS if block.language in ("python", "bash") and not block.mark.startswith("fresh-start")
]


def run(block: Block, namespace: dict[str, object]) -> None:
    """Run a Python block; the lines of a traceback are those of the page."""
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec", dont_inherit=True)
    exec(code, namespace)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads of tiny networks mostly wait for each other, for long where the machine has other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_each_block_is_of_a_kind_that_is_looked_at() -> None:
    assert {str(block) for block in BLOCKS if block.language not in ("python", "bash", "yaml", "text")} == set()
    fences = sum(len(re.findall(r"^\s*```", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(BLOCKS)


def test_only_what_fresh_start_runs_is_left_out() -> None:
    marked = [(block.page.name, block.mark) for block in BLOCKS if block.mark.startswith("fresh-start")]
    assert marked == [("README.md", "fresh-start: run"), ("README.md", "fresh-start: test")]


@pytest.mark.parametrize("page", dict.fromkeys(block.page for block in RUNNABLE), ids=lambda page: page.name)
@pytest.mark.usefixtures("one_thread")
def test_the_blocks_of_a_page_run_in_their_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    module = types.ModuleType(page.stem.replace("-", "_"))  # a real one, so that its classes can be pickled
    monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace = module.__dict__
    if page != START:
        run(next(block for block in blocks_of(START) if block.language == "python"), namespace)
        namespace["module"] = namespace["Classifier"]()
    printed = ""
    for block in blocks_of(page):
        if block.language == "python":
            capsys.readouterr()
            run(block, namespace)
            printed = capsys.readouterr().out
        elif block.mark == "prints":
            assert block.text == printed, f"{block} does not show what the block above it prints"
        elif block.language == "bash" and not block.mark:
            for command in block.text.splitlines():
                check_command(command, monkeypatch, capsys)


def check_command(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the command line of the package; look whether other commands could run, and fail for one of no known kind."""
    match shlex.split(command.split("#")[0]):
        case ["python", "-m", "lightning_batchmem", log_dir]:
            from lightning_batchmem.__main__ import main

            assert main([log_dir]) == 0
        case ["python", "-m", module, *options] if module.split(".")[0] in OURS:
            known = help_of(module, monkeypatch, capsys)
            assert not [option for option in options if option.startswith("--") and option not in known], command
        case ["python", script, *options]:
            compile(Path(script).read_text(), script, "exec")
            assert all(Path(option).is_file() for option in options if "/" in option), command
        case ["python3", "-m", "venv", _]:
            pass
        case [pip, "install", *options] if pip.endswith("pip"):
            check_installable(options)
        case []:
            pass
        case _:
            pytest.fail(f"nobody knows how to check {command!r}")


def help_of(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [module, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0
    return capsys.readouterr().out


def check_installable(options: list[str]) -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if "-c" in options:
        assert (REPOSITORY / options[options.index("-c") + 1]).is_file()
    (target,) = (option for option in options if option.startswith("."))
    assert set(re.fullmatch(r"\.\[([\w,]+)\]", target)[1].split(",")) <= set(extras), target


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_yaml_is_a_configuration_of_the_cli_example(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["main.py"])  # LightningCLI warns of pytest's arguments
    spec = importlib.util.spec_from_file_location("cli_example", REPOSITORY / "examples" / "cli" / "main.py")
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)
    spec.loader.exec_module(example)
    (tmp_path / "block.yaml").write_text(block.text)
    arguments = ["--config", str(REPOSITORY / "examples" / "cli" / "config.yaml"), "--config", "block.yaml"]
    cli = example.LightningCLI(example.Classifier, example.Digits, args=arguments, run=False)
    asked = [
        callback["class_path"].rpartition(".")[2] for callback in yaml.safe_load(block.text)["trainer"]["callbacks"]
    ]
    made = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert [name for name in made if name in asked] == asked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_in_the_repository_is_there(page: Path) -> None:
    text = page.read_text()
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert importlib.util.find_spec(module), module
    for path in re.findall(r"`((?:examples|benchmarks|tests|lightning_batchmem|docs)/[\w./-]+)", text):
        assert (REPOSITORY / path).exists(), path
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), link


def test_the_site_has_every_page() -> None:
    nav = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]
    listed = {path for entry in nav for path in entry.values()}
    assert listed == {page.name for page in PAGES if page.parent.name == "docs"} | {"changelog.md"}


@pytest.mark.parametrize("name", ["batch_finder", "memory_profiler", "plan", "records"])
def test_examples_in_the_docstrings_of_the_api_page(name: str) -> None:
    module = importlib.import_module(f"lightning_batchmem.{name}")
    assert doctest.testmod(module).failed == 0
