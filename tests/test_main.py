"""``python -m lightning_batchmem`` on the files of a real run, and on damaged ones."""

import errno
import importlib
import inspect
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import lightning_batchmem.__main__
import lightning_batchmem.batch_finder
import lightning_batchmem.memory_profiler
from lightning_batchmem import BatchFinder, MemoryProfiler, Plan
from lightning_batchmem.__main__ import main, run_installed
from lightning_batchmem.check import MeasuredStep, PhaseMemory
from lightning_batchmem.plan.json_fields import to_json
from lightning_batchmem.profile.columns import read_rows
from lightning_batchmem.script import Script
from lightning_batchmem.simulated_gpu import command
from lightning_batchmem.simulated_gpu.launch import AS_THE_PROGRAM, Outcome, World
from tests.helpers.fake_device import FakeDevice
from tests.helpers.lawful import MIB, SAVED_PLAN, Lawful, law, quiet_trainer
from tests.helpers.profiled import OWN_LOGS

ALL_FIGURES = ["memory_over_steps.png", "search.png"]
FILES = ("memory_per_batch.csv", "batch_plan.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run that searched (400 samples) and trained 13 steps."""
    directory = tmp_path_factory.mktemp("finished")
    device_memory = FakeDevice(available_bytes=500 * MIB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning_batchmem.BatchFinder, "device_memory", lambda *_: device_memory)
        patch.setattr(
            lightning_batchmem.memory_profiler,
            "device_memory_for",
            lambda device, quick: device_memory,
        )
        trainer = quiet_trainer(
            BatchFinder(objective="memory"),
            MemoryProfiler(),
            default_root_dir=directory,
            max_epochs=1,
        )
        trainer.fit(Lawful(device_memory, law))
    return directory


@pytest.fixture(autouse=True)
def levels_are_restored():
    """The program sets the levels of these loggers."""
    names = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def log_dir(finished, tmp_path):
    """A copy that a test may change; its name would be markup to Rich."""
    return shutil.copytree(finished / OWN_LOGS, tmp_path / "run[" / "b]x")


def drawn(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.png"))


def test_a_finished_run(log_dir, capsys):
    assert main(["draw", str(log_dir)]) == 0
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
    "CSV without steps": ("memory_per_batch.csv", lambda text: text.partition("\n")[0] + "\n"),
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
    files = [re.split(" could not be drawn: ", line)[0] for line in lines]
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
    monkeypatch.setattr(sys, "argv", ["lightning-batchmem", "draw", str(log_dir)])
    assert run_installed() == 0
    output.flush()
    assert output.buffer.getvalue().count(rb"/gr\xf6\xdfe/") == len(ALL_FIGURES)


def test_draw_opens_no_pipe_and_prints_no_control_character(log_dir, capsys):
    os.mkfifo(log_dir / "batch_plan_pipe.json")
    os.mkfifo(log_dir / "memory_per_batch_pipe.csv")
    plan = log_dir / "batch_plan.json"
    (log_dir / "batch_plan\x1b[2J.json").write_text(plan.read_text())
    (log_dir / "batch_plan\x9b\n.json").write_text(plan.read_text()[:100])
    assert main(["draw", str(log_dir)]) == 0
    printed = capsys.readouterr()
    assert [line for line in printed.err.splitlines() if "it is not a regular file" in line] == [
        f"{log_dir / name} could not be drawn: ValueError: it is not a regular file"
        for name in ("memory_per_batch_pipe.csv", "batch_plan_pipe.json")
    ]
    for text in (printed.out, printed.err):
        assert all(line.isprintable() for line in text.split("\n"))
    assert r"search\x1b[2J.png" in printed.out
    assert r"batch_plan\x9b .json could not be drawn" in printed.err


def test_nothing_to_draw(tmp_path, capsys):
    assert main(["draw", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"No figure was drawn from {tmp_path}; it needs a memory_per_batch.csv or "
    )
    assert main(["draw", str(tmp_path / "missing")]) == 2
    assert capsys.readouterr().err.startswith("error: log_dir must be a directory, got ")


def test_no_place_to_write_and_no_matplotlib(log_dir, monkeypatch, capsys):
    assert main(["draw", str(log_dir), "--out", str(log_dir / FILES[0])]) == 1
    *lines, _ = capsys.readouterr().err.splitlines()
    assert [str(log_dir / FILES[0]) in line for line in lines] == [True] * 2
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["draw", str(log_dir)]) == 2
    message = 'error: figures need matplotlib: pip install "lightning-batchmem[plot]"\n'
    assert capsys.readouterr().err == message


def test_the_version(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert (
        capsys.readouterr().out
        == f"python -m lightning_batchmem {lightning_batchmem.__version__}\n"
    )


# --- standard output


class Full(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


class Unread(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_command_whose_output_nobody_reads(log_dir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Unread())
    assert main(["simulate", "--list"]) == 0
    assert main(["draw", str(log_dir)]) == 0
    assert drawn(log_dir) == ALL_FIGURES
    assert capsys.readouterr().err == ""


def test_a_command_whose_output_cannot_be_written(log_dir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Full())
    for arguments in (["simulate", "--list"], ["draw", str(log_dir)]):
        assert main(arguments) == 2
        message = "error: standard output cannot be written: No space left on device\n"
        assert capsys.readouterr().err == message
    # The result in files is complete.
    assert drawn(log_dir) == ALL_FIGURES
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["simulate", "--list"]) == 2


@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        ("simulate --list | true", 0, ""),
        ("find --help | true", 0, ""),
        ("simulate --list > /dev/full", 2, "error: standard output cannot be written"),
        ("simulate --list >&-", 0, ""),
        ("draw /nowhere 2>&-", 2, ""),
    ],
)
def test_exit_codes_of_a_process(command, code, error):
    words, separator, rest = command.partition(" | ")
    program = f"{sys.executable} -m lightning_batchmem {words}{separator}{rest}"
    result = subprocess.run(
        ["bash", "-c", f"{program}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == code
    assert result.stderr.startswith(error)
    assert "Error" not in result.stderr


# --- find and compare

PROJECT = """
import torch
from lightning.pytorch import Trainer
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
    return BoringModel(), DataLoader(RandomDataset(32, 2), batch_size=3)

def module_alone():
    class WithData(BoringModel):
        batch_size = 3

        def train_dataloader(self):
            return DataLoader(RandomDataset(32, 100), self.batch_size)
    return WithData()

def trainer_first():
    return Trainer(accelerator="cpu", logger=False), BoringModel()

def trainer_last():
    return trainer_first()[::-1]

def nothing():
    pass

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
    options = "--max_batch_size=8 --memory_limit=4GiB --trainer.accelerator=cpu"
    files = set(project.iterdir())
    assert main(["find", "my_project:make", *options.split(), "--out", "plan.json"]) == 0
    plan = Plan.from_json(Path("plan.json").read_text())
    assert (plan.batch_size, plan.limit_bytes) == (8, 4096 * MIB)
    # The plan follows the line of progress.
    assert capsys.readouterr().out.endswith(f"\n{plan}\n")
    assert {path.name for path in set(project.iterdir()) - files} - {"__pycache__"} == {"plan.json"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize("command", ["find --out", "check --update --reference"])
def test_a_full_disk_is_an_error_of_one_line(project, capsys, command):
    name, *options = command.split()
    if name == "find":
        options = ["--max_batch_size=8", "--trainer.accelerator=cpu", *options]
    assert main([name, "my_project:make", *options, "/dev/full"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line == "error: /dev/full cannot be written: No space left on device"


def test_the_installed_program_finds_modules_of_the_current_directory(project, monkeypatch, capsys):
    scripts = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    target = scripts["project"]["scripts"]["lightning-batchmem"]
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(project)])
    monkeypatch.setattr(
        sys, "argv", ["lightning-batchmem", "find", "my_project:make", "--memory_limit", "1MiB"]
    )
    module_name, _, name = target.partition(":")
    assert getattr(importlib.import_module(module_name), name)() == 2
    # An error of the package is one line.
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: memory_limit must be above the ")


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("my_project:broken", RuntimeError, "mat1 and mat2 shapes cannot be multiplied"),
        ("fails:make", ValueError, "invalid literal for int"),
        ("imports:make", ModuleNotFoundError, "No module named 'no_such_module'"),
    ],
)
def test_an_error_of_the_user_keeps_its_traceback(project, capsys, target, error, message):
    assert main(["find", target]) == 2
    text = capsys.readouterr().err
    assert "Traceback (most recent call last)" in text
    # A note about the search may follow.
    assert f"\n{error.__name__}: {message}" in text
    # The calls before those of the user say nothing.
    assert lightning_batchmem.__path__[0] not in text


def test_an_error_in_this_package_keeps_all_its_calls(project, capsys, monkeypatch):
    monkeypatch.setattr(lightning_batchmem.__main__, "_FIGURES", {"a name": None})
    assert main(["draw", "."]) == 2
    text = capsys.readouterr().err
    assert re.findall("__main__.*in (.*)", text) == ["main", "draw"]


@pytest.mark.parametrize("arguments", ["find {} --out x", "check {} --update --reference x"])
def test_a_folder_that_cannot_be_written_is_refused_first(project, capsys, monkeypatch, arguments):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    error = error_of(arguments.format("my_project:make"), capsys)
    assert error == "error: x must be a file in an existing directory that can be written"


def test_compare(project, capsys):
    options = "--max_batch_size 8 --trainer.accelerator cpu --variants variants --out table.md"
    assert main(["compare", "my_project:make", *options.split()]) == 0
    table = Path("table.md").read_text()
    assert capsys.readouterr().out.endswith(table)
    assert table.startswith("| variant | limited by ")
    assert table.endswith("- fastest under the limit: plain\n")


def test_a_file_has_the_options(project):
    Path("find.yaml").write_text(
        "program: ['my_project:module_alone']\nmax_batch_size: 8\ntrainer: {accelerator: cpu}\n"
        "out: plan.json\n"
    )
    assert main(["find", "--config", "find.yaml"]) == 0
    assert Plan.from_json(Path("plan.json").read_text()).batch_size == 8


MADE = "make must return a LightningModule, or (module, data), got "


@pytest.mark.parametrize("command", ["find", "compare", "check"])
@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("trainer_first", "Trainer, BoringModel"),
        ("trainer_last", "BoringModel, Trainer"),
        ("nothing", "NoneType"),
    ],
)
def test_something_else_than_a_module_is_one_line(project, capsys, command, name, got):
    options = ["--update"] if command == "check" else ["--trainer.accelerator", "cpu"]
    exit_code = main([command, f"my_project:{name}", *options])
    printed = capsys.readouterr()
    if command == "compare":
        assert exit_code == 1
        assert f"- plain failed: ValueError: {MADE}{got}\n" in printed.out
    else:
        assert exit_code == 2
        assert printed.err == f"error: {MADE}{got}\n"


@pytest.mark.slow
def test_lightning_prints_no_notes_of_its_own(project):
    command = (
        "find my_project:make --objective memory --max_batch_size 8"
        " --trainer.enable_progress_bar false"
    )
    done = subprocess.run(
        [sys.executable, "-m", "lightning_batchmem", *command.split()],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("batch size 8, ")


def error_of(arguments, capsys):
    """The one line of a command that is refused."""
    try:
        code = main(arguments.split())
    except SystemExit as error:
        code = error.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("find my_project:mak", "an object of my_project, got 'mak'. Did you mean make?"),
        ("find my_project:12", "a name must be MODULE:NAME, such as my_package.train:make, got"),
        (
            "find my_project",
            "there is no script 'my_project' in {cwd}. Write its path, or for `find`",
        ),
        (
            "simulate 8GiB my_project:make",
            "there is no script 'my_project:make' in {cwd}. Write its path",
        ),
        (
            "find my_projec:make",
            "must name a module, got 'my_projec'; modules in {cwd}: fails, imports, my_project",
        ),
        ("find :make", "such as my_package.train:make, got ':make'"),
        ("find .my_project:make", "train:make, got '.my_project:make'"),
        ("compare my_project:make --variants none", "an object of my_project, got 'none'"),
        ("find my_project:make --objective speed", "'throughput']. Got value: speed"),
        ("find my_project:make --max_batch_size 0", "max_batch_size must be a whole number"),
        ("find my_project:make --trainer gpu", "at a time, as in --trainer.accelerator=gpu."),
        ("find my_project:make --trainer.foo=1", "unexpected keyword argument 'foo'"),
        ("find my_project:make --trainer.accelerator=banana", "banana"),
        ("find my_project:variants", "such as lambda: MyModule(), got an object of dict"),
        ("find my_project:make --out no/plan.json", "no/plan.json must be a file in an existing"),
        ("find my_project:make --out .", ". must be a file in an existing directory"),
        ("compare my_project:make --variants make", "variants must be a dictionary, got function"),
        ("compare my_project:make --variants wrong", "of arguments each, got 1: {{}}"),
        ("find my_project:make --max_size 1", "--max_size 1. Did you mean --max_batch_size?"),
        ("find --max-batch-size=8 my_project:make", "Did you mean --max_batch_size?"),
        ("find -o plan.json my_project:make", "unrecognized arguments: -o=plan.json. It has -h, "),
        ("draw logs --xyz", "unrecognized arguments: --xyz. It has -h, --help, "),
        ("fin my_project:make", "(choose from"),
        ("find", "required: find.program. --help describes the arguments."),
        (
            "check my_project:make --reference no.json",
            "no.json does not exist. Write it with --update.",
        ),
        ("check my_project:make --reference . --update", ". must be a file in an existing"),
        ("check --update my_project:make --reference .", ". must be a file in an existing"),
        ("check my_project:make --update=true --reference .", ". must be a file in an existing"),
        (
            "find my_project:make --out fails.py/plan.json",
            "fails.py/plan.json must be a file",
        ),
        ("check my_project:make --reference fails.py", "fails.py must be a reference of the"),
        ("check my_project:mak --update", "an object of my_project, got"),
        ("check my_project:make --tolerance 1x", 'Parser key "tolerance"'),
        ("check my_project:make --tolerance=-1", "tolerance must be a share such as 0.01, got -1"),
    ],
)
def test_wrong_arguments_are_one_line(project, capsys, arguments, message):
    assert message.format(cwd=project) in error_of(arguments, capsys)


# --- check

WRITTEN = "Wrote the memory of this step to memory.json"


def check(target, *arguments):
    return main(["check", f"my_project:{target}", *arguments])


def test_a_reference_is_written_and_compared(project, capsys):
    assert check("make", "--update") == 0
    assert capsys.readouterr().out == f"{WRITTEN}\n"
    content = json.loads(Path("memory.json").read_text())
    assert list(content["phases"]) == ["forward", "backward", "optimizer_step"]
    assert check("make", "--tolerance", "0") == 0
    assert capsys.readouterr().out == "equal to memory.json within 0 %\n"
    assert check("wider") == 1
    lines = capsys.readouterr().out.splitlines()
    pattern = r"(\w+ ?\w+, .*): [\d,]+ -> [\d,]+ bytes \(\+[\d.]+%\)"
    names = [re.fullmatch(pattern, line)[1] for line in lines]
    assert names[:2] == ["forward, a sample", "forward, fixed part"]
    assert check("wider", "--tolerance", "100") == 0


def test_a_smaller_model_passes_and_is_printed(project, capsys):
    assert check("wider", "--update") == 0
    written = Path("memory.json").read_text()
    capsys.readouterr()
    assert check("make") == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in lines} > {"forward, a sample", "backward, a sample"}
    assert Path("memory.json").read_text() == written
    assert check("make", "--update") == 0
    assert check("wider") == 1


def test_a_script_has_an_argument_with_the_name_of_the_switch(monkeypatch):
    commands = []
    monkeypatch.setattr(
        lightning_batchmem.__main__.Script, "of_command", lambda words: commands.append(words)
    )
    monkeypatch.setattr(lightning_batchmem.__main__, "search_by", lambda *_: None)
    assert main(["find", "train.py", "--update"]) == 0
    assert commands == [["train.py", "--update"]]


def test_what_cannot_be_measured_is_not_reported_as_grown(project, capsys):
    assert check("make", "--update") == 0
    capsys.readouterr()
    assert check("few_samples") == 2
    assert (
        "error: the memory must be measured at two sizes, got one: 2 samples instead of the"
        " project's 3: the data set has no more than 2 samples"
        in (capsys.readouterr().err.splitlines()[-1])
    )
    assert check("make", "--trainer.accelerator", "gpu") == 2
    assert "error: accelerator must be cpu" in capsys.readouterr().err
    assert check("broken") == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert "\nRuntimeError: mat1 and mat2 shapes cannot be multiplied" in error


def test_two_processes_write_the_same_file(project):
    command = [sys.executable, "-m", "lightning_batchmem", "check", "my_project:wider"]
    done = subprocess.run(
        [*command, "--reference", "other.json", "--update"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (
        0,
        f"{WRITTEN}\n".replace("memory.json", "other.json"),
    ), done.stderr
    assert check("wider", "--update") == 0
    # The process of the tests has run other models before.
    assert Path("memory.json").read_bytes() == Path("other.json").read_bytes()


@pytest.mark.parametrize("command", ["find", "compare"])
def test_help_describes_every_option(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    # They do nothing without a training.
    absent = {"verbose", "search_on_resume"}
    for name in inspect.signature(BatchFinder).parameters:
        is_described = re.search(rf"--{name} \S+ \S*\w+", text) is not None
        assert is_described == (name not in absent), name
    assert "--max_batch_size MAX_BATCH_SIZE the largest size to consider, in samples. " in text
    objective = "by default the largest size that fits"
    if command == "find":
        objective = "within 5 % of the best samples per second that were measured. "
    assert objective in text
    assert "--plan PLAN a plan of an earlier ``fit`` to use again" in text


# --- simulate


@pytest.fixture
def simulated(project, monkeypatch):
    """Outcomes of simulations by the names of GPUs, and what was asked for."""
    asked = []
    outcomes = {}

    def run(program, gpu, context_bytes, options, world=AS_THE_PROGRAM, *, shows_output=True):
        asked.append((program, gpu.name, context_bytes, dict(options), world, shows_output))
        return Outcome(gpu, asked=world, **outcomes[gpu.name])

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "kernels_of", lambda gpu: None)
    Path("train.py").write_text("")
    return asked, outcomes


def simulated_plan():
    plan = Plan.from_json(json.dumps(SAVED_PLAN))
    return replace(plan, simulated=True, device="simulated RTX-4090")


def test_simulate_passes_the_program_and_the_options_that_were_given(simulated, capsys):
    asked, outcomes = simulated
    outcomes["RTX-4090"] = {"plan": simulated_plan()}
    options = "--multiple_of 8 --context=1GiB --out plan.json"
    command = f"simulate {options} RTX-4090 --max_batch_size=64 train.py --out other --epochs 3"
    assert main(command.split()) == 0
    (asked_for,) = asked
    program = Script("script", "train.py", ("--out", "other", "--epochs", "3"))
    options = {"multiple_of": 8, "max_batch_size": 64}
    assert asked_for == (program, "RTX-4090", 2**30, options, World(), True)
    assert Plan.from_json(Path("plan.json").read_text()) == simulated_plan()
    assert not Path("other").exists()
    assert " on a simulated RTX-4090, " in capsys.readouterr().out


def test_simulate_on_several_gpus_prints_a_table(simulated, capsys):
    asked, outcomes = simulated
    outcomes["RTX-4090"] = {"plan": simulated_plan()}
    outcomes["24GiB"] = {"nothing_fits": "Nothing fits."}
    assert main(["simulate", "rtx4090, 24GiB", "--out", "plans.json", "-m", "my_project"]) == 0
    assert [gpu for _, gpu, *_ in asked] == ["RTX-4090", "24GiB"]
    # What the program prints would stand between the rows.
    assert [shows_output for *_, shows_output in asked] == [False, False]
    assert [program for program, *_ in asked] == 2 * [Script("module", "my_project")]
    (plan,) = json.loads(Path("plans.json").read_text())
    assert plan["simulated"] is True
    output = capsys.readouterr().out
    assert output.startswith("| GPU ")
    assert "- 24GiB: Nothing fits." in output


def test_each_row_is_printed_when_it_is_found(simulated, capsys, monkeypatch):
    _, outcomes = simulated
    outcomes["RTX-4090"] = outcomes["24GiB"] = {"plan": simulated_plan()}
    printed = []
    run = command.run

    def run_and_look(*arguments, **keywords):
        printed.append(capsys.readouterr().out.splitlines())
        return run(*arguments, **keywords)

    monkeypatch.setattr(command, "run", run_and_look)
    assert main(["simulate", "RTX-4090,24GiB,RTX-4090", "train.py"]) == 0
    before, first, second = printed
    assert before == []
    assert [line.split()[1] for line in first if line[1] == " "] == ["GPU", "RTX-4090"]
    assert [line.split()[1] for line in second] == ["24GiB"]
    third, empty, *remarks = capsys.readouterr().out.splitlines()
    assert (third.split()[1], empty) == ("RTX-4090", "")
    assert remarks[0].startswith("- ")


def test_errors_on_all_gpus_are_not_said_twice(simulated, capsys):
    _, outcomes = simulated
    outcomes["RTX-4090"] = outcomes["24GiB"] = {"error": "it fails"}
    assert main(["simulate", "RTX-4090,24GiB", "train.py"]) == 2
    output, errors = capsys.readouterr()
    assert errors == "error: simulated RTX-4090: it fails\nerror: simulated 24GiB: it fails\n"
    assert [line.count("failed") for line in output.splitlines()] == [0, 0, 1, 1]


def test_a_list_of_devices_is_searched_on_each_gpu(simulated, capsys):
    asked, outcomes = simulated
    outcomes["RTX-4090"] = outcomes["24GiB"] = {"plan": simulated_plan()}
    options = "--devices 1,8 --nodes 2 --nccl=0.5GiB"
    assert main(f"simulate RTX-4090,24GiB {options} --out plans.json train.py".split()) == 0
    worlds = [World(1, 2, 2**29), World(8, 2, 2**29)]
    assert [(gpu, world) for _, gpu, _, _, world, _ in asked] == [
        (gpu, world) for gpu in ("RTX-4090", "24GiB") for world in worlds
    ]
    rows = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines() if "|" in line]
    cells = [[cell.strip() for cell in row] for row in rows]
    devices = ["1 x 2", "8 x 2"]
    assert [cells[0], *cells[2:]] == [
        ["GPU", "devices"],
        *[[gpu, text] for gpu in ("RTX-4090", "24GiB") for text in devices],
    ]
    assert len(json.loads(Path("plans.json").read_text())) == 4


@pytest.mark.parametrize(
    ("options", "world"),
    [
        ("--devices=4", World(4)),
        ("--nodes 3", World(None, 3)),
        ("--nccl 1MiB", World(None, None, 2**20)),
    ],
)
def test_a_single_world_gives_a_plan(simulated, capsys, options, world):
    asked, outcomes = simulated
    outcomes["RTX-4090"] = {"plan": simulated_plan()}
    assert main(f"simulate RTX-4090 {options} train.py".split()) == 0
    assert [found for *_, found, _ in asked] == [world]
    assert " on a simulated RTX-4090, " in capsys.readouterr().out


def test_an_error_names_the_number_of_devices(simulated, capsys):
    _, outcomes = simulated
    outcomes["RTX-4090"] = {"error": "it fails"}
    assert main(["simulate", "RTX-4090", "--devices", "3", "train.py"]) == 2
    assert capsys.readouterr() == ("", "error: simulated RTX-4090 x 3: it fails\n")


@pytest.mark.parametrize(
    ("outcome", "code", "stream", "text"),
    [
        ({"nothing_fits": "Nothing fits."}, 1, "out", "simulated RTX-4090: Nothing fits.\n"),
        ({"error": "it fails"}, 2, "err", "error: simulated RTX-4090: it fails\n"),
    ],
)
def test_simulate_without_a_plan(simulated, capsys, outcome, code, stream, text):
    _, outcomes = simulated
    outcomes["RTX-4090"] = outcome
    assert main(["simulate", "RTX-4090", "--out", "plan.json", "train.py"]) == code
    assert getattr(capsys.readouterr(), stream) == text
    assert not Path("plan.json").exists()


def test_find_on_a_simulated_gpu_passes_the_function_and_all_options(simulated):
    asked, outcomes = simulated
    outcomes["A100-80GB"] = {"plan": simulated_plan()}
    command = "find my_project:make --gpu A100-80GB --trainer.precision bf16-mixed"
    assert main(command.split()) == 0
    ((program, gpu, _, options, *_),) = asked
    assert program == Script("function", "my_project:make", trainer={"precision": "bf16-mixed"})
    assert (gpu, options["min_steps_per_epoch"]) == ("A100-80GB", "auto")


def step_memory(sample_bytes, **fields):
    return MeasuredStep({"forward": PhaseMemory(1000, sample_bytes)}, {}, **fields)


def test_the_memory_test_on_a_simulated_gpu(simulated, capsys):
    asked, outcomes = simulated
    ours = "simulated RTX-4090"
    outcomes["RTX-4090"] = {
        "memory": step_memory(100, device=ours),
        "assumptions": ("All are assumed.",),
    }
    words = ["--gpu", "rtx 4090", "--trainer.precision", "bf16-mixed"]
    assert check("make", *words, "--update") == 0
    ((program, gpu, context_bytes, options, *_),) = asked
    trainer = {"precision": "bf16-mixed"}
    assert program == Script("memory_test", "my_project:make", trainer=trainer)
    assert (gpu, context_bytes, options) == ("RTX-4090", 426 * 2**20, {})
    where = "memory of a step on a simulated RTX-4090; nothing here ran on a GPU"
    first = [where, "note: All are assumed."]
    assert capsys.readouterr().out.splitlines() == [*first, WRITTEN]
    assert json.loads(Path("memory.json").read_text())["device"] == ours
    assert check("make", *words) == 0
    assert capsys.readouterr().out.splitlines() == [*first, "equal to memory.json within 1 %"]
    outcomes["RTX-4090"] = {"memory": step_memory(102, device=ours)}
    assert check("make", *words) == 1
    grown = "forward, a sample: 100 -> 102 bytes (+2.0%)"
    assert capsys.readouterr().out.splitlines() == [where, grown]
    assert check("make", *words, "--tolerance", "0.02") == 0


@pytest.mark.parametrize(
    ("device", "gpu", "message"),
    [
        ("cpu", ["--gpu", "8GiB"], "(cpu, and not simulated 8GiB)"),
        ("simulated RTX-4090", ["--gpu", "8GiB"], "(simulated RTX-4090, and not simulated 8GiB)"),
        ("simulated 8GiB", [], "(simulated 8GiB, and not cpu)"),
    ],
)
def test_a_reference_of_another_device_is_refused(simulated, capsys, device, gpu, message):
    asked, _ = simulated
    Path("memory.json").write_text(to_json(step_memory(100, device=device)))
    assert check("make", *gpu) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: memory.json was measured on another device ")
    assert message in line
    assert asked == []


@pytest.mark.parametrize("outcome", [{"nothing_fits": "Nothing fits."}, {"error": "it fails"}])
def test_a_step_without_memory_has_not_grown(simulated, capsys, outcome):
    _, outcomes = simulated
    outcomes["8GiB"] = outcome
    assert check("make", "--gpu", "8GiB", "--update") == 2
    (reason,) = outcome.values()
    assert capsys.readouterr() == ("", f"error: simulated 8GiB: {reason}\n")
    assert not Path("memory.json").exists()


def test_simulate_lists_the_gpus(capsys):
    assert main(["simulate", "--list"]) == 0
    assert "RTX-4090" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("simulate RTX-4091 train.py", "RTX-4090"),
        ("simulate RTX-4090 trian.py", "there is no script 'trian.py' in "),
        ("simulate RTX-4090 -m no_such", "there is no module 'no_such'"),
        ("simulate RTX-4090 --context 3 train.py", "context must be a size such as 300MiB"),
        ("simulate 8GiB --context 9GiB train.py", "context must be less than the memory of 8GiB"),
        ("simulate RTX-4090 --objective throughput train.py", "objective must be memory"),
        ("simulate RTX-4090 --max_batch_size 0 train.py", "max_batch_size must be a whole number"),
        ("simulate RTX-4090 --no_such 3 train.py", "unrecognized arguments: --no_such=3"),
        ("simulate 8GiB --devices 0 train.py", "devices must be numbers such as 8 or 1,2,4,8, got"),
        ("simulate 8GiB --devices two train.py", "devices must be numbers such as 8 or 1,2,4,8"),
        ("simulate 8GiB --devices 1,,2 train.py", "devices must be numbers such as 8 or 1,2,4,8"),
        ("simulate 8GiB --devices -1 train.py", "devices must be numbers such as 8 or 1,2,4,8"),
        ("simulate 8GiB --devices 2,16 train.py", "at most 8, which are those of a node, got 16"),
        ("simulate 8GiB --nodes 0 train.py", "nodes must be at least 1, got 0"),
        ("simulate 8GiB --nodes two train.py", '"nodes"'),
        ("simulate 8GiB --nccl 3 train.py", "nccl must be a size such as 300MiB, got '3'"),
        ("simulate 8GiB --nccl 8GiB train.py", "got 426MiB and 8,192.0 MiB for NCCL"),
        ("find my_project:make --gpu 8GiB --devices 2", "unrecognized arguments: --devices 2"),
        ("simulate RTX-4090", "must be followed by a GPU and a program, as in `simulate RTX-4090"),
        ("simulate train.py --out plan.json", "must be followed by a GPU and a program"),
        ("find my_project:make --gpu 8GiB --plan plan.json", "plan must be null"),
        ("check my_project:make --gpu RTX-4091 --update", "RTX-4090"),
        ("check my_project:make --gpu 8GiB,9GiB --update", "is neither a known GPU nor"),
        ("check my_project:make --gpu 99MiB --update", "a GPU of 99MiB has no room"),
        ("check my_project:make --gpu 8GiB", "memory.json does not exist. Write it with --update"),
        ("simulate", "must be followed by a GPU and a program"),
    ],
)
def test_bad_input_of_simulate_is_one_line(simulated, capsys, command, message):
    assert message in error_of(command, capsys)
