"""Report the steps of one run: rows, metrics, alerts and the summary."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.trainer_state import logs_at_all
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.alerts import Alerts
from lightning_batchmem.profile.flop_step import FlopStep
from lightning_batchmem.profile.steady_breakdown import SteadyBreakdown
from lightning_batchmem.profile.step_csv import StepCsv
from lightning_batchmem.profile.step_record import DeviceReading, StepRecord
from lightning_batchmem.profile.summary import Summary
from lightning_batchmem.profile.totals import Ratio, StageTotals, gather_ranks, rank_metrics


class StepReporter:
    """Reports the records of one run.

    The records since the last log are kept, because counting many at once is cheaper than counting
    each of them between two steps. On a device only their mean time is known.
    """

    max_kept = 256

    def __init__(
        self,
        trainer: Trainer,
        device_memory: DeviceMemory | None,
        *,
        plan: Plan | None = None,
        csv: StepCsv | None = None,
        flops: FlopStep | None = None,
    ) -> None:
        self.limit_bytes: int | None = None
        # Without log_every_n_steps, nothing is sent to the loggers.
        self.loggers = list(trainer.loggers)
        self._logs_metrics = logs_at_all(trainer)
        self._strategy = trainer.strategy
        self._world_size = trainer.world_size
        self._device_name = trainer.strategy.root_device.type
        # A device works while the host goes on.
        self._has_exact_times = self._device_name == "cpu"
        self._alerts = Alerts(_warn, plan=plan)
        self._total_bytes: int | None = None
        self._alloc_retries: int | None = None
        self._flops = flops
        if device_memory is not None:
            self._device_name = device_memory.name
            self._total_bytes = device_memory.total_bytes()
            self._alerts = Alerts(
                _warn,
                granularity_bytes=device_memory.granularity_bytes,
                held_is_resident_set=device_memory.is_host,
                plan=plan,
            )
        self._has_plan = plan is not None
        self._csv = csv
        self._records: list[StepRecord] = []
        self._totals: defaultdict[str, StageTotals] = defaultdict(StageTotals)
        # Per cent of each interval are weighted with its seconds.
        self._busy_percent: defaultdict[str, Ratio] = defaultdict(Ratio)
        self._epoch_peak_bytes = 0
        self._steady_peak_bytes = 0

    def add(self, record: StepRecord) -> None:
        self._records.append(record)
        if record.limit_bytes is not None:
            self.limit_bytes = record.limit_bytes
        if len(self._records) >= self.max_kept:
            self._process()

    def close(self) -> None:
        """Write all records, and close the CSV."""
        self._process()
        if self._csv is not None:
            self._csv.close()

    def _process(self) -> None:
        """Count the records since the last call, and write them."""
        records = self._records
        self._records = []
        for record in records:
            self._count(record)
        if not self._has_exact_times:
            set_mean_seconds(records)
        if records and self._csv is not None:
            self._csv.write(records, world_size=self._world_size)

    def _count(self, record: StepRecord) -> None:
        self._totals[record.stage].add(record)
        peak_bytes = record.peaks.peak_bytes
        if peak_bytes > self._epoch_peak_bytes:
            self._epoch_peak_bytes = peak_bytes
        if record.is_steady and peak_bytes > self._steady_peak_bytes:
            self._steady_peak_bytes = peak_bytes
        if record.stage == "train" and (self._has_plan or record.start_bytes is not None):
            self._alerts.step(record, self.limit_bytes)

    @property
    def epoch_peak_bytes(self) -> int | None:
        return max(self._epoch_peak_bytes, self._kept_peak_bytes()) or None

    @property
    def run_peak_bytes(self) -> int | None:
        counted = (totals.run.peak_bytes or 0 for totals in self._totals.values())
        return max(self._kept_peak_bytes(), max(counted, default=0)) or None

    def _kept_peak_bytes(self) -> int:
        """The highest peak of the records that are not counted yet."""
        return max((record.peaks.peak_bytes for record in self._records), default=0)

    def begin_epoch(self) -> None:
        self._process()
        self._epoch_peak_bytes = 0

    def log(self, stage: str, step: int, reading: DeviceReading) -> None:
        """Send the metrics of the stage since the last call to the loggers."""
        self._process()
        if reading.limit_bytes is not None:
            self.limit_bytes = reading.limit_bytes
        interval = self._totals[stage].end_interval()
        if not interval.steps:
            return
        metrics = interval.metrics(
            limit_bytes=self.limit_bytes,
            total_bytes=self._total_bytes,
            world_size=self._world_size,
        )
        if reading.alloc_retries is not None:
            self._alloc_retries = reading.alloc_retries
        if self._alloc_retries is not None:
            metrics["memory/alloc_retries"] = float(self._alloc_retries)
        if reading.utilization is not None:
            name, percent = reading.utilization
            metrics[f"utilization/{name}"] = percent
            self._busy_percent[stage].add(percent * interval.seconds, interval.seconds)
        if stage == "train":
            if self._flops is not None:
                metrics |= self._flops.metrics(interval.samples.value())
            predicted_bytes = self._alerts.predicted_bytes(interval.peak_batch_size)
            if predicted_bytes is not None:
                metrics["memory/predicted_mib"] = predicted_bytes / MIB
            self._alerts.interval(interval, reading, self.limit_bytes)
        else:
            # The stage replaces the first part of a name, as in validate/peak_allocated_mib.
            names = {key: f"{stage}/{key.partition('/')[2]}" for key in metrics}
            names["batch/size"] = f"{stage}/batch_size"
            metrics = {names[key]: value for key, value in metrics.items()}
        self._log_metrics(metrics, step)

    def _log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for logger in list(self.loggers) if self._logs_metrics else ():
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

    def log_validation(self, step: int, reading: DeviceReading) -> None:
        """Log a validation in a training, and compare its peak with that of the training."""
        self.log("validate", step, reading)
        peak_bytes = self._totals["validate"].run.peak_bytes
        train_peak_bytes = self._totals["train"].run.peak_bytes
        self._alerts.evaluation("validate", peak_bytes, train_peak_bytes)

    def progress_bar_values(self) -> dict[str, float]:
        values = {"peak_gib": self.run_peak_bytes, "limit_gib": self.limit_bytes}
        return {
            name: round(value / 2**30, 2) for name, value in values.items() if value is not None
        }

    def join_ranks(self, step: int | None = None) -> tuple[int, ...]:
        """Exchange the totals of training, and log them if ``step`` is given.

        Every rank must call this method.
        """
        self._process()
        peaks, speeds = gather_ranks(self._totals["train"].run, self._strategy)
        if step is not None:
            self._log_metrics(rank_metrics(peaks, speeds), step)
        return tuple(int(peak_bytes) for peak_bytes in peaks if not math.isnan(peak_bytes))

    def summary(
        self,
        stage: str,
        breakdown: SteadyBreakdown | None = None,
        rank_peaks_bytes: tuple[int, ...] = (),
    ) -> Summary | None:
        """Return the summary of a stage, for a training with its validation; None without steps."""
        total = self._totals[stage].run
        if not total.steps:
            return None
        predicted_bytes = None
        if stage == "train":
            predicted_bytes = self._alerts.predicted_bytes(total.peak_batch_size)
        return Summary(
            device=self._device_name,
            steps=total.steps,
            peak_bytes=total.peak_bytes,
            peak_step=total.peak_step,
            batch_size=total.batch_size if total.peak_bytes is None else total.peak_batch_size,
            phase_peak_bytes=total.phase_peak_bytes,
            peak_reserved_bytes=total.peak_reserved_bytes,
            limit_bytes=self.limit_bytes,
            breakdown=None if breakdown is None else breakdown.at_peak(self._steady_peak_bytes),
            samples_per_second=total.samples.value(self._world_size),
            step_seconds=total.step_seconds,
            data_wait_share=total.data_wait.value(),
            stage=stage,
            items_per_second=total.items.value(self._world_size),
            outside_bytes=None if breakdown is None else breakdown.outside_bytes,
            predicted_bytes=predicted_bytes,
            alerts=tuple(self._alerts.issued.values()),
            rank_peaks_bytes=rank_peaks_bytes,
            validation=self.summary("validate") if stage == "train" else None,
            busy_percent=self._busy_percent[stage].value(),
            oom_splits=total.oom_splits,
        )


def set_mean_seconds(records: Iterable[StepRecord]) -> None:
    """Give each record the mean wall time of its stage over all records.

    The host may begin the next step before a device has ended this one, and waits for the device
    at some steps only. So the time of one step on the host does not show that of the device. Steps
    that the profiler made slower are apart.
    """
    alike: defaultdict[tuple[str, bool], list[StepRecord]] = defaultdict(list)
    for record in records:
        alike[record.stage, record.is_slowed].append(record)
    for steps in alike.values():
        mean_seconds = sum(step.seconds for step in steps) / len(steps)
        for step in steps:
            step.mean_seconds = mean_seconds


def _warn(sentence: str) -> None:
    rank_zero_warn(f"MemoryProfiler: {sentence}")
