"""``memory_per_batch.csv``: one row a step, in the units that its header names; written, and read back."""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.measure.step_record import StepRecord
from lightning_batchmem.plan.records import MIB, PHASES

NAME = "memory_per_batch.csv"


def columns(*, has_peak: bool = True) -> tuple[str, ...]:
    """The header, the same on every device that has a peak counter.

    Args:
        has_peak: ``False`` where the device gives only current values: no "peak" in the names then.
    """
    peak = "peak_" if has_peak else ""
    return (
        "step",
        "stage",
        "batch_size",
        f"{peak}allocated_mib",
        f"{peak}reserved_mib",
        "limit_mib",
        "samples_per_s",
        "items_per_s",
        "step_ms",
        "data_wait_pct",
        "gpu_pct",
        "cpu_pct",
        *(f"{phase}_{peak}mib" for phase in PHASES),
    )


class BatchCsv:
    """Appends rows to ``memory_per_batch.csv`` in a directory.

    A run that goes on (resumed, or a second ``fit`` with the same trainer) appends to its file when the header is the
    same. A new run, or another header, leaves what is there alone and takes the next free name:
    ``memory_per_batch_1.csv``, ``memory_per_batch_2.csv`` ...

    An error later on (a full disk) ends the file with a warning, not the training.

    Args:
        directory: made when it does not exist.
        resume: whether the run goes on.
        own_path: the file that it wrote before in this process; ``None``: it goes on in the newest.
        has_peak: see :func:`columns`.

    Raises:
        OSError: when the directory or the file cannot be written.
    """

    def __init__(
        self, directory: Path, *, resume: bool = False, own_path: Path | None = None, has_peak: bool = True
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        header = columns(has_peak=has_peak)
        self.path, self._file = _opened(directory, header, resume=resume, own_path=own_path)
        self._rows = csv.writer(self._file)
        try:
            if self._file.tell() == 0:
                self._rows.writerow(header)
            elif not _ends_a_row(self.path):  # the run before was killed in the middle of a row
                self._file.write("\r\n")
            self._file.flush()
        except OSError:
            with contextlib.suppress(OSError):  # closing flushes once more
                self._file.close()
            raise

    def write(self, step: StepRecord, *, world_size: int = 1) -> None:
        """Add the row of one step; it may stay in the buffer until :meth:`flush`.

        Args:
            step: what was measured. Its time is the device's own where that is known.
            world_size: the number of ranks, by which samples and items are multiplied.
        """
        if self._file.closed:
            return
        phases, wait = step.peaks.phase_peak_bytes, step.wait_seconds
        key, percent = step.utilization or ("", 0.0)
        seconds = step.seconds if step.device_seconds is None else step.device_seconds
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
            round(100.0 * wait / step.seconds, 2) if wait is not None and step.seconds > 0 else None,
            round(percent, 2) if key == "gpu_pct" else None,
            round(percent, 2) if key == "cpu_pct" else None,
            *(_mib(phases.get(phase)) for phase in PHASES),
        )
        try:
            self._rows.writerow(row)
        except OSError as error:
            self._give_up(error)

    def flush(self) -> None:
        """Hand what is in the buffer to the operating system."""
        try:
            if not self._file.closed:
                self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        self.flush()
        self._file.close()

    def _give_up(self, error: OSError) -> None:
        with contextlib.suppress(OSError):  # closing flushes once more
            self._file.close()
        rank_zero_warn(f"{self.path} gets no more rows: {error}")


class Row(NamedTuple):
    """One row of ``memory_per_batch.csv`` in bytes and seconds; what the file leaves empty is ``None``.

    Args:
        step: which batch it was, from 0.
        stage: ``"train"``, or the evaluation that it belongs to.
        batch_size: samples in it, on the rank that wrote.
        peak_bytes: highest allocated bytes inside it (host: resident set).
        peak_reserved_bytes: highest reserved bytes inside it.
        limit_bytes: what the process might hold, where it was asked at this step.
        samples_per_second: samples of all ranks over its wall time.
        step_seconds: its wall time.
        phase_peak_bytes: phase -> highest allocated bytes while it ran, for the phases that are known.
        has_peak: ``False`` where the bytes are only the highest seen at the marks of the step.
    """

    step: int
    stage: str
    batch_size: int | None
    peak_bytes: int | None
    peak_reserved_bytes: int | None
    limit_bytes: int | None
    samples_per_second: float | None
    step_seconds: float | None
    phase_peak_bytes: Mapping[str, int]
    has_peak: bool = True


