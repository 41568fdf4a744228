"""``memory_per_batch.csv``: one row per step; written, and read back."""

from __future__ import annotations

import csv
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import count, takewhile
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO

from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.plan.records import MIB, PHASES
from lightning_batchmem.profile.step import DeviceReading, Step
from lightning_batchmem.profile.totals import Interval

NAME = "memory_per_batch.csv"
PLAN_NAME = "batch_plan.json"
COLUMNS = (
    "step",
    "stage",
    "batch_size",
    "peak_allocated_mib",
    "peak_reserved_mib",
    "limit_mib",
    "samples_per_s",
    "items_per_s",
    "step_ms",
    "data_wait_pct",
    "gpu_pct",
    "cpu_pct",
    *[f"{phase}_peak_mib" for phase in PHASES],
    "oom_splits",
)
_HEADER = ",".join(COLUMNS) + "\r\n"


def make_log_dir(directory: Path) -> None:
    """Create the log directory, and raise an OSError with a remedy if it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=directory).close()
    except OSError as error:
        text = (
            "MemoryProfiler cannot write into the log directory; use another one, or"
            " MemoryProfiler(csv=False)"
        )
        raise type(error)(error.errno, f"{text}: {error}") from error


class StepCsv:
    """Writes ``memory_per_batch.csv``, or the next free ``memory_per_batch_1.csv``.

    A resumed run appends to its file.

    Args:
        directory: the directory of the file.
        resume: whether the run is resumed.
        own_path: the file of an earlier run of the same profiler.
        world_size: the number of ranks.
        has_exact_times: whether the time of each step is known. On a device only the mean time of
            the steps of an interval is.
    """

    # A write to the file takes as long as everything else about a row.
    flush_seconds = 1.0

    def __init__(
        self,
        directory: Path,
        *,
        resume: bool = False,
        own_path: Path | None = None,
        world_size: int = 1,
        has_exact_times: bool = True,
    ) -> None:
        self._next_flush = 0.0
        self._world_size = world_size
        self._has_exact_times = has_exact_times
        opened = None
        if resume:
            paths = [*takewhile(Path.exists, _paths(directory))]
            if own_path is not None and own_path.parent == directory:
                paths.append(own_path)
            opened = _appended(paths[-1]) if paths else None
        self.path, self._file = opened or _created(directory)
        self._rows = csv.writer(self._file)

    def take(self, interval: Interval) -> None:
        """Add a row for each step, which is in the file within a second of steps, or at the end."""
        if self._file.closed:
            return
        mean_seconds = {} if self._has_exact_times else interval.mean_seconds()
        # The device was read at the end of the last step.
        readings = [*[DeviceReading()] * (len(interval.steps) - 1), interval.reading]
        rows = [
            _cells(step, mean_seconds.get(step.is_slowed, step.seconds), self._world_size, reading)
            for step, reading in zip(interval.steps, readings, strict=True)
        ]
        try:
            self._rows.writerows(rows)
            now = time.monotonic()
            if now >= self._next_flush:
                self._next_flush = now + self.flush_seconds
                self._file.flush()
        except OSError as error:
            # Closing the file flushes it again, which may fail too.
            with suppress(OSError):
                self._file.close()
            rank_zero_warn(f"{self.path} gets no more rows: {error}")

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            rank_zero_warn(f"{self.path} lacks its last rows: {error}")

    def write_text(self, name: str, text: str) -> None:
        """Write another file of this run, and warn if this fails.

        Its name has the number of the CSV. A link with this name is replaced, not followed.
        """
        number = self.path.stem.removeprefix(Path(NAME).stem)
        path = self.path.with_name(name.replace(".", number + "."))
        new_path = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with new_path.open("x", encoding="utf-8") as file:
                file.write(text)
            new_path.replace(path)
        except OSError as error:
            with suppress(OSError):
                new_path.unlink(missing_ok=True)
            rank_zero_warn(f"{path} could not be written: {error}")


def _cells(step: Step, seconds: float, world_size: int, reading: DeviceReading) -> list[object]:
    """Return the cells of a row, in the order of the columns; those that are unknown are empty."""
    samples_per_second = items_per_second = data_wait_pct = ""
    if seconds > 0:
        if step.batch_size is not None:
            samples_per_second = f"{step.batch_size * world_size / seconds:.3f}"
        if step.items is not None:
            items_per_second = f"{step.items * world_size / seconds:.3f}"
    if step.wait_seconds is not None and step.seconds > 0:
        data_wait_pct = f"{100.0 * step.wait_seconds / step.seconds:.2f}"
    busy_name, busy_percent = reading.utilization or ("", 0.0)
    phase_bytes = step.phase_peak_bytes
    return [
        step.number,
        step.stage,
        step.batch_size,
        _mib(step.peak_bytes),
        _mib(step.peak_reserved_bytes),
        _mib(reading.limit_bytes),
        samples_per_second,
        items_per_second,
        f"{1e3 * seconds:.3f}",
        data_wait_pct,
        f"{busy_percent:.2f}" if busy_name == "gpu_pct" else "",
        f"{busy_percent:.2f}" if busy_name == "cpu_pct" else "",
        *(_mib(phase_bytes.get(phase)) for phase in PHASES),
        step.oom_splits,
    ]


# The texts are cached, because phases and steps often have the same peak.
@lru_cache(maxsize=64)
def _mib(count_bytes: int | None) -> str:
    return "" if count_bytes is None else str(round(count_bytes / MIB, 3))


def _paths(directory: Path) -> Iterator[Path]:
    return (
        directory / (f"{Path(NAME).stem}_{number}.csv" if number else NAME) for number in count()
    )


def _created(directory: Path) -> tuple[Path, TextIO]:
    for path in _paths(directory):
        # A link to nothing raises this error too.
        with suppress(FileExistsError):
            file = path.open("x", newline="", encoding="utf-8")
            file.write(_HEADER)
            file.flush()
            return path, file
    raise AssertionError("the paths do not end")


def _appended(path: Path) -> tuple[Path, TextIO] | None:
    """Open the file of an earlier run at its end.

    The result is None if the file has another header, or is a directory.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if file.readline() != _HEADER.encode():
            return None
        file.seek(-1, 2)
        # A killed run may leave half a row.
        is_cut_off = file.read(1) != b"\n"
    appended = path.open("a", newline="", encoding="utf-8")
    appended.write("\r\n" if is_cut_off else "")
    return path, appended


Row = dict[str, Any]
"""``step``, ``stage`` and all columns in MiB, which are None where the file has no value."""


def read_rows(path: Path) -> list[Row]:
    """Return the complete rows of a file, which take about 500 bytes of memory each.

    Rows that a killed run cut off are skipped.
    """
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        # The last line may be cut off inside a number.
        lines = (line for line in file if line.endswith("\n"))
        reader = csv.DictReader(lines, restkey="more", quoting=csv.QUOTE_NONE)
        header = reader.fieldnames or ()
        if not {"step", "stage", "peak_allocated_mib"} <= set(header):
            raise ValueError(
                f"path must be that of a {NAME}, got {path} with the header"
                f" {','.join(header)[:80]!r}"
            )
        complete = (cells for cells in reader if None not in cells.values() and "more" not in cells)
        return [row for cells in complete if (row := _read_row(cells)) is not None]


def _read_row(cells: Mapping[str, str]) -> Row | None:
    memory = {name: text for name, text in cells.items() if name.endswith("_mib")}
    try:
        counts = {name: float(text) if text else None for name, text in memory.items()}
        return {"step": int(cells["step"]), "stage": cells["stage"], **counts}
    except ValueError:
        # The row is incomplete or damaged.
        return None
