"""Where the steps of a run go: rows, metrics, warnings, figures and the summary."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_batchmem.devices.base import DeviceMemory, Utilization
from lightning_batchmem.devices.cuda import CudaTimer
from lightning_batchmem.devices.select import utilization_for
from lightning_batchmem.measure.composition import Composition
from lightning_batchmem.measure.step_record import StepRecord, StepTotals
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB
from lightning_batchmem.report.alerts import Alerts
from lightning_batchmem.report.images import log_figures
from lightning_batchmem.report.loggers import Loggers
from lightning_batchmem.report.rank_peaks import RankPeaks, join_ranks
from lightning_batchmem.report.rows import RowQueue
from lightning_batchmem.report.step_csv import BatchCsv
from lightning_batchmem.report.summary import Summary

_MOST_PENDING = 256
"""Steps that wait for the next logging step, before they are taken in between: all that a long interval may hold."""

LIMIT_EVERY_SECONDS = 1.0
"""How often at most the device is asked what this process may hold: that takes system calls, and changes slowly."""


@dataclass
class _Totals:
    """What the steps of a stage were tallied to: since it was last logged, and until then."""

    interval: StepTotals = field(default_factory=StepTotals)
    logged: StepTotals = field(default_factory=StepTotals)

    @property
    def all(self) -> StepTotals:
        together = StepTotals()
        together.merge(self.logged)
        together.merge(self.interval)
        return together


class StepReporter:
    """Takes the steps of one run, and reports them; constant in size, however many they are.

    A step only joins a list; what is done with it is done when the stage is logged.

    Args:
        trainer: when the run starts.
        device_memory: of the device.
        timer: of the device; ``None`` where wall time is its own.
        plan: what a BatchFinder of the same run has found.
        stage: of the run; a training may have validations in it.
        composition: what the memory of its steps is made of.

    Attributes:
        limit_bytes: what this process might hold when it was last asked: what the device can give, or a plan's limit.
        alarms: what was warned of.
    """

    def __init__(
        self,
        trainer: Trainer,
        device_memory: DeviceMemory,
        timer: CudaTimer | None,
        plan: Plan | None,
        *,
        stage: str,
        composition: Composition,
    ) -> None:
        self.alerts = Alerts(resolution_bytes=device_memory.granularity_bytes, plan=plan)
        self._device_memory, self._timer, self._plan = device_memory, timer, plan
        self.limit_bytes, self._limit_asked = self._limit(), time.monotonic()
        self._stage, self._composition = stage, composition
        self._epoch_peak_bytes: int | None = None
        self._run_peak_bytes: int | None = None
        self._device = trainer.strategy.root_device
        self._world_size = trainer.world_size
        self._utilization: Utilization | None = utilization_for(self._device)
        self._loggers = Loggers(trainer.loggers)
        self._csv: BatchCsv | None = None
        self._rows = RowQueue(timer, None, self._world_size)
        self._pending: list[tuple[StepRecord, object, object]] = []
        self._totals: dict[str, _Totals] = {}
        self._limit_is_new = True

    @property
    def peak_name(self) -> str:
        """What the progress bar calls the highest bytes."""
        return "peak_gib"

    def open_csv(self, log_dir: Path, *, resume: bool, own_path: Path | None = None) -> Path:
        """Open the CSV of this run; a directory that cannot be written is an error here.

        Args:
            log_dir: where.
            resume: whether the run goes on, in the file that it wrote before.
            own_path: that file; ``None``: the newest.
        """
        self._csv = BatchCsv(log_dir, resume=resume, own_path=own_path)
        self._rows = RowQueue(self._timer, self._csv, self._world_size)
        return self._csv.path

    def add(self, step: StepRecord, since: object, until: object) -> None:
        """Take a step, and the device's marks before and after it."""
        if self._limit_is_new:
            self._limit_is_new = False
            step = step._replace(limit_bytes=self.limit_bytes)
        self._pending.append((step, since, until))
        if len(self._pending) >= _MOST_PENDING:
            self.take_in()

    def take_in(self, *, final: bool = False) -> None:
        """Do with the steps that were added what is to be done with each.

        Args:
            final: whether no more steps follow.
        """
        pending, self._pending = self._pending, []
        for step, since, until in pending:
            self._totals.setdefault(step.stage, _Totals()).interval.add(step)
            peak_bytes = step.peaks.peak_bytes
            self._epoch_peak_bytes = max(self._epoch_peak_bytes or 0, peak_bytes)
            if step.stage == self._stage:
                self._composition.saw(peak_bytes)
            if step.stage == "train":
                _warn_once(self.alerts.step(number=step.number, batch_size=step.batch_size, peak_bytes=peak_bytes))
            self._rows.add(step, since, until)
        if pending:
            self._run_peak_bytes = max(self._run_peak_bytes or 0, self._epoch_peak_bytes or 0)
        for step in self._rows.write(final=final):
            if step.device_seconds is not None:
                self._totals[step.stage].interval.add_device_time(step.device_seconds)

    @property
    def epoch_peak_bytes(self) -> int | None:
        """Highest allocated bytes inside a step of this epoch; ``None`` before its first step has ended."""
        self.take_in()
        return self._epoch_peak_bytes

    @property
    def run_peak_bytes(self) -> int | None:
        """Highest allocated bytes inside a step of this run; ``None`` before its first step has ended."""
        self.take_in()
        return self._run_peak_bytes

    def begin_epoch(self) -> None:
        """Forget the peak of the last epoch."""
        self.take_in()
        self._epoch_peak_bytes = None

    def forget_utilization(self) -> None:
        """What the device did since it was last asked belongs to no step."""
        if self._utilization is not None:
            self._utilization.percent()

    def floor(self, number: int) -> float:
        """A step of training begins: look whether what is in use by then rises from step to step.

        Returns:
            The step from which on to look again; ``inf`` once a rise was said.
        """
        _warn_once(self.alerts.floor(number, self._device_memory.private_bytes(), limit_bytes=self.limit_bytes))
        return self.alerts.next_floor

    def log(self, stage: str, step: int | None) -> None:
        """Send what the stage has tallied since the last time to the loggers, and begin anew.

        Args:
            stage: whose steps.
            step: to log it at; ``None``: not to the loggers.
        """
        busy, now = self._busy(), time.monotonic()
        if now - self._limit_asked >= LIMIT_EVERY_SECONDS:
            self.limit_bytes, self._limit_asked, self._limit_is_new = self._limit(), now, True
        if self._pending:
            last, since, until = self._pending[-1]
            limit_bytes = self.limit_bytes if self._limit_is_new else last.limit_bytes
            self._pending[-1] = (last._replace(limit_bytes=limit_bytes, utilization=busy), since, until)
            self._limit_is_new = False
        self.take_in()
        totals = self._totals.setdefault(stage, _Totals())
        tally, totals.interval = totals.interval, StepTotals()
        totals.logged.merge(tally)
        if not tally.steps:
            return
        metrics = tally.metrics(limit_bytes=self.limit_bytes, world_size=self._world_size)
        if busy is not None:
            metrics[f"utilization/{busy[0]}"] = busy[1]
        if stage == "train":
            if (predicted_bytes := self.alerts.predicted_bytes(tally.peak_batch_size)) is not None:
                metrics["memory/predicted_mib"] = predicted_bytes / MIB
            self._judge(tally, busy_percent=None if busy is None else busy[1])
        else:
            metrics = _of_stage(metrics, stage)
        if step is not None:
            self._loggers.log_metrics(metrics, step)

    def end_evaluation(self, stage: str, step: int | None) -> None:
        """An evaluation has ended: log all of it, and compare it with the training that it is part of.

        Args:
            stage: which.
            step: to log it at; ``None``: not to the loggers.
        """
        self.log(stage, step)
        if "train" in self._totals and (evaluation := self._totals[stage].logged).steps:
            train_peak_bytes = self._totals["train"].all.peak_bytes
            _warn_once(
                self.alerts.evaluation(stage=stage, peak_bytes=evaluation.peak_bytes, train_peak_bytes=train_peak_bytes)
            )

    def join_ranks(self) -> RankPeaks:
        """What all ranks have measured in training since the run began; every rank has to call it."""
        self.take_in()
        tally = self._totals.setdefault("train", _Totals()).all
        return join_ranks(tally.peak_bytes, tally.samples_per_second(1), self._device)

    def log_ranks(self, joined: RankPeaks, step: int) -> None:
        """Send what the ranks have measured to the loggers."""
        self._loggers.log_metrics(joined.metrics(), step)

    def log_figures(self, summary: Summary, step: int) -> None:
        """Log the figures of this run to the loggers that accept images."""
        try:
            log_figures(self._loggers, None if self._csv is None else self._csv.path, self._plan, summary, step)
        except ImportError as error:
            rank_zero_info(f"MemoryProfiler logs no figures: {error}.")

    def close(self) -> None:
        """Take in what is left, and close the CSV."""
        try:
            self.take_in(final=True)
        finally:
            if self._csv is not None:
                self._csv.close()

    def summary(self, ranks: RankPeaks | None = None) -> Summary | None:
        """What the steps of the run used, and those of the validation inside a training; ``None`` without a step."""
        return self._summary(self._stage, self._composition, ranks)

    def _summary(self, stage: str, composition: Composition | None, ranks: RankPeaks | None = None) -> Summary | None:
        if stage not in self._totals or not (total := self._totals[stage].all).steps:
            return None
        return Summary(
            device=self._device_memory.name,
            steps=total.steps,
            peak_bytes=total.peak_bytes,
            peak_step=total.peak_step,
            batch_size=total.peak_batch_size,
            phase_peak_bytes=total.phase_peak_bytes,
            peak_reserved_bytes=total.peak_reserved_bytes,
            limit_bytes=self.limit_bytes,
            breakdown=None if composition is None else composition.breakdown,
            samples_per_second=total.samples_per_second(self._world_size),
            step_seconds=total.step_seconds,
            data_wait_share=total.data_wait_share,
            stage=stage,
            items_per_second=total.items_per_second(self._world_size),
            estimate=None if composition is None else composition.estimate,
            outside_bytes=None if composition is None else composition.outside_bytes,
            predicted_bytes=self.alerts.predicted_bytes(total.peak_batch_size) if stage == "train" else None,
            alerts=tuple(self.alerts.issued.values()),
            rank_peaks_bytes=() if ranks is None else ranks.peak_bytes,
            validation=self._summary("validate", None) if stage == "train" else None,
        )

    def _limit(self) -> int:
        """What the device can give; less, where the user has asked the BatchFinder for less."""
        budget_bytes = self._device_memory.budget_bytes()
        return budget_bytes if self._plan is None else min(budget_bytes, self._plan.limit_bytes)

    def _busy(self) -> tuple[str, float] | None:
        if self._utilization is None or (percent := self._utilization.percent()) is None:
            return None
        return self._utilization.key, percent

    def _judge(self, tally: StepTotals, *, busy_percent: float | None) -> None:
        # steps are launched ahead of a GPU, so that a wait of this process says nothing of a device that tells nothing
        is_told = self._device_memory.name == "host" or busy_percent is not None
        _warn_once(
            *self.alerts.interval(
                steps=tally.steps,
                seconds=tally.seconds,
                data_wait_share=tally.data_wait_share if is_told else None,
                peak_bytes=tally.peak_bytes,
                limit_bytes=self.limit_bytes,
                counters=self._device_memory.counters(),
                busy_percent=busy_percent,
            )
        )


def _of_stage(metrics: Mapping[str, float], stage: str) -> dict[str, float]:
    """The metrics under the name of their stage, for example ``validate/peak_allocated_mib``."""
    found = {f"{stage}/{key.partition('/')[2]}": value for key, value in metrics.items() if key != "batch/size"}
    if "batch/size" in metrics:
        found[f"{stage}/batch_size"] = metrics["batch/size"]
    return found


def _warn_once(*sentences: str | None) -> None:
    for sentence in sentences:
        if sentence is not None:
            rank_zero_warn(f"MemoryProfiler: {sentence}")
