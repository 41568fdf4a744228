"""What benchmarks share: a bare Trainer, fresh processes that answer in JSON, the line that names the machine."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

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
    """Print what :func:`in_fresh_process` reads, on a line of its own."""
    print("\n" + json.dumps(result))


def in_fresh_process(module: str, *arguments: str, timeout_seconds: float = 600.0) -> dict[str, Any]:
    """Run ``python -m module`` with ``arguments`` and read the JSON in the last line of its output.

    Raises:
        subprocess.CalledProcessError: when it does not end well; the end of its stderr is a note of the error.
        subprocess.TimeoutExpired: when it does not end in time.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=True)
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr[-2000:])
        raise
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def machine() -> str:
    """Python, torch and the device, as the first line above a table."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return f"Python {platform.python_version()}, torch {torch.__version__}, {device}"


def report(head: str, table: str, results: dict[str, Any], json_path: Path | None) -> None:
    """Print the table under its first line, and write the raw figures where that is wanted."""
    print(f"{head}\n\n{table}")
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=1))
