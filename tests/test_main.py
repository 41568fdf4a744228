"""``python -m lightning_batchmem`` on the files of a real run, and on damaged ones."""

import importlib
import inspect
import io
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lightning_batchmem.batch_finder
import lightning_batchmem.memory_profiler
from lightning_batchmem import BatchFinder, MemoryProfiler, Plan
from lightning_batchmem.__main__ import main
from lightning_batchmem.profile.step_csv import read_rows
from tests.helpers.fake_device import FakeDevice
from tests.helpers.lawful import MIB, Lawful, law, quiet_trainer

ALL_FIGURES = ["memory_over_steps.png", "search.png"]
FILES = ("memory_per_batch.csv", "batch_plan.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run that searched (400 samples) and trained 13 steps."""
    directory = tmp_path_factory.mktemp("finished")
    device_memory = FakeDevice(budget_bytes=500 * MIB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning_batchmem.BatchFinder, "device_memory", lambda *_: device_memory)
        patch.setattr(
            lightning_batchmem.memory_profiler,
            "device_memory_for",
            lambda device, quick: device_memory,
        )
        trainer = quiet_trainer(
            BatchFinder(), MemoryProfiler(), default_root_dir=directory, max_epochs=1
        )
        trainer.fit(Lawful(device_memory, law))
    return directory


@pytest.fixture
def log_dir(finished, tmp_path):
    """A copy that a test may change; its name would be markup to Rich."""
    return shutil.copytree(finished, tmp_path / "run[" / "b]x")


def drawn(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.png"))


@pytest.mark.parametrize("command", [["draw"], []])
def test_a_finished_run(log_dir, capsys, command):
    assert main([*command, str(log_dir)]) == 0
    assert drawn(log_dir) == ALL_FIGURES
    output = capsys.readouterr()
    assert sorted(output.out.splitlines()) == [str(log_dir / name) for name in ALL_FIGURES]
    assert output.err == ""


def test_another_directory_and_format(log_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(log_dir.rglob("*"))
    assert main(["draw", str(log_dir), "--out", "figures", "--format", "svg"]) == 0
    assert (tmp_path / "figures" / "memory_over_steps.svg").read_text().startswith("<?xml")
    assert sorted(log_dir.rglob("*")) == before


def test_figures_of_numbered_files_get_their_number(log_dir):
    for name in FILES:
        shutil.copy(log_dir / name, (log_dir / name).with_stem(f"{Path(name).stem}_1"))
    (log_dir / "below").mkdir()
    shutil.copy(log_dir / "batch_plan.json", log_dir / "below")
    assert main(["draw", str(log_dir)]) == 0
    numbered = [name.replace(".png", "_1.png") for name in ALL_FIGURES]
    assert drawn(log_dir) == sorted([*ALL_FIGURES, *numbered, "below/search.png"])


def put(name, value):
    """A function that puts a value into a field of a JSON text."""
    return lambda text: re.sub(rf'"{name}": [^,\n]+', f'"{name}": {value}', text)


DAMAGE = {
    "cut JSON": ("batch_plan.json", lambda text: text[:100]),
    "deep JSON": ("batch_plan.json", lambda text: "[" * 100_000),
    "JSON of something else": ("batch_plan.json", lambda text: "[]"),
    "text for a size": ("batch_plan.json", put("batch_size", '"8"')),
    "text for a limit": ("batch_plan.json", put("limit_bytes", '"[b]x"')),
    "infinite limit": ("batch_plan.json", put("limit_bytes", "1e999")),
    "infinite size": ("batch_plan.json", put("batch_size", "1e999")),
    "another\nCSV": ("memory_per_batch.csv", lambda text: "a,b\n1,2\n"),
    "empty CSV": ("memory_per_batch.csv", lambda text: ""),
    "step of 400 digits": (
        "memory_per_batch.csv",
        lambda text: text.replace("\n1,", f"\n{'9' * 400},"),
    ),
}


def test_a_damaged_file_is_one_line_and_the_rest_is_drawn(log_dir, capsys):
    damaged = [log_dir / "batch_plan_bytes.json"]
    damaged[0].write_bytes(b"\xff")
    for name, (file_name, damage) in DAMAGE.items():
        path = log_dir / file_name
        damaged.append(path.with_stem(f"{path.stem}_{name}"))
        damaged[-1].write_text(damage(path.read_text()))
    assert main(["draw", str(log_dir)]) == 0
    lines = capsys.readouterr().err.splitlines()
    files = [re.split(" could not be drawn: | has nothing to draw$", line)[0] for line in lines]
    assert sorted(files) == sorted(str(path).replace("\n", " ") for path in damaged)
    assert drawn(log_dir) == ALL_FIGURES


def test_a_run_that_was_killed(log_dir):
    path = log_dir / "memory_per_batch.csv"
    whole = read_rows(path)
    lines = path.read_text().splitlines(keepends=True)
    # The cell is empty.
    assert whole[0]["peak_reserved_mib"] is None
    # The file has four steps, and a piece of the fifth.
    path.write_text("".join(lines[:5]) + lines[5][:30])
    assert read_rows(path) == whole[:4]
    # The fifth step has all columns, but only half of its last number.
    path.write_text("".join(lines[:5]) + lines[5].rstrip()[:-2])
    assert read_rows(path) == whole[:4]


def test_a_path_that_standard_output_cannot_show_is_escaped(finished, tmp_path, monkeypatch):
    log_dir = shutil.copytree(finished, tmp_path / "größe")
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["draw", str(log_dir)]) == 0
    output.flush()
    assert output.buffer.getvalue().count(rb"/gr\xf6\xdfe/") == len(ALL_FIGURES)


def test_nothing_to_draw(tmp_path, capsys):
    assert main(["draw", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"No figure was drawn from {tmp_path}; it needs a memory_per_batch.csv or "
    )
    with pytest.raises(SystemExit) as error:
        main(["draw", str(tmp_path / "missing")])
    assert error.value.code == 2
    assert "LOG_DIR must be a directory, got" in capsys.readouterr().err


def test_no_place_to_write_and_no_matplotlib(log_dir, monkeypatch, capsys):
    assert main(["draw", str(log_dir), "--out", str(log_dir / FILES[0])]) == 1
    *lines, _ = capsys.readouterr().err.splitlines()
    assert [str(log_dir / FILES[0]) in line for line in lines] == [True] * 2
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["draw", str(log_dir)]) == 1
    message = 'figures need matplotlib: pip install "lightning-batchmem[plot]"\n'
    assert capsys.readouterr().err == message


# --- find and compare

PROJECT = """
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

def make():
    return BoringModel(), DataLoader(RandomDataset(32, 100), batch_size=3)

def broken():
    return BoringModel(), DataLoader(RandomDataset(31, 100), batch_size=3)

class Wider(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 2))

def wider():
    return Wider(), DataLoader(RandomDataset(32, 100), batch_size=3)

def few_samples():
    return BoringModel(), DataLoader(RandomDataset(32, 4), batch_size=3)

variants = {"plain": {}}
wrong = {1: {}}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "my_project.py").write_text(PROJECT)
    (tmp_path / "fails.py").write_text("int('no')")
    (tmp_path / "imports.py").write_text("import no_such_module")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_project", raising=False)
    return tmp_path


def test_find(project, capsys):
    options = "--max-batch-size=8 --limit=4GiB --trainer accelerator=cpu --trainer max_epochs=2"
    files = set(project.iterdir())
    assert main(["find", "my_project:make", *options.split(), "--out", "plan.json"]) == 0
    plan = Plan.from_json(Path("plan.json").read_text())
    assert (plan.batch_size, plan.limit_bytes) == (8, 4096 * MIB)
    # The plan follows the line of progress.
    assert capsys.readouterr().out.endswith(f"\n{plan}\n")
    assert {path.name for path in set(project.iterdir()) - files} - {"__pycache__"} == {"plan.json"}


def test_the_installed_program_finds_modules_of_the_current_directory(project, monkeypatch, capsys):
    scripts = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    target = scripts["project"]["scripts"]["lightning-batchmem"]
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(project)])
    monkeypatch.setattr(
        sys, "argv", ["lightning-batchmem", "find", "my_project:make", "--limit", "1MiB"]
    )
    module_name, _, name = target.partition(":")
    assert getattr(importlib.import_module(module_name), name)() == 1
    # An error of the package is one line.
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith("find failed: memory_limit must be above the ")


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("my_project:broken", RuntimeError, "mat1 and mat2 shapes cannot be multiplied"),
        ("fails:make", ValueError, "invalid literal for int"),
        ("imports:make", ModuleNotFoundError, "No module named 'no_such_module'"),
    ],
)
def test_an_error_of_the_user_keeps_its_traceback(project, target, error, message):
    with pytest.raises(error, match=message):
        main(["find", target])


def test_a_directory_with_the_name_of_a_command_is_not_drawn(project, capsys):
    (project / "find").mkdir()
    assert main(["find", "my_project:make", "--limit", "1MiB"]) == 1
    assert "find failed: memory_limit" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([""])


def test_an_argument_that_the_trainer_refuses_is_one_line(project, capsys):
    assert main(["find", "my_project:make", "--trainer", "accelerator=banana"]) == 1
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert re.match("find failed: .*banana", last_line)


def test_compare(project, capsys):
    options = "--max-batch-size 8 --trainer accelerator=cpu --variants variants --out table.md"
    assert main(["compare", "my_project:make", *options.split()]) == 0
    assert "fastest under the limit: plain\n" in capsys.readouterr().out
    assert Path("table.md").read_text().startswith("| variant | fixed MiB |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("find my_project:mak", "a function of my_project, got 'mak'; it has: make, broken, "),
        ("find my_project", "a function of my_project, got ''; it has: make, broken, "),
        (
            "find my_projec:make",
            "must name a module, got 'my_projec'; modules in {cwd}: fails, imports, my_project",
        ),
        ("find :make", "must name a module, got ''; modules in {cwd}: "),
        ("compare my_project:make --variants none", "a function of my_project, got 'none'"),
        ("find my_project:make --objective speed", 'must be one of "memory", "throughput"'),
        ("find my_project:make --trainer 1", "options must be NAME=VALUE, got '1'"),
        ("find my_project:make --trainer foo=1", "an argument of the Trainer, got 'foo'"),
        ("find my_project:variants", "must name a function, got dict 'my_project:variants'"),
        ("find .my_project:make", "must name a module, got '.my_project'; modules in {cwd}: "),
        ("find my_project:make --out no/plan.json", "existing directory, got 'no/plan.json'"),
        ("find my_project:make --out .", "existing directory, got '.'"),
        ("compare my_project:make --variants make", "variants must be a dictionary, got function"),
        ("compare my_project:make --variants wrong", "of arguments each, got 1: {{}}"),
        ("find my_project:make --no-such 1", "unrecognized arguments: --no-such 1"),
        ("fin my_project:make", "(choose from"),
        ("check my_project:make", "arguments are required: --reference"),
        ("check my_project:make --reference no.json", "a file, got 'no.json'; --update writes it"),
        ("check my_project:make --reference . --update", "existing directory, got '.'"),
        ("check my_project:make --reference fails.py", "fails.py must be a reference of the"),
        ("check my_project:mak --reference no.json --update", "a function of my_project, got"),
        ("check my_project:make --reference a --tolerance 1x", "such as 1% or 0.01, got '1x'"),
        ("check my_project:make --reference a --tolerance=-1%", "such as 1% or 0.01, got '-1%'"),
        ("check my_project:make --reference a --tolerance nan", "such as 1% or 0.01, got 'nan'"),
        (
            "check my_project:make --reference a --update --trainer foo=1",
            "an argument of the Trainer, got 'foo'",
        ),
    ],
)
def test_wrong_arguments_are_one_line(project, capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        main(arguments.split())
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(cwd=project) in line


# --- check


def check(target, *arguments):
    return main(["check", f"my_project:{target}", "--reference", "memory.json", *arguments])


def test_a_reference_is_written_and_compared(project, capsys):
    assert check("make", "--update") == 0
    assert capsys.readouterr().out == "memory.json\n"
    content = json.loads(Path("memory.json").read_text())
    assert list(content["phases"]) == ["backward", "forward", "optimizer_step"]
    assert check("make", "--tolerance", "0%") == 0
    assert capsys.readouterr().out == "equal to memory.json within 0 %\n"
    assert check("wider", "--tolerance", "1%") == 1
    *slopes, fixed = capsys.readouterr().out.splitlines()
    number = r"[\d,]+"
    pattern = (
        rf"(\w+ ?\w+): {number} -> {number} bytes a sample, \+[\d.]+ %, largest growth in layer.*"
    )
    assert [re.fullmatch(pattern, line)[1] for line in slopes] == ["forward", "backward"]
    assert re.match(r"fixed part \(\w+ ?\w+\): .* bytes, \+.* %, largest growth in layer", fixed)
    assert check("wider", "--tolerance", "100") == 0
    text = Path("memory.json").read_text()
    other = text.replace('"lightning_batchmem": "', '"lightning_batchmem": "9')
    Path("memory.json").write_text(other)
    assert check("make") == 0
    # The versions differ.
    error = capsys.readouterr().err
    assert "The reference was measured with lightning_batchmem 9" in error


def test_a_smaller_model_passes_and_the_reference_can_be_lowered(project, capsys):
    assert check("wider", "--update") == 0
    written = Path("memory.json").read_text()
    capsys.readouterr()
    assert check("make") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in lines} > {"forward", "backward"}
    assert last == "The reference can be lowered: --update writes it again."
    assert Path("memory.json").read_text() == written
    assert check("make", "--update") == 0
    assert check("wider") == 1


def test_what_cannot_be_measured_is_not_reported_as_grown(project, capsys):
    assert check("make", "--update") == 0
    capsys.readouterr()
    assert check("few_samples") == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "check failed: the data must have batches of 8 samples, got at most 4 (dataset)"
    )
    assert check("make", "--trainer", "accelerator=gpu") == 2
    assert "check failed: accelerator must be cpu" in capsys.readouterr().err
    assert check("broken") == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert "mat1 and mat2 shapes cannot be multiplied" in error.splitlines()[-1]


def test_two_processes_write_the_same_file(project):
    command = [sys.executable, "-m", "lightning_batchmem", "check", "my_project:wider"]
    done = subprocess.run(
        [*command, "--reference", "other.json", "--update"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "other.json\n"), done.stderr
    assert check("wider", "--update") == 0
    # The process of the tests has run other models before.
    assert Path("memory.json").read_bytes() == Path("other.json").read_bytes()


@pytest.mark.parametrize("command", ["find", "compare"])
def test_help_describes_every_option(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in inspect.signature(BatchFinder).parameters.keys() - {"search_on_resume", "verbose"}:
        option = f"--{name.replace('_', '-')}"
        # Since Python 3.13, the value is named once for all names of an option.
        names = rf"{option}( VALUE, --limit|, --limit)?"
        assert re.search(rf"{names} VALUE \"?\w+", text), name
    assert "--max-batch-size VALUE the largest size to consider, in samples. --min" in text
    assert "within 5 % of the best samples per second that were measured. --memory" in text
    assert "--plan VALUE a plan of an earlier fit to use again" in text
