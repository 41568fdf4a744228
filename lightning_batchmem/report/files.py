"""The files of a run beside its CSV, and whether a directory can hold any."""

from __future__ import annotations

import tempfile
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.report.step_csv import NAME

PLAN_NAME = "batch_plan.json"


def check_writable(directory: Path) -> None:
    """Make the directory, and try to write in it; nothing stays there.

    Raises:
        OSError: when it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(b"a full disk lets a file be made, and not be written")
    except OSError as error:
        message = f"MemoryProfiler cannot write into the log directory, as MemoryProfiler(csv=False) would not: {error}"
        raise type(error)(error.errno, message) from error


def write_beside(csv_path: Path, name: str, text: str) -> None:
    """Write a file of the same run; what cannot be written is a warning, since the run is over or goes on without it.

    Args:
        csv_path: of the run's CSV, whose number the file gets (``memory_per_batch_1.csv``).
        name: of the file, without a number.
        text: its content.
    """
    number = csv_path.stem.removeprefix(Path(NAME).stem)
    path = csv_path.with_name(f"{Path(name).stem}{number}{Path(name).suffix}")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        rank_zero_warn(f"{path} could not be written: {error}")
