"""``memory_per_batch.csv``: one row per step; written, and read back."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.run_folder import CSV_NAME
from lightning_batchmem.profile.step import UNREAD, Interval

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
    "peak_before_mib",
)
_MIB = 1 / MIB


class StepCsv:
    """Writes the rows of a file.

    Args:
        file: the file, which is empty. It is closed at the end, and after an error.
        world_size: the number of ranks.
        has_exact_times: whether the time of each step is known. On a device, which works while the
            host goes on, only the mean time of the steps of an interval is.
    """

    def __init__(self, file: TextIO, *, world_size: int = 1, has_exact_times: bool = True) -> None:
        self._world_size = world_size
        self._has_exact_times = has_exact_times
        self._file = file
        self._rows = csv.writer(file)
        self._rows.writerow(COLUMNS)

    def take(self, interval: Interval) -> None:
        """Write the steps, so that another process can read them."""
        if self._file.closed:
            return
        try:
            self._rows.writerows(self._cells(interval))
            self._file.flush()
        except OSError as error:
            # Closing the file flushes it again, which may fail too.
            with suppress(OSError):
                self._file.close()
            rank_zero_warn(f"{self._file.name} gets no more rows: {error}")

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            rank_zero_warn(f"{self._file.name} lacks its last rows: {error}")

    def _cells(self, interval: Interval) -> Iterator[list[object]]:
        """Yield the cells of each row, in the order of the columns; unknown ones are empty."""
        mean_seconds = None if self._has_exact_times else interval.totals.times.step_seconds
        for step in interval.steps:
            # The device was read at the end of the last step.
            reading = interval.reading if step is interval.steps[-1] else UNREAD
            seconds = step.seconds if step.is_first else mean_seconds or step.seconds
            ranks_per_second = self._world_size / seconds if seconds > 0 else None
            wait_percent = 100.0 / step.seconds if step.seconds > 0 else None
            kind, percent = reading.utilization or ("", None)
            yield [
                step.number,
                step.stage,
                step.batch_size,
                _product(step.peak_bytes, _MIB),
                _product(step.peak_reserved_bytes, _MIB),
                _product(reading.limit_bytes, _MIB),
                _product(step.batch_size, ranks_per_second),
                _product(step.items, ranks_per_second),
                _product(seconds, 1e3),
                _product(step.wait_seconds, wait_percent),
                _product(percent if kind == "gpu_pct" else None, 1),
                _product(percent if kind == "cpu_pct" else None, 1),
                _product(step.before_bytes, _MIB),
            ]


def _product(value: float | None, factor: float | None) -> str:
    return "" if value is None or factor is None else f"{value * factor:.3f}"


Row = dict[str, Any]
"""``step``, ``stage`` and all columns in MiB, which are None where the file has no value."""


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, which take about 500 bytes of memory each.

    Raises:
        ValueError: if it is another file, or is damaged.
    """
    with path.open(newline="", encoding="utf-8") as file:
        # The last row of a run that was killed may be cut off.
        reader = csv.DictReader(line for line in file if line.endswith("\n"))
        header = reader.fieldnames or ()
        if not {"step", "stage", "peak_allocated_mib"} <= set(header):
            raise ValueError(
                f"path must be that of a {CSV_NAME}, got {path} with the header"
                f" {','.join(header)[:80]!r}"
            )
        return [_read_row(cells) for cells in reader]


def _read_row(cells: Mapping[str, str]) -> Row:
    memory = {name: text for name, text in cells.items() if name.endswith("_mib")}
    counts = {name: float(text) if text else None for name, text in memory.items()}
    return {"step": int(cells["step"]), "stage": cells["stage"], **counts}
