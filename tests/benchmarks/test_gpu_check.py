"""The check of a device ends in time, leaves no process, and shows what it has found."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchmarks import gpu_check, gpu_parts
from benchmarks.common import CHILD_VARIABLE, ROOT, in_fresh_process
from benchmarks.gpu_tests import run_tests
from tests.helpers.cuda_stub import is_cuda_stub

needs_cuda_stub = pytest.mark.skipif(not is_cuda_stub(), reason="needs the CUDA stub")

SLEEPING = """
import os
import subprocess
import sys
import time
from pathlib import Path


def test_passes():
    pass


def test_sleeps():
    sleep = [sys.executable, "-c", "import time; time.sleep(200)"]
    child = subprocess.Popen(sleep, start_new_session=True)
    Path(__file__).with_name("pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(200)
"""

ALL_KINDS = """
import pytest


def test_passes():
    pass


def test_fails():
    assert 1 == 2, "a reason"


@pytest.mark.skip(reason="FAILED is no result here")
def test_is_skipped():
    pass


@pytest.mark.xfail(reason="an issue")
@pytest.mark.parametrize("value", [1, "two words"])
def test_is_expected_to_fail(value):
    assert not value


@pytest.fixture
def broken():
    raise ValueError("broken")


def test_has_an_error(broken):
    pass


@pytest.mark.slow
def test_is_slow():
    pass
"""


@pytest.fixture
def sleeping(tmp_path):
    """A file with a test that sleeps; its process and the child of that must have ended."""
    path = tmp_path / "test_sleeping.py"
    path.write_text(SLEEPING)
    yield path
    survivors = []
    for pid in (tmp_path / "pids").read_text().split():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            # A process that has ended is a zombie as long as nobody has read its status.
            if process.status() != psutil.STATUS_ZOMBIE:
                survivors.append(process)
                process.kill()
    assert not survivors


@pytest.mark.skipif(torch.cuda.is_available(), reason="gpu_check would run")
def test_without_a_cuda_device_it_prints_one_sentence(capsys):
    assert gpu_check.main([]) == 2
    assert capsys.readouterr() == ("", "gpu_check needs a CUDA device, and torch finds none.\n")


def test_it_ends_within_ten_minutes():
    assert all(callable(getattr(gpu_parts, part)) for part in gpu_check.PARTS)
    # The rest is for the start of the command and for ending processes that are late.
    assert sum(gpu_check.PARTS.values()) <= 550


def test_a_part_that_is_late_leaves_no_process(sleeping):
    row = (
        f"from benchmarks.gpu_tests import run_tests; run_tests('default', 200, {str(sleeping)!r})"
    )
    result = in_fresh_process("timeit", "-n", "1", "-r", "1", row, timeout_seconds=15)
    assert result == {"error": "no end after 15 s"}


def test_a_row_that_is_late_leaves_no_process_and_shows_what_passed(sleeping):
    row = run_tests("default", 15, str(sleeping))
    assert (row["passed"], row["failed"]) == (1, 0)
    assert row["error"] == "no end after 15 s, in test_sleeping.py::test_sleeps"
    assert "test_sleeping.py::test_passes PASSED" in row["log"]


def test_a_row_counts_the_tests_by_their_result(tmp_path):
    path = tmp_path / "test_kinds.py"
    path.write_text(ALL_KINDS)
    row = run_tests("default", 100, str(path))
    assert "a reason" in row.pop("log")
    assert row.pop("seconds") > 0
    assert row == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "xfailed": 2,
        "error": "test_kinds.py::test_fails - AssertionError: a reason;"
        " test_kinds.py::test_has_an_error - ValueError: broken",
    }


def test_a_part_that_is_late_shows_the_rows_before_it_and_the_cases_after_it():
    found = {
        "rows": [{"mode": "a", "found": 8}],
        "running": {"mode": "b"},
        "waiting": [{"mode": "c"}],
        "error": "no end after 9 s",
    }
    assert gpu_check.rows_of(found) == [
        {"mode": "a", "found": 8},
        {"mode": "b", "error": "no end after 9 s"},
        {"mode": "c", "note": gpu_check.OVER},
    ]


def sent_by(part, end, monkeypatch, capsys):
    """What a part sends to the process that started it."""
    monkeypatch.setenv(CHILD_VARIABLE, "1")
    gpu_check.run_part(part, end)
    values = {}
    for line in filter(None, capsys.readouterr().out.splitlines()):
        values.update(json.loads(line))
    return values


def test_a_case_that_raises_is_a_row_and_the_next_case_runs(monkeypatch, capsys):
    def cases():
        yield {"mode": "a"}, lambda end: 1 / 0
        yield {"mode": "b"}, lambda end: {"has time": end > time.time() + 50}

    monkeypatch.setattr(gpu_parts, "compile", cases)
    first, second = sent_by("compile", time.time() + 100, monkeypatch, capsys)["rows"]
    assert first["error"] == "ZeroDivisionError: division by zero"
    assert second == {"mode": "b", "has time": True}


def test_a_case_without_time_is_not_run(monkeypatch, capsys):
    monkeypatch.setattr(gpu_parts, "compile", lambda: iter([({"mode": "a"}, None)]))
    sent = sent_by("compile", time.time() + 1, monkeypatch, capsys)
    assert sent["rows"] == [{"mode": "a", "note": gpu_check.OVER}]
    assert sent["is_complete"]


def test_a_case_is_not_run_if_an_equal_one_took_longer_than_the_time_that_is_left():
    equal = gpu_parts.EquallyLong()

    def measure(end):
        time.sleep(0.1)
        return {"found": 8}

    assert equal.run(measure, time.time() + 100) == {"found": 8}
    assert equal.run(measure, time.time() + 100) == {"found": 8}
    assert equal.run(measure, time.time() + 0.1)["note"].startswith("not run: the case before took")


@pytest.mark.parametrize(("gibibytes", "limits_gb"), [(14.6, [4, 8]), (80, [8, 24])])
def test_limits_are_smaller_on_a_small_device(gibibytes, limits_gb, monkeypatch):
    properties = SimpleNamespace(total_memory=int(gibibytes * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    limits = [case["limit GB"] for case, _ in gpu_parts.search()]
    assert sorted(set(limits)) == limits_gb
    assert limits == sorted(limits)


def test_bfloat16_runs_only_where_the_device_has_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**11, 10**11))
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    row = gpu_parts.compared("GPT 12x768 AdamW bf16", 8 * 10**9, time.time() + 100)
    assert row == {"note": "not run: the device has no native bfloat16"}


@needs_cuda_stub
def test_one_slow_step_is_enough_to_leave_a_case_out():
    row = gpu_parts.compared("MLP 8x4096 Adam", 4 * 10**9, time.time() + 0.01)
    assert list(row) == ["note"]
    assert row["note"].startswith("not run: a step of 2 samples takes ")


@needs_cuda_stub
# On the stub, as in gpu_check, the warnings of Lightning are no errors.
@pytest.mark.filterwarnings("default")
def test_a_search_is_compared_with_a_bisection_on_the_stub():
    row = gpu_parts.compared("ResNet-18 SGD", 10**9, time.time() + 1000)
    assert "error" not in row
    assert 0 < row["found"] <= row["bisection"]
    assert row["training s"] > 0


@needs_cuda_stub
def test_it_runs_on_the_stub():
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--only", "overhead", "compile"]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "CUDA_STUB_TFLOPS": "1000"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "overhead: " in run.stderr
    rows = [line for line in run.stdout.splitlines() if line.startswith(("| 50 |", "| 1 |"))]
    assert len(rows) == 2
    compiled = [line for line in run.stdout.splitlines() if line.startswith("| default |")]
    assert len(compiled) == 1
    assert all(float(cell) > 0 for row in rows for cell in row.strip("| ").split("|"))
