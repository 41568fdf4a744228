"""The metrics of the steps between two logs, and the loggers that get them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, MemoryModel
from lightning_batchmem.profile.flop_step import FlopStep
from lightning_batchmem.profile.totals import Interval

# No prediction reaches beyond so many times the largest size that was measured.
_MAX_SIZE_RATIO = 1.5


@dataclass
class LoggerMetrics:
    """Sends the metrics of each interval to the loggers of a Trainer.

    Args:
        loggers: the loggers; one that raises an error gets no more metrics.
        world_size: the number of ranks, which have batches of this rank's size.
        total_bytes: memory of the whole device; None where no allocator reserves a part of it.
        plan: the plan of a BatchFinder in the same run; None without one.
        is_host: whether the peaks are those of the resident set.
        flops: the counted operations of a step; None if they are not counted.
    """

    loggers: list[Logger]
    world_size: int
    total_bytes: int | None = None
    plan: Plan | None = None
    is_host: bool = False
    flops: FlopStep | None = None

    def take(self, interval: Interval) -> None:
        if self.loggers:
            self.log(self.metrics(interval), interval.logging_step)

    def metrics(self, interval: Interval) -> dict[str, float]:
        """Return the metrics in MiB, ms and per cent, without the unknown ones."""
        totals = interval.totals
        reading = interval.reading
        reserved_bytes = totals.maxima.get("reserved")
        known: dict[str, float | None] = {
            "memory/peak_allocated_mib": _share(totals.maxima.get("peak"), MIB),
            "memory/peak_reserved_mib": _share(reserved_bytes, MIB),
            "memory/reserved_pct": _share(reserved_bytes, self.total_bytes, 100.0),
            "memory/limit_mib": _share(reading.limit_bytes, MIB),
            "throughput/samples_per_s": totals.rate("samples", self.world_size),
            "throughput/items_per_s": totals.rate("items", self.world_size),
            "throughput/step_ms": 1e3 * totals.step_seconds,
            "throughput/data_wait_pct": totals.rate("wait_seconds", 100.0),
            "batch/size": totals.maxima.get("batch_size"),
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
            if self.plan is not None and totals.highest is not None:
                size = totals.highest.batch_size
                predicted = predicted_bytes(self.plan, size, is_host=self.is_host)
                known["memory/predicted_mib"] = _share(predicted, MIB)
            if self.flops is not None:
                rate = self.flops.rate(totals.rate("samples"))
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
                    f"{name} gets no more metrics of MemoryProfiler:"
                    f" {type(error).__name__}: {error}"
                )


def predicted_bytes(plan: Plan, batch_size: int | None, *, is_host: bool) -> int | None:
    """Return the peak of a training step that a plan expects; None if it does not reach this size.

    The lines of a plan are live bytes. On the host the peak of a step is the resident set, which is
    larger, so there it is what the search held at this size.
    """
    if batch_size is None:
        return None
    completed = {trial.batch_size: trial for trial in plan.trials if trial.outcome == "ok"}
    if is_host:
        return completed[batch_size].held_bytes if batch_size in completed else None
    lines = {} if plan.memory is None else dict(plan.memory.lines)
    lines.pop("evaluation", None)
    if not lines or batch_size > _MAX_SIZE_RATIO * max(completed, default=0):
        return None
    return round(MemoryModel(lines).predict_bytes(batch_size))


def _share(amount: float | None, whole: float | None, factor: float = 1.0) -> float | None:
    return factor * amount / whole if amount is not None and whole else None