def read_rows(path: Path) -> list[Row]:
    """Read back what :class:`BatchCsv` wrote, however it ended.

    A row that a killed process left half written is passed over, at the end of the file and, where a run that was
    resumed went on behind it, in the middle.

    Args:
        path: of the file.

    Returns:
        Its complete rows, in their order.

    Raises:
        ValueError: when the file has another header.
        OSError: when it cannot be read.
    """
    rows: list[Row] = []
    header: list[str] = []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for line in file:
            cells = line.rstrip("\r\n").split(",")
            if not line.endswith("\n"):  # cut short, perhaps in the middle of a number
                break
            if not header:
                header = cells
                if not {"step", "stage"} <= set(header) or not {"allocated_mib", "peak_allocated_mib"} & set(header):
                    raise ValueError(f"path must be that of a {NAME}, got {path} with the header {line.strip()[:80]!r}")
            elif len(cells) == len(header) and (row := _row(dict(zip(header, cells, strict=True)))) is not None:
                rows.append(row)
    return rows


def _row(cells: Mapping[str, str]) -> Row | None:
    """The row in these cells; ``None`` when one of them is no number."""
    has_peak = "peak_allocated_mib" in cells
    peak = "peak_" if has_peak else ""

    def number(name: str) -> float | None:
        return float(cells[name]) if cells.get(name) else None

    def count_bytes(name: str) -> int | None:
        return None if (mib := number(name)) is None else round(mib * MIB)

    try:
        phases = {phase: count_bytes(f"{phase}_{peak}mib") for phase in PHASES}
        size, step_ms = number("batch_size"), number("step_ms")
        return Row(
            step=int(cells["step"]),
            stage=cells["stage"],
            batch_size=None if size is None else int(size),
            peak_bytes=count_bytes(f"{peak}allocated_mib"),
            peak_reserved_bytes=count_bytes(f"{peak}reserved_mib"),
            limit_bytes=count_bytes("limit_mib"),
            samples_per_second=number("samples_per_s"),
            step_seconds=None if step_ms is None else step_ms / 1e3,
            phase_peak_bytes={phase: peak_bytes for phase, peak_bytes in phases.items() if peak_bytes is not None},
            has_peak=has_peak,
        )
    except (ValueError, OverflowError):  # a disk that was full, or switched off, leaves anything
        return None


def _mib(number: int | None) -> float | None:
    return None if number is None else round(number / MIB, 3)


def _per_second(count: float | None, world_size: int, seconds: float) -> float | None:
    return None if count is None or seconds <= 0 else round(count * world_size / seconds, 3)


def _opened(directory: Path, header: Sequence[str], *, resume: bool, own_path: Path | None) -> tuple[Path, TextIO]:
    if resume:
        path = own_path if own_path is not None and own_path.parent == directory else _newest(directory)
        if path.exists() and _has_header(path, header):
            return path, path.open("a", newline="", encoding="utf-8")
    while True:  # another run may take the same number at the same time
        newest = _newest(directory)
        path = newest
        if newest.exists() and newest.stat().st_size:
            path = directory / f"{Path(NAME).stem}_{_number_of(newest) + 1}.csv"
        try:
            return path, path.open("a" if path.exists() else "x", newline="", encoding="utf-8")
        except FileExistsError:
            continue


def _newest(directory: Path) -> Path:
    """The file with the highest number; the one without a number where there is none yet."""
    return max((directory / NAME, *directory.glob(f"{Path(NAME).stem}_*.csv")), key=_number_of)


def _number_of(path: Path) -> int:
    match = re.fullmatch(rf"{Path(NAME).stem}_(\d+)\.csv", path.name)
    return int(match[1]) if match else (0 if path.name == NAME else -1)


def _has_header(path: Path, header: Sequence[str]) -> bool:
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), None) == list(header)


def _ends_a_row(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
