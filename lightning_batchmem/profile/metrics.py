"""The metrics of the steps between two logs, and the loggers that get them."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.profiled_stage import logs_at_all
from lightning_batchmem._lightning.trainer_state import is_of_lightning
from lightning_batchmem.devices.foreign_values import error_text
from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.flop_step import FlopStep
from lightning_batchmem.profile.step import DeviceReading, Interval


@dataclass
class LoggerMetrics:
    """Sends the metrics of each interval to the loggers of a Trainer.

    Args:
        loggers: the loggers; one that raises an error gets no more metrics.
        world_size: the number of ranks, which have batches of this rank's size.
        flops: the counted operations of a step; None if they are not counted.
        limit_bytes: what this process may take, as it was read last; None if it is unknown.
        batch_sizes: the size that was logged last, by stage.
    """

    loggers: list[Logger]
    world_size: int
    flops: FlopStep | None = None
    limit_bytes: int | None = None
    batch_sizes: dict[str, int | None] = field(default_factory=dict)

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
                name = type(logger).__name__
                rank_zero_warn(
                    f"{name} gets no more metrics of MemoryProfiler: {error_text(error)}"
                )

    def metrics(self, interval: Interval, reading: DeviceReading) -> dict[str, float]:
        """Return the metrics in MiB, ms and per cent, without the unknown ones.

        Those of an evaluation have its stage at the end, as in ``speed/step_ms_validate``.
        """
        totals = interval.totals
        times = totals.times
        ranks = self.world_size
        # Only an allocator reserves memory; without one a peak is the process's.
        has_tensors = totals.peak_reserved_bytes is not None
        process_bytes = totals.peak_reserved_bytes if has_tensors else totals.peak_bytes
        known: dict[str, float | None] = {
            "memory/peak_process_mib": _mib(process_bytes),
            "memory/peak_tensors_mib": _mib(totals.peak_bytes if has_tensors else None),
            "speed/samples_per_s": times.samples.per_second(ranks),
            "speed/items_per_s": times.items.per_second(ranks),
            "speed/step_ms": 1e3 * times.step_seconds,
            "speed/data_wait_pct": times.wait.per_second(100.0),
        }
        # It is the same in most intervals, and each value takes time in a logger.
        if totals.batch_size != self.batch_sizes.get(interval.stage):
            known["speed/samples_per_batch"] = totals.batch_size
            self.batch_sizes[interval.stage] = totals.batch_size
        self.limit_bytes = reading.limit_bytes or self.limit_bytes
        if self.limit_bytes and process_bytes is not None:
            known["memory/used_pct"] = 100.0 * process_bytes / self.limit_bytes
        if reading.utilization is not None:
            name, percent = reading.utilization
            known[f"speed/{name}"] = percent
        if interval.stage != "train":
            known = {f"{name}_{interval.stage}": value for name, value in known.items()}
        else:
            known["memory/process_limit_mib"] = _mib(reading.limit_bytes)
            known["memory/alloc_retries"] = reading.alloc_retries or None
            known["memory/ooms"] = reading.ooms or None
            if self.flops is not None:
                rate = self.flops.rate(times.samples.per_second())
                known["speed/tflops_per_device"] = rate.tflops_per_device
                known["speed/mfu_pct"] = rate.mfu_pct
        return {name: float(value) for name, value in known.items() if value is not None}


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


def _mib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / MIB
