"""The columns of a profile: one table, from which come the CSV and the metrics in the loggers."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.profiled_stage import logs_at_all
from lightning_batchmem._lightning.trainer_state import is_of_lightning
from lightning_batchmem.devices.foreign_values import error_text
from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.flop_step import FlopRate, FlopStep
from lightning_batchmem.profile.run_folder import CSV_NAME
from lightning_batchmem.profile.step import UNREAD, DeviceReading, Interval

_NO_FLOPS = FlopRate()


class Record(NamedTuple):
    """What the cells of a row are made of, or the metrics of an interval; None is unknown."""

    # A Step or Totals, which have the same names.
    steps: Any
    reading: DeviceReading
    step_seconds: float | None
    samples_per_second: float | None
    items_per_second: float | None
    wait_share: float | None
    limit_bytes: int | None = None
    flops: FlopRate = _NO_FLOPS

    @property
    def peak_allocated_bytes(self) -> int | None:
        # Only an allocator reserves memory; without one a peak is the process's.
        return None if self.steps.peak_reserved_bytes is None else self.steps.peak_bytes

    @property
    def peak_process_bytes(self) -> int | None:
        return self.steps.peak_bytes if self.steps.peak_reserved_bytes is None else None

    @property
    def used_share(self) -> float | None:
        held_bytes = self.peak_process_bytes or self.steps.peak_reserved_bytes
        return held_bytes / self.limit_bytes if held_bytes and self.limit_bytes else None


class Column(NamedTuple):
    """A quantity of steps, with one name everywhere.

    Args:
        metric: the name in the loggers; without a group it is only in the CSV.
        place: its place in a :class:`Record`.
        meaning: what it is, for the documentation; empty where the column before says it.
        factor: converts it to the unit; None for what is no measure.
        in_csv: whether the CSV has it.
        is_constant: whether it is logged only where it changes.
    """

    metric: str
    place: str
    meaning: str
    factor: float | None = None
    in_csv: bool = True
    is_constant: bool = False

    @property
    def name(self) -> str:
        """The name in the CSV, with its unit; where PyTorch has a name, it is that."""
        return self.metric.rpartition("/")[2]


_MIB = 1 / MIB
# The order is that of the CSV.
COLUMNS = (
    Column(
        "step",
        "steps.number",
        "number of the batch from 0; `train`, `validate`, `test` or `predict`",
    ),
    Column("stage", "steps.stage", ""),
    Column(
        "speed/batch_size",
        "steps.batch_size",
        "samples on this rank (`items_fn` counts others); logged if it changes",
        is_constant=True,
    ),
    Column(
        "memory/peak_allocated_mib",
        "peak_allocated_bytes",
        "the highest memory inside the step, in MiB of 2^20 bytes. On a GPU *allocated* is what"
        " tensors take and *reserved* what the process takes for them, as PyTorch counts both; on a"
        " CPU there is only what the *process* takes",
        _MIB,
    ),
    Column("memory/peak_reserved_mib", "steps.peak_reserved_bytes", "", _MIB),
    Column("memory/peak_process_mib", "peak_process_bytes", "", _MIB),
    Column(
        "memory/limit_mib",
        "reading.limit_bytes",
        "the limit of *reserved* or *process*, read at a log, at most once a second",
        _MIB,
    ),
    Column(
        "memory/used_pct",
        "used_share",
        "*reserved* or *process* in per cent of the limit",
        100,
        in_csv=False,
    ),
    Column(
        "speed/samples_per_s",
        "samples_per_second",
        "from one request of a batch to the next, without evaluation and checkpoints; of all ranks",
        1,
    ),
    Column("speed/items_per_s", "items_per_second", "", 1),
    Column("speed/step_ms", "step_seconds", "", 1e3),
    Column(
        "speed/data_wait_pct",
        "wait_share",
        "the share of that time until the batch arrived",
        100,
    ),
    Column(
        "speed/gpu_utilization_pct",
        "reading.gpu_percent",
        "busy share since the last reading; of a GPU by all processes on it",
        1,
    ),
    Column("speed/cpu_utilization_pct", "reading.cpu_percent", "", 1),
    Column(
        "peak_before_mib",
        "steps.before_bytes",
        "the highest memory between this step and the one before; it is read after a checkpoint, an"
        " evaluation and an epoch, and after each step if your callbacks or your module have a hook"
        " there",
        factor=_MIB,
    ),
    Column(
        "memory/num_alloc_retries",
        "reading.num_alloc_retries",
        "CUDA, from the first time on: how often the allocator released its cache and tried again,"
        " and how often there was still no memory",
        1,
        in_csv=False,
    ),
    Column("memory/num_ooms", "reading.num_ooms", "", 1, in_csv=False),
    Column(
        "speed/tflops_per_device",
        "flops.tflops_per_device",
        "with `flops=True` ([below](#floating-point-operations))",
        1,
        in_csv=False,
    ),
    Column("speed/mfu_pct", "flops.mfu_pct", "", 1, in_csv=False),
)


_CELLS = [column for column in COLUMNS if column.in_csv]
_METRICS = [column for column in COLUMNS if "/" in column.metric]
_FACTORS = [column.factor for column in _CELLS]
# Each reads all of them from a record in one call.
_read_cells = attrgetter(*(column.place for column in _CELLS))
_read_metrics = attrgetter(*(column.place for column in _METRICS))


class StepCsv:
    """Writes ``memory_per_batch.csv``, with a row for each step.

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
        self._rows.writerow([column.name for column in _CELLS])

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
        """Yield the cells of each row; unknown ones are empty."""
        mean_seconds = None if self._has_exact_times else interval.totals.times.step_seconds
        for step in interval.steps:
            seconds = step.seconds if step.is_first else mean_seconds or step.seconds
            ranks_per_second = self._world_size / seconds if seconds > 0 else None
            record = Record(
                step,
                # The device was read at the end of the last step.
                interval.reading if step is interval.steps[-1] else UNREAD,
                seconds,
                _product(step.batch_size, ranks_per_second),
                _product(step.items, ranks_per_second),
                _product(step.wait_seconds, 1 / step.seconds if step.seconds > 0 else None),
            )
            yield [
                value if value is None or factor is None else f"{value * factor:.3f}"
                for factor, value in zip(_FACTORS, _read_cells(record), strict=True)
            ]


