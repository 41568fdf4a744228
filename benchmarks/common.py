"""Shared parts of the benchmarks: command line, Trainer, fresh processes, tables and results."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from benchmarks.caps import GROUP_VARIABLE, memory_group
from benchmarks.processes import end_with_children

ROOT = Path(__file__).parents[1]
CHILD_VARIABLE = "BENCHMARKS_CHILD"
"""Environment variable that is set in the processes of :func:`in_fresh_process`."""

SAMPLING_SECONDS = 0.02


def silence() -> None:
    """Silence and seed this process."""
    warnings.filterwarnings("ignore")
    for logger in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.WARNING)
    seed_everything(0, verbose=False)


def command_line(
    description: str | None,
    names: Iterable[str] = (),
    *,
    writes: bool = False,
    continues: bool = False,
) -> argparse.ArgumentParser:
    """Seed this process, silence it, and make a parser.

    The parser has ``--only`` if there are ``names``, ``--write`` if the command ``writes`` results,
    and ``--file`` if it ``continues`` from rows of an earlier run.
    """
    silence()
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if names := list(names):
        parser.add_argument(
            "--only",
            nargs="+",
            default=names,
            choices=names,
            metavar="NAME",
            help="these of %(choices)s",
        )
    if writes:
        parser.add_argument("--write", action="store_true", help="write to benchmarks/results")
    if continues:
        parser.add_argument(
            "--file", type=Path, help="write rows to this JSON file, and continue from it"
        )
    return parser


def trainer_for(callbacks: Sequence[Callback], steps: int, **arguments: Any) -> Trainer:
    """Make a Trainer that does nothing but train, unless ``arguments`` add to it."""
    defaults = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return Trainer(
        max_steps=steps, callbacks=list(callbacks), devices=1, **{**defaults, **arguments}
    )


def emit(**values: Any) -> None:
    """Send values to the parent process; a later value of a name replaces the earlier one."""
    if CHILD_VARIABLE in os.environ:
        print("\n" + json.dumps(values), flush=True)


def in_fresh_process(
    module: str, *arguments: str, room_bytes: int = 0, timeout_seconds: float = 900
) -> dict[str, Any]:
    """Run ``python -m module`` in a new process, on the host in a memory control group.

    Args:
        module: module with a command line that calls :func:`emit`, and its ``arguments``.
        room_bytes: room of the control group, which the process sets by
            :func:`benchmarks.caps.cap`. 0: no group.
        timeout_seconds: the process and those that it started are killed after this time.

    Returns:
        All values that the process emitted before its end, with ``error``: ``None`` or one line,
        ``"killed"`` after SIGKILL by the kernel; in a group also ``used_bytes`` (highest sampled
        use without page cache) and ``peak_bytes`` (the kernel's peak with page cache), both beyond
        the use at the time of the cap.
    """
    command = [sys.executable, "-m", module, *arguments]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, CHILD_VARIABLE: "1", "PYTHONPATH": os.pathsep.join(paths)}
    # The output goes to files, since a process that outlives its parent would keep a pipe open.
    with (
        memory_group(room_bytes) as group,
        TemporaryFile("w+") as output,
        TemporaryFile("w+") as errors,
    ):
        if group is not None:
            command = [
                "/bin/sh",
                "-c",
                'echo $$ > "$0/cgroup.procs" && exec "$@"',
                str(group.path),
                *command,
            ]
            variables[GROUP_VARIABLE] = str(group.path)
        # With this handler SIGTERM runs the ``finally`` block below, which ends the new process.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, env=variables, start_new_session=True
        )
        end = time.monotonic() + timeout_seconds
        try:
            while process.poll() is None and time.monotonic() < end:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=SAMPLING_SECONDS)
                if group is not None:
                    group.sample()
        finally:
            signal.signal(signal.SIGTERM, before)
            is_late = process.poll() is None
            end_with_children(process)
            # A control group with processes in it cannot be removed.
            while group is not None and (pids := (group.path / "cgroup.procs").read_text().split()):
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(SAMPLING_SECONDS)
        output.seek(0)
        errors.seek(0)
        result: dict[str, Any] = {"error": None}
        for line in output:
            if line.startswith("{"):
                result.update(json.loads(line))
        if group is not None:
            result.update(group.peaks())
        if process.returncode:
            result["error"] = (
                f"process ended with {process.returncode}:"
                f" {''.join(errors.read().strip().splitlines()[-1:])}"
            )
            if is_late:
                result["error"] = f"no end after {timeout_seconds:g} s"
            if group is not None and group.kills():
                result["error"] = "killed"
        return result


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def markdown(
    rows: Sequence[Mapping[str, Any]], notes: Sequence[str] = (), *, without: str = ""
) -> str:
    """A table with a column for each key, in the order of appearance, and a list of notes."""
    head = list(dict.fromkeys(key for row in rows for key in row if key != without))
    cells = []
    for row in rows:
        values = [row.get(key) for key in head]
        cells.append(["" if value is None else str(value).replace("|", "/") for value in values])
    lines = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *cells)]
    return "\n".join([*lines, *([""] if notes else []), *(f"- {note}" for note in notes)])


def machine() -> str:
    """Versions, device and commit, as the first line above a table."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"CPU, {torch.get_num_threads()} threads"
    commit = ""
    # Where git is not installed, the commit stays unknown.
    with suppress(OSError):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__},"
        f" lightning {lightning.__version__}"
    )
    return f"{versions}, {device}, commit {commit or 'unknown'}"


def results_file(name: str) -> Path:
    """The file for a table on this device.

    An example is ``benchmarks/results/cpu-2-cores/search.md``.
    """
    folder = f"cpu-{len(os.sched_getaffinity(0))}-cores"
    if torch.cuda.is_available():
        folder = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    return ROOT / "benchmarks" / "results" / folder / f"{name}.md"


def write_page(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def report(name: str, table: str, *, write: bool) -> None:
    """Print a table; with ``write``, write it to ``benchmarks/results``."""
    text = f"{machine()}\n\n{table}"
    print(text)
    if write:
        write_page(results_file(name), text)


def read_rows(path: Path | None) -> list[dict[str, Any]]:
    """The rows that an earlier run of a command wrote; none without a file."""
    if path is None or not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def write_rows(path: Path | None, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a JSON file, one on each line, if there is a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
