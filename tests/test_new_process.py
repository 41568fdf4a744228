"""A function of a script runs in a new process, which imports the script up to the call."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lightning_batchmem.factory import VARIABLE
from lightning_batchmem.new_process import NotImportableError, call_in_new_process
from tests.helpers.main_module import run_as_main

# The script has no guard, and catches errors around its call.
SCRIPT = """
import os
import sys
from lightning_batchmem.new_process import call_in_new_process, end_repeated_script

with open("runs", "a") as file:
    file.write(f"{__name__} {os.environ.get('LIGHTNING_BATCHMEM')}\\n")

class Mine:
    pass

def function(*arguments):
    return os.getpid(), sys.argv, [type(argument).__name__ for argument in arguments]

def end():
    os.kill(os.getpid(), 9)

try:
    end_repeated_script()
    result = call_in_new_process(CALL)
except Exception as error:
    result = error
if __name__ != "__main__":
    sys.exit("the script went on")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the script with a call; returns the result and the runs of the script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "find")
    monkeypatch.setattr(sys, "argv", ["script.py", "--option"])

    def run(call, *, start="", path=tmp_path / "script.py"):
        main = run_as_main(monkeypatch, start + SCRIPT.replace("CALL", call), path)
        return main.result, Path("runs").read_text().splitlines()

    return run


def test_a_function_of_a_script_without_a_guard(run):
    (process_id, arguments, names), runs = run("function, Mine(), 1")
    assert process_id != os.getpid()
    assert arguments == ["script.py", "--option"]
    assert names == ["Mine", "int"]
    # The script ran once more, up to the call, and without the variable.
    assert runs == ["__main__ find", "__mp_main__ None"]


def test_a_process_that_is_killed(run):
    error, _ = run("end")
    assert type(error) is ChildProcessError
    assert str(error) == (
        "its process ended with exit code -9, killed perhaps because the host's memory was full"
    )


@pytest.mark.parametrize(
    ("start", "why"),
    [
        ("if __name__ != '__main__': raise SystemExit('no option')\n", "SystemExit: no option"),
        ("if __name__ != '__main__': int('no')\n", "ValueError: invalid literal for int"),
    ],
)
def test_a_script_that_fails_when_it_runs_again(run, start, why):
    error, _ = run("function", start=start)
    assert type(error) is NotImportableError
    assert str(error).startswith(why)


def test_the_new_process_ends_with_the_first_one(tmp_path):
    (tmp_path / "work.py").write_text(
        "import os, time, pathlib\n"
        "def work():\n"
        "    pathlib.Path('pid.new').write_text(str(os.getpid()))\n"
        "    os.replace('pid.new', 'pid')\n"
        "    time.sleep(100)\n"
    )
    folders = tmp_path / "folders"
    folders.mkdir()
    program = (
        "import work; from lightning_batchmem.new_process import call_in_new_process;"
        " call_in_new_process(work.work)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folders)}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=environment, cwd=tmp_path) as first_process:
        wait_until((tmp_path / "pid").exists)
        assert len(list(folders.iterdir())) == 1
        first_process.send_signal(signal.SIGTERM)
    new_process_id = int((tmp_path / "pid").read_text())
    try:
        wait_until(lambda: has_ended(new_process_id))
    finally:
        if not has_ended(new_process_id):
            os.kill(new_process_id, signal.SIGKILL)
    assert list(folders.iterdir()) == []


def has_ended(process_id):
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_notebook(run):
    error, runs = run("function", path=None)
    assert type(error) is NotImportableError
    assert str(error) == "they are defined in a notebook or an interactive session"
    assert runs == ["__main__ find"]


def test_a_function_that_has_no_name():
    with pytest.raises(NotImportableError, match="<lambda>"):
        call_in_new_process(lambda: None)


def test_an_importable_function_needs_no_script(run):
    # In the new process the script would fail.
    start = "if __name__ != '__main__': raise SystemExit\n"
    result, runs = run("os.path.join, 'a', 'b'", start=start)
    assert result == "a/b"
    assert runs == ["__main__ find"]
