"""Report the steps of one run: rows, metrics, alerts, figures and the summary."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.trainer_state import logging_step, logs_at_all
from lightning_batchmem.devices.accelerator import AcceleratorTimer
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.alerts import Alerts
from lightning_batchmem.profile.figures import log_figures
from lightning_batchmem.profile.recorder import StepRecorder
from lightning_batchmem.profile.steady_breakdown import SteadyBreakdown
from lightning_batchmem.profile.step_csv import PLAN_NAME, StepCsv
from lightning_batchmem.profile.step_record import DeviceReading, StepRecord
from lightning_batchmem.profile.summary import Summary, summary_name
from lightning_batchmem.profile.totals import StepTotals, gather_ranks, rank_metrics

_MAX_QUEUED = 256
_SAME = (
    "steps",
    "peak_bytes",
    "peak_step",
    "phase_peak_bytes",
    "peak_reserved_bytes",
    "data_wait_share",
)


class StepReporter:
    """Reports the records of one run.

    Each record is queued until it is logged and its time on the device is known.
    """

    def __init__(
        self,
        trainer: Trainer,
        device_memory: DeviceMemory | None,
        stage: str,
        device_timer: AcceleratorTimer | None = None,
        *,
        plan: Plan | None = None,
        csv: StepCsv | None = None,
    ) -> None:
        granularity_bytes = 0 if device_memory is None else device_memory.granularity_bytes
        self.alerts = Alerts(granularity_bytes=granularity_bytes, plan=plan)
        self.limit_bytes: int | None = None
        self._strategy = trainer.strategy
        device = trainer.strategy.root_device
        self._is_host = device.type == "cpu"
        self._device_name = device.type if device_memory is None else device_memory.name
        self._stage = stage
        self._plan = plan
        self._csv = csv
        self._device_timer = device_timer
        self._world_size = trainer.world_size
        self._loggers = list(trainer.loggers)
        if csv is not None and plan is not None:
            csv.write_text(PLAN_NAME, plan.to_json())
        self._queue: list[StepRecord] = []
        # This many records at the start of the queue are counted already.
        self._num_counted = 0
        self._intervals: defaultdict[str, StepTotals] = defaultdict(StepTotals)
        self._logged: defaultdict[str, StepTotals] = defaultdict(StepTotals)
        self._epoch_peak_bytes = 0
        self._run_peak_bytes = 0
        self._steady_peak_bytes = 0

    def add(self, record: StepRecord) -> None:
        self._queue.append(record)
        if len(self._queue) >= _MAX_QUEUED:
            self.process()

    def process(self, *, is_last: bool = False) -> None:
        """Count the records that are new, and write those whose time is known.

        The last call writes all.
        """
        queue = self._queue
        for record in queue[self._num_counted :]:
            self._count(record)
        known = len(queue)
        if self._device_timer is not None:
            known = self._read_device_seconds(self._device_timer, is_last)
        if known and self._csv is not None:
            self._csv.write(queue[:known], world_size=self._world_size)
        del queue[:known]
        self._num_counted = len(queue)

    def _read_device_seconds(self, timer: AcceleratorTimer, is_last: bool) -> int:
        """Read the device's time of the queued steps in order; return how many can be written."""
        for index, record in enumerate(self._queue):
            if record.marks is not None:
                record.device_seconds = timer.seconds_between(*record.marks)
                if record.device_seconds is not None:
                    totals = self._intervals[record.stage]
                    totals.device_seconds += record.device_seconds
                    totals.device_steps += 1
                elif not is_last:
                    return index
        return len(self._queue)

    def _count(self, record: StepRecord) -> None:
        self._intervals[record.stage].add(record)
        peak_bytes = record.peaks.peak_bytes
        if record.limit_bytes is not None:
            self.limit_bytes = record.limit_bytes
        if peak_bytes > self._epoch_peak_bytes:
            self._epoch_peak_bytes = peak_bytes
        if record.is_steady and peak_bytes > self._steady_peak_bytes:
            self._steady_peak_bytes = peak_bytes
        if record.stage == "train" and (self._plan is not None or record.start_bytes is not None):
            _warn(self.alerts.step(record, self.limit_bytes))

    @property
    def epoch_peak_bytes(self) -> int | None:
        self.process()
        return self._epoch_peak_bytes or None

    @property
    def run_peak_bytes(self) -> int | None:
        self.process()
        return max(self._run_peak_bytes, self._epoch_peak_bytes) or None

    def begin_epoch(self) -> None:
        self._run_peak_bytes = self.run_peak_bytes or 0
        self._epoch_peak_bytes = 0

    def log(self, stage: str, step: int | None, reading: DeviceReading) -> None:
        """Send the metrics of the stage since the last call to the loggers.

        If ``step`` is None, nothing is sent.
        """
        self.limit_bytes = reading.limit_bytes
        self.process()
        interval = self._intervals[stage]
        if not interval.steps:
            return
        self._intervals[stage] = StepTotals()
        self._logged[stage].merge(interval)
        metrics = interval.metrics(limit_bytes=self.limit_bytes, world_size=self._world_size)
        if reading.utilization is not None:
            metrics[f"utilization/{reading.utilization[0]}"] = reading.utilization[1]
        if stage == "train":
            predicted_bytes = self.alerts.predicted_bytes(interval.peak_batch_size)
            if predicted_bytes is not None:
                metrics["memory/predicted_mib"] = predicted_bytes / MIB
            _warn(self.alerts.interval(interval, reading, is_host=self._is_host))
        else:
            # The stage replaces the first part of a name, as in validate/peak_allocated_mib.
            names = {key: f"{stage}/{key.partition('/')[2]}" for key in metrics}
            names["batch/size"] = f"{stage}/batch_size"
            metrics = {names[key]: value for key, value in metrics.items()}
        if step is not None:
            self._log_metrics(metrics, step)

    def _log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for logger in list(self._loggers):
            try:
                logger.log_metrics(dict(metrics), step=step)
            # A logger may raise anything, and must not end a training.
            except Exception as error:  # noqa: BLE001
                self._loggers.remove(logger)
                name = type(logger).__name__
                rank_zero_warn(
                    f"{name} gets no more metrics of MemoryProfiler:"
                    f" {type(error).__name__}: {error}"
                )

    def log_evaluation(self, step: int | None, reading: DeviceReading) -> None:
        """Log a validation in a training, and compare its peak with that of the training."""
        self.log("validate", step, reading)
        peaks = (self._total("validate").peak_bytes, self._total("train").peak_bytes)
        _warn(self.alerts.evaluation("validate", *peaks))

    def progress_bar_values(self) -> dict[str, float]:
        values = {"peak_gib": self.run_peak_bytes, "limit_gib": self.limit_bytes}
        return {
            name: round(value / 2**30, 2) for name, value in values.items() if value is not None
        }

    def join_ranks(self, step: int | None = None) -> tuple[int, ...]:
        """Exchange the totals of training, and log them if ``step`` is given.

        Every rank must call this method.
        """
        self.process()
        peaks, speeds = gather_ranks(self._total("train"), self._strategy)
        if step is not None:
            self._log_metrics(rank_metrics(peaks, speeds), step)
        return tuple(int(peak_bytes) for peak_bytes in peaks if not math.isnan(peak_bytes))

    def finish(
        self, trainer: Trainer, recorder: StepRecorder, *, is_complete: bool
    ) -> Summary | None:
        """Log the remaining metrics, close the CSV and summarize the run.

        After an exception, the ranks exchange nothing, and no figures are logged.
        """
        is_training = self._stage == "train"
        # Lightning also logs the values of an epoch's end at the step before the next one.
        step = max(0, logging_step(trainer) - is_training)
        rank_peaks_bytes: tuple[int, ...] = ()
        try:
            self.log(self._stage, step if logs_at_all(trainer) else None, recorder.read_device())
            if is_complete and is_training and self._world_size > 1:
                rank_peaks_bytes = self.join_ranks()
        finally:
            self.process(is_last=True)
            if self._csv is not None:
                self._csv.close()
        summary = self._summary(self._stage, recorder.breakdown, rank_peaks_bytes)
        if summary is not None and self._csv is not None:
            self._csv.write_text(summary_name(self._stage), summary.to_json())
        if summary is not None and is_complete and is_training and trainer.is_global_zero:
            csv_path = None if self._csv is None else self._csv.path
            log_figures(self._loggers, csv_path, self._plan, summary, step)
        return summary

    def _summary(
        self,
        stage: str,
        breakdown: SteadyBreakdown | None = None,
        rank_peaks_bytes: tuple[int, ...] = (),
    ) -> Summary | None:
        total = self._total(stage)
        if not total.steps:
            return None
        predicted_bytes = None
        if stage == "train":
            predicted_bytes = self.alerts.predicted_bytes(total.peak_batch_size)
        return Summary(
            device=self._device_name,
            **{name: getattr(total, name) for name in _SAME},
            batch_size=total.peak_batch_size if total.peak_bytes is not None else total.batch_size,
            limit_bytes=self.limit_bytes,
            breakdown=None if breakdown is None else breakdown.at_peak(self._steady_peak_bytes),
            samples_per_second=total.samples_per_second(self._world_size),
            step_seconds=total.step_seconds,
            stage=stage,
            items_per_second=total.items_per_second(self._world_size),
            outside_bytes=None if breakdown is None else breakdown.outside_bytes,
            predicted_bytes=predicted_bytes,
            alerts=tuple(self.alerts.issued.values()),
            rank_peaks_bytes=rank_peaks_bytes,
            validation=self._summary("validate") if stage == "train" else None,
        )

    def _total(self, stage: str) -> StepTotals:
        total = StepTotals()
        total.merge(self._logged[stage])
        total.merge(self._intervals[stage])
        return total


def _warn(sentences: list[str]) -> None:
    for sentence in sentences:
        rank_zero_warn(f"MemoryProfiler: {sentence}")
