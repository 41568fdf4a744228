"""``memory_per_batch.csv``: one row per step; written, and read back."""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.measure.step_record import StepRecord
from lightning_batchmem.plan.records import MIB, PHASES

NAME = "memory_per_batch.csv"
PLAN_NAME = "batch_plan.json"
COLUMNS = (
    *("step", "stage", "batch_size", "peak_allocated_mib", "peak_reserved_mib", "limit_mib", "samples_per_s"),
    *("items_per_s", "step_ms", "data_wait_pct", "gpu_pct", "cpu_pct", *(f"{phase}_peak_mib" for phase in PHASES)),
)
_PHASE_COLUMNS = tuple((phase, f"{phase}_peak_mib") for phase in PHASES)
_FLUSH_SECONDS = 1.0


class StepCsv:
    """Appends rows to ``memory_per_batch.csv`` in a directory.

    A run that resumes appends to its own file, or to the newest one, if the header is the same. Any other run creates
    the next free name: ``memory_per_batch_1.csv``, ``memory_per_batch_2.csv`` and so on. An error while writing (a
    full disk) ends the file with a warning.

    Raises:
        OSError: if the directory or the file cannot be written.
    """

    def __init__(self, directory: Path, *, resume: bool = False, own_path: Path | None = None) -> None:
        try:
            self._open(directory, resume, own_path)
        except OSError as error:
            message = (
                "MemoryProfiler cannot write into the log directory; use another one, or MemoryProfiler(csv=False)"
            )
            raise type(error)(error.errno, f"{message}: {error}") from error

    def _open(self, directory: Path, resume: bool, own_path: Path | None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = own_path if own_path is not None and own_path.parent == directory else _newest(directory)
        self._is_empty = not (resume and path is not None and _has_header(path))
        self.path, self._file = _create(directory) if self._is_empty or path is None else _append(path)
        self._rows = csv.writer(self._file)  # half the time of a DictWriter
        self._flushed_at = time.monotonic()
        try:
            if self._is_empty:
                self._rows.writerow(COLUMNS)
            self._file.flush()
        except OSError:
            self._abandon()
            raise

    def write(self, step: StepRecord, *, world_size: int = 1) -> None:
        """Add the row of one step; it reaches the file within a second, or with :meth:`close`."""
        if self._file.closed:
            return
        seconds = step.seconds if step.device_seconds is None else step.device_seconds
        phases, wait_seconds = step.peaks.phase_peak_bytes, step.wait_seconds
        key, percent = step.utilization or ("", 0.0)
        row = (
            step.number,
            step.stage,
            step.batch_size,
            _mib(step.peaks.peak_bytes if phases else None),
            _mib(step.peaks.peak_reserved_bytes),
            _mib(step.limit_bytes),
            _per_second(step.batch_size, world_size, seconds),
            _per_second(step.items, world_size, seconds),
            round(1e3 * seconds, 3),
            round(100.0 * wait_seconds / step.seconds, 2) if wait_seconds is not None and step.seconds > 0 else None,
            round(percent, 2) if key == "gpu_pct" else None,
            round(percent, 2) if key == "cpu_pct" else None,
            *[_mib(phases.get(phase)) for phase in PHASES],
        )
        self._is_empty = False
        try:
            self._rows.writerow(row)
            if (now := time.monotonic()) - self._flushed_at >= _FLUSH_SECONDS:
                self._flushed_at = now
                self._file.flush()
        except OSError as error:
            self._abandon(error)

    def close(self) -> None:
        """Close the file, and delete it if it was created and has no row; a second call does nothing."""
        if self._file.closed:
            return
        try:
            self._file.close()
        except OSError as error:
            self._abandon(error)
        if self._is_empty:
            self.path.unlink(missing_ok=True)

    def write_beside(self, name: str, text: str) -> None:
        """Write another file of this run, with the number of the CSV in its name; warn if this fails."""
        number = self.path.stem.removeprefix(Path(NAME).stem)
        path = self.path.with_name(f"{Path(name).stem}{number}{Path(name).suffix}")
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            rank_zero_warn(f"{path} could not be written: {error}")

    def _abandon(self, error: OSError | None = None) -> None:
        with suppress(OSError):  # closing flushes again
            self._file.close()
        if error is not None:
            rank_zero_warn(f"{self.path} gets no more rows: {error}")


def _mib(count_bytes: int | None) -> float | None:
    return None if count_bytes is None else round(count_bytes / MIB, 3)


def _per_second(count: float | None, world_size: int, seconds: float) -> float | None:
    return None if count is None or seconds <= 0 else round(count * world_size / seconds, 3)


def _create(directory: Path) -> tuple[Path, TextIO]:
    while True:
        newest = _newest(directory)
        path = directory / (NAME if newest is None else f"{Path(NAME).stem}_{_number_of(newest) + 1}.csv")
        with suppress(FileExistsError):  # another run created it in the meantime
            return path, path.open("x", newline="", encoding="utf-8")


def _append(path: Path) -> tuple[Path, TextIO]:
    with path.open("rb") as file:
        file.seek(-1, 2)
        is_cut_off = file.read(1) != b"\n"  # a killed run leaves half a row
    appended = path.open("a", newline="", encoding="utf-8")
    if is_cut_off:
        appended.write("\r\n")
    return path, appended


def _newest(directory: Path) -> Path | None:
    """Return the file (or directory) with the highest number; None if there is none."""
    paths = [path for path in directory.glob(f"{Path(NAME).stem}*.csv") if _number_of(path) >= 0]
    return max(paths, key=_number_of, default=None)


def _number_of(path: Path) -> int:
    match = re.fullmatch(rf"{Path(NAME).stem}_(\d+)\.csv", path.name)
    return int(match[1]) if match else (0 if path.name == NAME else -1)


def _has_header(path: Path) -> bool:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return next(csv.reader(file), None) == list(COLUMNS)
    except (OSError, ValueError, csv.Error):  # a directory, not readable, or not UTF-8
        return False


class Row(NamedTuple):
    """One row of ``memory_per_batch.csv`` in bytes and seconds; None where the file has no value."""

    step: int
    stage: str
    batch_size: int | None
    peak_bytes: int | None
    peak_reserved_bytes: int | None
    limit_bytes: int | None
    samples_per_second: float | None
    step_seconds: float | None
    phase_peak_bytes: Mapping[str, int]


def iter_rows(path: Path) -> Iterator[Row]:
    """Yield the complete rows of a file; rows that a killed run left incomplete are skipped.

    Raises:
        ValueError: if the file has another header.
        OSError: if it cannot be read.
    """
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        lines = (line for line in file if line.endswith("\n"))  # the last may be cut off inside a number
        reader = csv.DictReader(lines, restkey="more", quoting=csv.QUOTE_NONE)
        header = reader.fieldnames or ()
        if not {"step", "stage", "peak_allocated_mib"} <= set(header):
            raise ValueError(f"path must be that of a {NAME}, got {path} with the header {','.join(header)[:80]!r}")
        for cells in reader:
            if None not in cells.values() and "more" not in cells and (row := _row(cells)) is not None:
                yield row


def read_rows(path: Path) -> list[Row]:
    """Return the rows of :func:`iter_rows`, about 600 bytes of memory each."""
    return list(iter_rows(path))


def _row(cells: Mapping[str, str]) -> Row | None:
    def number(name: str) -> float | None:
        return float(cells[name]) if cells.get(name) else None

    def count_bytes(name: str) -> int | None:
        return None if (mib := number(name)) is None else round(mib * MIB)

    try:
        phases = {phase: count_bytes(column) for phase, column in _PHASE_COLUMNS}
        size, step_ms = number("batch_size"), number("step_ms")
        return Row(
            step=int(cells["step"]),
            stage=cells["stage"],
            batch_size=None if size is None else int(size),
            peak_bytes=count_bytes("peak_allocated_mib"),
            peak_reserved_bytes=count_bytes("peak_reserved_mib"),
            limit_bytes=count_bytes("limit_mib"),
            samples_per_second=number("samples_per_s"),
            step_seconds=None if step_ms is None else step_ms / 1e3,
            phase_peak_bytes={phase: peak_bytes for phase, peak_bytes in phases.items() if peak_bytes is not None},
        )
    except (ValueError, OverflowError):  # the row is incomplete or damaged
        return None
