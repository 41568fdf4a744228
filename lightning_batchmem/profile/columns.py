"""The columns of a profile: one table, from which come the CSV and the metrics in the loggers."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.profiled_stage import logs_at_all
from lightning_batchmem._lightning.trainer_state import is_of_lightning
from lightning_batchmem.devices.foreign_values import error_text
from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.flop_step import FlopStep
from lightning_batchmem.profile.run_folder import CSV_NAME
from lightning_batchmem.profile.step import UNREAD, DeviceReading, Step, Totals


class Column(NamedTuple):
    """A quantity of steps, with one name everywhere.

    Args:
        metric: the name in the loggers; without a group it is only in the CSV.
        meaning: what it is, for the documentation; empty where the column before says it.
        factor: converts it to the unit; None for what is no measure.
        in_csv: whether the CSV has it.
    """

    metric: str
    meaning: str
    factor: float | None = None
    in_csv: bool = True

    @property
    def name(self) -> str:
        """The name in the CSV, with its unit; where PyTorch has a name, it is that."""
        return self.metric.rpartition("/")[2]


_MIB = 1 / MIB
# The order is that of the CSV.
COLUMNS = (
    Column(
        "step",
        "number of the batch from 0; `train`, `validate`, `test` or `predict`",
    ),
    Column("stage", ""),
    Column(
        "speed/batch_size",
        "samples on this rank (`items_fn` counts others); logged if it changes",
    ),
    Column(
        "memory/peak_allocated_mib",
        "the highest memory inside the step, in MiB of 2^20 bytes. On a GPU *allocated* is what"
        " tensors take and *reserved* what the process takes for them, as PyTorch counts both; on a"
        " CPU there is only what the *process* takes",
        _MIB,
    ),
    Column("memory/peak_reserved_mib", "", _MIB),
    Column("memory/peak_process_mib", "", _MIB),
    Column(
        "memory/limit_mib",
        "the limit of *reserved* or *process*, read at a log, at most once a second",
        _MIB,
    ),
    Column(
        "memory/used_pct",
        "*reserved* or *process* in per cent of the limit",
        100,
        in_csv=False,
    ),
    Column(
        "speed/samples_per_s",
        "from one request of a batch to the next, without evaluation and checkpoints; of all ranks",
        1,
    ),
    Column("speed/items_per_s", "", 1),
    Column("speed/step_ms", "", 1e3),
    Column(
        "speed/data_wait_pct",
        "the share of that time until the batch arrived",
        100,
    ),
    Column(
        "speed/gpu_utilization_pct",
        "busy share since the last reading; of a GPU by all processes on it",
        1,
    ),
    Column("speed/cpu_utilization_pct", "", 1),
    Column(
        "peak_before_mib",
        "the highest memory between this step and the one before; it is read after a checkpoint, an"
        " evaluation and an epoch, and after each step if your callbacks or your module have a hook"
        " there",
        factor=_MIB,
    ),
    Column(
        "memory/num_alloc_retries",
        "CUDA, from the first time on: how often the allocator released its cache and tried again,"
        " and how often there was still no memory",
        1,
        in_csv=False,
    ),
    Column("memory/num_ooms", "", 1, in_csv=False),
    Column(
        "speed/tflops_per_device",
        "with `flops=True` ([below](#floating-point-operations))",
        1,
        in_csv=False,
    ),
    Column("speed/mfu_pct", "", 1, in_csv=False),
)


_FACTORS = {column.metric: column.factor or 1 for column in COLUMNS}
_CELLS = [column for column in COLUMNS if column.in_csv]
_MIB_NAMES = [column.name for column in _CELLS if column.factor == _MIB]


def _peak_name(totals: Totals) -> str:
    # Only an allocator reserves memory; without one a peak is the process's.
    if totals.peak_reserved_bytes is None:
        return "memory/peak_process_mib"
    return "memory/peak_allocated_mib"


def _of_reading(reading: DeviceReading) -> dict[str, float | None]:
    return {
        "memory/limit_mib": reading.limit_bytes,
        "speed/gpu_utilization_pct": reading.gpu_percent,
        "speed/cpu_utilization_pct": reading.cpu_percent,
        "memory/num_alloc_retries": reading.num_alloc_retries,
        "memory/num_ooms": reading.num_ooms,
    }


def _rates(
    amounts: Sequence[float | None], seconds: Sequence[float], factor: float = 1.0
) -> list[float | None]:
    """Return the amount of a second in each step; None where it is unknown."""
    return [
        None if amount is None or of_step <= 0 else factor * amount / of_step
        for amount, of_step in zip(amounts, seconds, strict=True)
    ]


class StepCsv:
    """Writes ``memory_per_batch.csv``, with a row for each step.

    Args:
        file: the file, which is empty. It is closed at the end, and after an error.
        world_size: the number of ranks.
        has_exact_times: whether the time of each step is known. On a device, which works while the
            host goes on, only the mean time of the steps between two readings is.
    """

    def __init__(self, file: TextIO, *, world_size: int = 1, has_exact_times: bool = True) -> None:
        self._world_size = world_size
        self._has_exact_times = has_exact_times
        self._file = file
        self._rows = csv.writer(file)
        self._rows.writerow([column.name for column in _CELLS])

    def take(self, totals: Totals) -> None:
        """Write the steps, so that another process can read them."""
        if self._file.closed:
            return
        try:
            self._rows.writerows(zip(*self._columns(totals), strict=True))
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

    def _columns(self, totals: Totals) -> Iterator[Iterable[object]]:
        """Yield the cells of each column; unknown ones are empty."""
        steps = totals.each
        # Each field has the values of all steps.
        of_steps: Any = Step._make(zip(*steps, strict=True))
        mean_seconds = None if self._has_exact_times else totals.times.step_seconds
        seconds = [
            step.seconds if step.is_first else mean_seconds or step.seconds for step in steps
        ]
        values = {
            "step": of_steps.number,
            "stage": of_steps.stage,
            "speed/batch_size": of_steps.batch_size,
            _peak_name(totals): of_steps.peak_bytes,
            "memory/peak_reserved_mib": of_steps.peak_reserved_bytes,
            "speed/samples_per_s": _rates(of_steps.batch_size, seconds, self._world_size),
            "speed/items_per_s": _rates(of_steps.items, seconds, self._world_size),
            "speed/step_ms": seconds,
            "speed/data_wait_pct": _rates(of_steps.wait_seconds, of_steps.seconds),
            "peak_before_mib": of_steps.before_bytes,
        }
        unknown = [None] * len(steps)
        for name, value in _of_reading(totals.reading).items():
            # The device was read at the end of the last step.
            values[name] = [*unknown[1:], value]
        for column in _CELLS:
            cells = values.get(column.metric, unknown)
            factor = column.factor
            if factor is not None:
                cells = ["" if value is None else f"{value * factor:.3f}" for value in cells]
            yield cells


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
    counts = {name: float(cells[name]) if cells.get(name) else None for name in _MIB_NAMES}
    return {"step": int(cells["step"]), "stage": cells["stage"], **counts}


@dataclass
class LoggerMetrics:
    """Sends the metrics of the steps between two logs to the loggers of a Trainer.

    Args:
        loggers: the loggers; one that raises an error gets no more metrics.
        world_size: the number of ranks, which have batches of this rank's size.
        flops: the counted operations of a step; None if they are not counted.
        limit_bytes: what this process may take, as it was read last; None if it is unknown.
        batch_sizes: the last one of each stage, which is logged where it changes.
    """

    loggers: list[Logger]
    world_size: int
    flops: FlopStep | None = None
    limit_bytes: int | None = None
    batch_sizes: dict[str, int] = field(default_factory=dict)

    def take(self, totals: Totals, logging_step: int) -> None:
        """Log the metrics of the steps since the last log, and of the device at their end."""
        if not self.loggers:
            return
        metrics = self.metrics(totals)
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

    def metrics(self, totals: Totals) -> dict[str, float]:
        """Return the metrics of the steps, without the unknown ones.

        The first step and other slow ones have no speed, if no steady one is among the steps.
        Those of an evaluation have its stage at the end, as in ``speed/step_ms_validate``.
        """
        times = totals.steady
        reading = totals.reading
        self.limit_bytes = limit_bytes = reading.limit_bytes or self.limit_bytes
        held_bytes = totals.peak_reserved_bytes or totals.peak_bytes
        values = {
            _peak_name(totals): totals.peak_bytes,
            "memory/peak_reserved_mib": totals.peak_reserved_bytes,
            "memory/used_pct": held_bytes / limit_bytes if held_bytes and limit_bytes else None,
            "speed/samples_per_s": times.per_second("samples", self.world_size),
            "speed/items_per_s": times.per_second("items", self.world_size),
            "speed/step_ms": times.step_seconds if times.steps else None,
            "speed/data_wait_pct": times.per_second("wait"),
        }
        stage = totals.stage
        batch_size = totals.batch_size
        if batch_size is not None and batch_size != self.batch_sizes.get(stage):
            self.batch_sizes[stage] = batch_size
            values["speed/batch_size"] = float(batch_size)
        is_training = stage == "train"
        if reading is not UNREAD:
            # What belongs to the whole run is logged in the training only.
            values |= {
                name: value
                for name, value in _of_reading(reading).items()
                if is_training or name.startswith("speed/")
            }
        if is_training and self.flops is not None:
            flops = self.flops.rate(times.per_second("samples"))
            values["speed/tflops_per_device"] = flops.tflops_per_device
            values["speed/mfu_pct"] = flops.mfu_pct
        suffix = "" if is_training else f"_{stage}"
        return {
            name + suffix: value * _FACTORS[name]
            for name, value in values.items()
            if value is not None
        }


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
