"""The files of a run: steps, plan and summary."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TextIO

from lightning.pytorch.utilities import rank_zero_warn

CSV_NAME = "memory_per_batch.csv"
PLAN_NAME = "batch_plan.json"
SUMMARY_NAME = "memory_summary.json"


class RunFolder:
    """The files of one run in a log directory.

    The first run has ``memory_per_batch.csv``. Each later one has the next free number in the names
    of all its files: ``memory_per_batch_1.csv``, ``memory_summary_1.json``.

    Args:
        directory: the log directory.

    Raises:
        OSError: if it cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.path, self.csv = _created(directory)

    def write(self, name: str, text: str) -> None:
        """Write a file beside the CSV, and warn if this fails.

        Its name gets the number of the run. A link with this name is replaced, not followed.
        """
        number = self.path.stem.removeprefix(Path(CSV_NAME).stem)
        path = self.path.with_name(name.replace(".", number + "."))
        try:
            path.unlink(missing_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            rank_zero_warn(f"{path} could not be written: {error}")


def _created(directory: Path) -> tuple[Path, TextIO]:
    for number in count():
        path = directory / (f"{Path(CSV_NAME).stem}_{number}.csv" if number else CSV_NAME)
        # A link to nothing raises this error too.
        with suppress(FileExistsError):
            return path, path.open("x", newline="", encoding="utf-8")
    raise AssertionError("the paths do not end")


def summary_name(stage: str) -> str:
    """Return the file name of the summary of a training or an evaluation.

    For an evaluation it is for example ``memory_summary_test.json``.
    """
    return SUMMARY_NAME if stage == "train" else SUMMARY_NAME.replace(".json", f"_{stage}.json")
