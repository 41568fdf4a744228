"""Run tests in a new process with a time limit, and count what is known of them at its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from benchmarks.processes import end_with_children

COLUMNS = {
    "PASSED": "passed",
    "FAILED": "failed",
    "ERROR": "failed",
    "SKIPPED": "skipped",
    "XFAIL": "xfailed",
    "XPASS": "passed",
}
"""Pytest's word for the result of a test -> its column."""

OPTIONS = (
    "--verbose",
    "--color=no",
    # Warnings are no errors here, because torch 2.8 to 2.11 warn of the older name of a variable,
    # and other machines have other warnings.
    "-W",
    "default",
    "-o",
    "addopts=",
    "--import-mode=importlib",
    "-p",
    "no:cacheprovider",
    "-o",
    "timeout=60",
    "-m",
    "not slow",
)
LOG_CHARACTERS = 20_000


def run_tests(allocator: str, seconds: float, *arguments: str) -> dict[str, Any]:
    """Run pytest with a configuration of PyTorch's allocator; it is ended after some seconds.

    Returns:
        A row with the number of tests by result and the seconds; if a test failed or did not end,
        also an ``error`` that names it, and the output as ``log``.
    """
    begin = time.monotonic()
    # The output goes to a file, since a process that pytest has started could keep a pipe open.
    with TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "pytest", *OPTIONS, *arguments],
            cwd=Path(__file__).parents[1],
            env=variables_for(allocator),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        is_late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            end_with_children(process)
        output.seek(0)
        printed = output.read()
    row: dict[str, Any] = counts(printed)
    row["seconds"] = round(time.monotonic() - begin, 1)
    if is_late:
        row["error"] = f"no end after {seconds:.0f} s, in {running_test(printed)}"
    elif process.returncode:
        failed = re.findall(r"^(?:FAILED|ERROR) (?:\S+/)?(\S.*)", printed, re.MULTILINE)
        row["error"] = "; ".join(dict.fromkeys(failed)) or f"pytest ended with {process.returncode}"
    if "error" in row:
        row["log"] = printed[-LOG_CHARACTERS:]
    return row


def variables_for(allocator: str) -> dict[str, str]:
    """The environment variables of a process with this allocator."""
    variables = {
        name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")
    }
    # A wide terminal keeps pytest from cutting off the reasons in its summary.
    variables["COLUMNS"] = "300"
    if allocator != "default":
        # The newer name PYTORCH_ALLOC_CONF is unknown to torch 2.5, and torch 2.9 ignores it.
        variables["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    return variables


def counts(printed: str) -> dict[str, int]:
    """The number of tests in each column, from the lines that pytest has printed so far."""
    words = re.findall(rf"^\S+::.*? ({'|'.join(COLUMNS)})\b", printed, re.MULTILINE)
    found = Counter(COLUMNS[word] for word in words)
    return {column: found[column] for column in dict.fromkeys(COLUMNS.values())}


def running_test(printed: str) -> str:
    """The test whose result is missing in the last line of the output."""
    last_line = printed.rpartition("\n")[2].strip()
    return last_line.rpartition("/")[2] or "the import or the collection of the tests"
