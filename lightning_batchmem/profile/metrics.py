"""The metrics of the steps between two logs, and the loggers that get them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.devices.foreign_values import error_text
from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.flop_step import FlopStep
from lightning_batchmem.profile.totals import Interval, ratio


@dataclass
class LoggerMetrics:
    """Sends the metrics of each interval to the loggers of a Trainer.

    Args:
        loggers: the loggers; one that raises an error gets no more metrics.
        world_size: the number of ranks, which have batches of this rank's size.
        flops: the counted operations of a step; None if they are not counted.
    """

    loggers: list[Logger]
    world_size: int
    flops: FlopStep | None = None

    def metrics(self, interval: Interval) -> dict[str, float]:
        """Return the metrics in MiB, ms and per cent, without the unknown ones."""
        totals = interval.totals
        ranks = self.world_size
        reading = interval.reading
        known: dict[str, float | None] = {
            "memory/peak_allocated_mib": ratio(totals.peak_bytes, MIB),
            "memory/peak_reserved_mib": ratio(totals.reserved_bytes, MIB),
            "memory/limit_mib": ratio(reading.limit_bytes, MIB),
            "throughput/samples_per_s": ratio(totals.samples, totals.samples_seconds, ranks),
            "throughput/items_per_s": ratio(totals.items, totals.items_seconds, ranks),
            "throughput/step_ms": 1e3 * totals.step_seconds,
            "throughput/data_wait_pct": ratio(totals.wait_seconds, totals.waited_seconds, 100.0),
            "batch/size": totals.batch_size,
        }
        if reading.utilization is not None:
            name, percent = reading.utilization
            known[f"utilization/{name}"] = percent
        stage = interval.stage
        if stage != "train":
            # The stage replaces the first part of a name, as in validate/peak_allocated_mib.
            names = {name: f"{stage}/{name.partition('/')[2]}" for name in known}
            names["batch/size"] = f"{stage}/batch_size"
            known = {names[name]: value for name, value in known.items()}
        else:
            known["memory/alloc_retries"] = reading.alloc_retries
            if self.flops is not None:
                rate = self.flops.rate(totals.samples_per_second)
                known["throughput/tflops_per_device"] = rate.tflops_per_device
                known["throughput/mfu_pct"] = rate.mfu_pct
        return {name: float(value) for name, value in known.items() if value is not None}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for logger in list(self.loggers):
            try:
                logger.log_metrics(dict(metrics), step=step)
            # A logger may raise anything, and must not end a training.
            except Exception as error:  # noqa: BLE001
                self.loggers.remove(logger)
                name = type(logger).__name__
                rank_zero_warn(
                    f"{name} gets no more metrics of MemoryProfiler: {error_text(error)}"
                )
