"""What benchmarks share: a bare Trainer, fresh processes that answer in JSON, the line that names the machine."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

ROOT = Path(__file__).parents[1]
PACKAGE_VARIABLE = "BENCHMARKED_PACKAGE"
"""Environment variable with the folder that the package under test is installed in; without it, wherever it is."""

GROUP_VARIABLE = "BENCHMARKED_GROUP"
"""Environment variable with the control group of a process that has one of its own."""

DEVICE_SHARE = 0.5
"""Share of a device's memory that a search may use; on the host each workload has a limit of its own."""


def trainer_for(callbacks: Sequence[Callback], steps: int, directory: Path | None = None) -> Trainer:
    """A Trainer without anything that is not measured; what must be written goes to ``directory``."""
    return Trainer(
        accelerator="auto",
        devices=1,
        max_steps=steps,
        callbacks=list(callbacks),
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def answer(result: dict[str, Any]) -> None:
    """Print what :func:`in_fresh_process` reads, on a line of its own.

    Raises:
        RuntimeError: when the package that ran is not the installed one that was to be measured.
    """
    import lightning_batchmem

    installed, used = os.environ.get(PACKAGE_VARIABLE), lightning_batchmem.__file__
    if installed is not None and not Path(used).is_relative_to(installed):
        raise RuntimeError(f"lightning_batchmem was to come from {installed}, and came from {used}")
    print("\n" + json.dumps(result))


def environment() -> dict[str, str]:
    """The environment of a process that has the benchmarks from here, and the package from its wheel if one is set."""
    package = os.environ.get(PACKAGE_VARIABLE)
    paths = [*([package] if package else []), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def in_fresh_process(
    module: str, *arguments: str, timeout_seconds: float = 600.0, group: Path | None = None
) -> dict[str, Any]:
    """Run ``python -m module`` with ``arguments`` and read the JSON in the last line of its output.

    Args:
        module: the name of a module with a command line that ends with :func:`answer`.
        arguments: of its command line.
        timeout_seconds: after which it is ended.
        group: control group that it enters before Python starts, so that all its memory is counted there.

    Raises:
        subprocess.CalledProcessError: when it does not end well; the end of its stderr is a note of the error.
        subprocess.TimeoutExpired: when it does not end in time.
    """
    # -P: not from the working directory, where the package's source is
    command = [sys.executable, "-P", "-m", module, *arguments]
    variables = environment()
    if group is not None:
        command = ["/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *command]
        variables[GROUP_VARIABLE] = str(group)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_seconds, check=True, env=variables
        )
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr[-2000:])
        raise
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def described(error: BaseException) -> str:
    """An error as one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def device_folder() -> str:
    """The name of the folder for the results of this machine: ``cpu-2-cores``, ``nvidia-h100-80gb-hbm3``."""
    if torch.cuda.is_available():
        return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    return f"cpu-{len(os.sched_getaffinity(0))}-cores"


def machine() -> str:
    """Python, torch and the device, as the first line above a table."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return f"Python {platform.python_version()}, torch {torch.__version__}, {device}"


def report(head: str, table: str, results: dict[str, Any], json_path: Path | None) -> None:
    """Print the table under its first line, and write the raw figures where that is wanted."""
    print(f"{head}\n\n{table}")
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=1))