def _product(value: float | None, factor: float | None) -> float | None:
    return None if value is None or factor is None else factor * value


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
    # A file of an earlier version lacks some columns.
    names = [column.name for column in _CELLS if column.factor == _MIB]
    counts = {name: float(cells[name]) if cells.get(name) else None for name in names}
    return {"step": int(cells["step"]), "stage": cells["stage"], **counts}


@dataclass
class LoggerMetrics:
    """Sends the metrics of each interval to the loggers of a Trainer.

    Args:
        loggers: the loggers; one that raises an error gets no more metrics.
        world_size: the number of ranks, which have batches of this rank's size.
        flops: the counted operations of a step; None if they are not counted.
        limit_bytes: what this process may take, as it was read last; None if it is unknown.
        logged: the last values of what is logged where it changes.
    """

    loggers: list[Logger]
    world_size: int
    flops: FlopStep | None = None
    limit_bytes: int | None = None
    logged: dict[str, Any] = field(default_factory=dict)

    def take(self, interval: Interval, reading: DeviceReading, logging_step: int) -> None:
        """Log the metrics of the steps since the last log, and of the device at their end."""
        if not self.loggers:
            return
        metrics = self.metrics(interval, reading)
        for logger in list(self.loggers):
            try:
                logger.log_metrics(dict(metrics), step=logging_step)
            # A logger may raise anything, and must not end a training.
            except Exception as error:  # noqa: BLE001
                self.loggers.remove(logger)
                rank_zero_warn(
                    f"{type(logger).__name__} gets no more metrics of MemoryProfiler:"
                    f" {error_text(error)}"
                )

    def metrics(self, interval: Interval, reading: DeviceReading) -> dict[str, float]:
        """Return the metrics of the steps, without the unknown ones.

        The first step and other slow ones have no speed, if no steady one is among the steps.
        Those of an evaluation have its stage at the end, as in ``speed/step_ms_validate``.
        """
        times = interval.totals.steady
        is_training = interval.stage == "train"
        self.limit_bytes = reading.limit_bytes or self.limit_bytes
        flops = _NO_FLOPS
        if not is_training:
            # What belongs to the whole run is logged in the training only.
            reading = DeviceReading(
                gpu_percent=reading.gpu_percent, cpu_percent=reading.cpu_percent
            )
        elif self.flops is not None:
            flops = self.flops.rate(times.per_second("samples"))
        record = Record(
            interval.totals,
            reading,
            times.step_seconds if times.steps else None,
            times.per_second("samples", self.world_size),
            times.per_second("items", self.world_size),
            times.per_second("wait"),
            self.limit_bytes,
            flops,
        )
        metrics = {}
        for column, value in zip(_METRICS, _read_metrics(record), strict=True):
            if value is None:
                continue
            name = column.metric if is_training else f"{column.metric}_{interval.stage}"
            if column.is_constant:
                # Each value takes time in a logger.
                if value == self.logged.get(name):
                    continue
                self.logged[name] = value
            metrics[name] = float(value) if column.factor is None else value * column.factor
        return metrics


def loggers_of(trainer: Trainer, *, all_loggers: bool) -> list[Logger]:
    """Return the loggers that get metrics."""
    # Without log_every_n_steps, nothing is sent to them.
    loggers = list(trainer.loggers) if logs_at_all(trainer) else []
    if all_loggers:
        return loggers
    others = [one for one in loggers if not is_of_lightning(one, "log_metrics")]
    if others:
        rank_zero_warn(
            f"{type(others[0]).__name__} gets no metrics of MemoryProfiler, which it may not"
            " expect. To log them there, add MemoryProfiler() to the callbacks."
        )
    return [one for one in loggers if one not in others]
