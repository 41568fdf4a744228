"""A run of a Trainer that is recorded, from its first hook to its summary."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.data_source import WatchedFetches
from lightning_batchmem._lightning.trainer_state import (
    callbacks_of,
    logging_step,
    logs_at_all,
    logs_now,
)
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.profile.alerts import Alerts
from lightning_batchmem.profile.device_reader import DeviceReader
from lightning_batchmem.profile.figures import log_figures
from lightning_batchmem.profile.flop_step import FlopStep
from lightning_batchmem.profile.metrics import LoggerMetrics
from lightning_batchmem.profile.plan_prediction import PlanPrediction
from lightning_batchmem.profile.ranks import HostGroup, RankTotals, rank_metrics
from lightning_batchmem.profile.recorder import StepRecorder
from lightning_batchmem.profile.run import Run
from lightning_batchmem.profile.step import Step
from lightning_batchmem.profile.step_csv import PLAN_NAME, StepCsv
from lightning_batchmem.profile.summary import Summary, summary_name
from lightning_batchmem.profile.totals import Interval, StepTotals

# So many steps lie between two reports if log_every_n_steps=0. This is Lightning's default.
_UNLOGGED_INTERVAL = 50
# So many steps are kept at most.
_MAX_STEPS = 1000


class Sink(Protocol):
    """Takes the steps between two logs."""

    def take(self, interval: Interval) -> None:
        """Use these steps; each step is in one interval."""


class RecordedRun(Run):
    """Records the steps of one ``fit``, ``validate``, ``test`` or ``predict``, and reports them.

    Args:
        trainer: the Trainer.
        module: its module.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        device_memory: the memory to measure; None if it cannot be measured.
        csv: the file for the steps.
        items_fn: counts items in a batch.
        has_progress_bar: whether the progress bar shows peak and limit.
        has_modules: whether to divide the memory of one step among the modules.
        flops: counts the floating-point operations of one step; None to count none.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        stage: str,
        *,
        device_memory: DeviceMemory | None,
        csv: StepCsv | None,
        items_fn: Callable[[Any], float] | None,
        has_progress_bar: bool,
        has_modules: bool,
        flops: FlopStep | None,
    ) -> None:
        super().__init__()
        device = trainer.strategy.root_device
        if device_memory is None:
            rank_zero_warn(
                f"MemoryProfiler measures no memory, because {device.type} has no peak counter."
            )
        plans = (vars(callback).get("plan") for callback in callbacks_of(trainer))
        plan = next((plan for plan in plans if isinstance(plan, Plan)), None)
        if csv is not None and plan is not None:
            csv.write_text(PLAN_NAME, plan.to_json())
        limit_bytes = math.inf if plan is None else plan.limit_bytes
        is_host = device_memory is not None and device_memory.is_host
        granularity_bytes = 0 if device_memory is None else device_memory.granularity_bytes
        self._stage = stage
        self._plan = plan
        self._csv = csv
        self._flops = flops
        self._has_progress_bar = has_progress_bar
        self._world_size = trainer.world_size
        self._device_name = device.type if device_memory is None else device_memory.name
        self._recorder = StepRecorder(
            trainer,
            module,
            device_memory,
            stage,
            items_fn=items_fn,
            has_modules=has_modules,
            flops=flops,
        )
        self._reader = DeviceReader(device, device_memory, limit_bytes)
        self._prediction = PlanPrediction(plan, is_host=is_host)
        self._metrics = LoggerMetrics(
            list(trainer.loggers),
            trainer.world_size,
            None if device_memory is None else device_memory.total_bytes(),
            self._prediction,
            flops,
        )
        self._alerts = Alerts(
            _warn,
            granularity_bytes=granularity_bytes,
            planned_bytes=0 if plan is None else plan.limit_bytes,
        )
        self._totals: defaultdict[str, StepTotals] = defaultdict(StepTotals)
        self._sinks: list[Sink] = [self._alerts]
        # Without log_every_n_steps, nothing is sent to the loggers.
        if logs_at_all(trainer):
            self._sinks.append(self._metrics)
        if csv is not None:
            self._sinks.append(csv)
        self._steps: list[Step] = []
        self._is_due = False
        self._logging_step = 0
        self._epoch_peak_bytes = 0
        self._run_peak_bytes = 0
        self._group = HostGroup() if stage == "train" else None
        # It is the last step of an epoch whose ranks have not exchanged their totals yet.
        self._epoch_end_step: int | None = None
        recorder = self._recorder
        self.enter_phase = recorder.enter_phase
        self.end_time = recorder.run_clock.end
        self._fetches = WatchedFetches(
            trainer, recorder.run_clock.request, recorder.validation_clock.request
        )

    def __reduce__(self) -> tuple[type[Run], tuple[()]]:
        # A loader that spawns workers may pickle the Trainer, and open files cannot be pickled.
        return Run, ()

    @property
    def epoch_peak_bytes(self) -> int | None:
        return self._epoch_peak_bytes or None

    @property
    def run_peak_bytes(self) -> int | None:
        return self._run_peak_bytes or None

    def begin_epoch(self, trainer: Trainer, module: LightningModule) -> None:
        """Report the epoch before."""
        if self._epoch_end_step is not None:
            self._join_ranks()
        self._recorder.watch(trainer, module)
        self._epoch_peak_bytes = 0

    def begin_step(self, module: LightningModule, batch: object) -> None:
        """Begin a step, whose batch has arrived, and report the steps before it if that is due."""
        arrived = self._recorder.clock.now()
        self._complete()
        self._recorder.start(module, batch, arrived)

    def end_step(self, trainer: Trainer, module: LightningModule, batch: object) -> None:
        """End a step, except its time."""
        peak_bytes = self._recorder.stop(trainer, batch)
        if peak_bytes is None:
            return
        if peak_bytes > self._epoch_peak_bytes:
            self._epoch_peak_bytes = peak_bytes
            self._run_peak_bytes = max(self._run_peak_bytes, peak_bytes)
        if self._recorder.clock.stage != "train":
            return
        self._logging_step = logging_step(trainer)
        num_steps = self._recorder.run_clock.steps
        is_interval = num_steps % _UNLOGGED_INTERVAL == 0
        self._is_due = logs_now(trainer) or (is_interval and not logs_at_all(trainer))
        if self._has_progress_bar and (self._is_due or num_steps == 1):
            values = {"peak_gib": self.run_peak_bytes, "limit_gib": self._reader.last.limit_bytes}
            known = {name: value for name, value in values.items() if value is not None}
            in_gib = {name: round(value / 2**30, 2) for name, value in known.items()}
            module.log_dict(in_gib, prog_bar=True, logger=False)

    def _complete(self) -> None:
        """Add the time to the step that has ended, and report the steps if that is due."""
        step = self._recorder.complete()
        if step is not None:
            self._steps.append(step)
            if self._is_due or len(self._steps) >= _MAX_STEPS:
                self._report(step.stage, self._logging_step)

    def _report(self, stage: str, step: int) -> None:
        """Hand the steps since the last report to all sinks."""
        self._is_due = False
        if not self._steps:
            return
        interval = Interval(stage, self._steps, self._reader.read(), step)
        self._steps = []
        self._totals[stage].add(interval)
        for sink in self._sinks:
            sink.take(interval)

    def end_epoch(self, trainer: Trainer) -> None:
        """Report the last step, and prepare the exchange between the ranks.

        In this hook a progress bar, which only rank 0 has, may reduce the metrics of the module
        over all ranks. An exchange here would wait for that rank without end, so it is made
        when the next epoch begins, or at the end of the training.
        """
        self._complete()
        self._recorder.skip()
        if trainer.world_size > 1 and logs_at_all(trainer):
            self._epoch_end_step = _last_step(trainer)

    def _join_ranks(self) -> tuple[int, ...]:
        """Exchange the totals of the ranks, and log them if an epoch has ended.

        Every rank must call this method.
        """
        if self._group is None:
            return ()
        self._report("train", self._logging_step)
        totals = self._totals["train"]
        ranks = self._group.exchange(RankTotals(totals.peak_bytes, totals.samples.value()))
        if self._epoch_end_step is not None:
            self._metrics.log(rank_metrics(ranks), self._epoch_end_step)
        self._epoch_end_step = None
        return tuple(rank.peak_bytes for rank in ranks if rank.peak_bytes is not None)

    def begin_validation(self) -> None:
        """Report the training steps before a validation: its time is none of theirs."""
        self._complete()
        self._report("train", self._logging_step)
        self._recorder.begin_validation()

    def end_validation(self, trainer: Trainer) -> None:
        """Report a validation in the training."""
        self._complete()
        self._report("validate", logging_step(trainer))
        self._recorder.end_validation()
        # The next utilization of the training is without that of the evaluation.
        self._reader.leave_out()

    def notes(
        self, error: BaseException, trainer: Trainer, module: LightningModule
    ) -> Iterable[str]:
        if is_out_of_memory(error):
            limit_bytes = self._reader.last.limit_bytes
            yield self._recorder.explain_out_of_memory(trainer, module, limit_bytes)
            if self.snapshot is not None:
                yield self.snapshot.write(trainer.global_rank)

    def finish(self, trainer: Trainer, *, is_complete: bool) -> Run:
        """Log the remaining metrics, close the CSV and summarize the run.

        After an exception, the ranks exchange nothing, and no figures are logged.
        """
        if self.snapshot is not None:
            self.snapshot.stop()
        self._fetches.close()
        self._recorder.close()
        is_training = self._stage == "train"
        rank_peaks_bytes: tuple[int, ...] = ()
        try:
            self._complete()
            # A training may end within an evaluation.
            stage = self._recorder.clock.stage
            self._report(stage, self._logging_step if is_training else logging_step(trainer))
            if is_complete and is_training and trainer.world_size > 1:
                rank_peaks_bytes = self._join_ranks()
        finally:
            if self._csv is not None:
                self._csv.close()
        summary = self._summary(self._stage, rank_peaks_bytes)
        csv_path = None
        if self._csv is not None and summary is not None:
            csv_path = self._csv.path
            self._csv.write_text(summary_name(self._stage), summary.to_json())
        if is_complete and is_training and summary is not None and trainer.is_global_zero:
            log_figures(self._metrics.loggers, csv_path, self._plan, summary, _last_step(trainer))
        return Run(summary, self.run_peak_bytes, is_table_due=is_complete)

    def _summary(self, stage: str, rank_peaks_bytes: tuple[int, ...] = ()) -> Summary | None:
        """Return the summary of a stage, for a training with its validation; None without steps."""
        totals = self._totals[stage]
        if not totals.steps:
            return None
        summary = Summary(
            device=self._device_name,
            stage=stage,
            steps=totals.steps,
            peak_bytes=totals.peak_bytes,
            peak_step=totals.peak_step,
            batch_size=totals.batch_size if totals.peak_bytes is None else totals.peak_batch_size,
            phase_peak_bytes=totals.phase_peak_bytes,
            peak_reserved_bytes=totals.peak_reserved_bytes,
            limit_bytes=self._reader.last.limit_bytes,
            breakdown=None,
            samples_per_second=totals.samples.value(self._world_size),
            items_per_second=totals.items.value(self._world_size),
            step_seconds=totals.step_seconds,
            data_wait_share=totals.data_wait.value(),
            busy_percent=totals.busy.value(),
            oom_splits=totals.oom_splits,
            graph_steps=totals.graph_steps,
            alerts=tuple(self._alerts.issued.values()),
        )
        if stage != self._stage:
            return summary
        breakdown = self._recorder.breakdown
        if breakdown is not None:
            summary = replace(
                summary,
                breakdown=breakdown.at_peak(totals.steady_peak_bytes),
                outside_bytes=breakdown.outside_bytes,
            )
        if stage != "train":
            return summary
        modules = self._recorder.modules
        if modules is not None:
            summary = replace(summary, modules=modules.peak, no_modules_reason=modules.why_not)
        if self._flops is not None:
            summary = with_flops(summary, self._flops, totals.samples.value())
        return replace(
            summary,
            predicted_bytes=self._prediction.bytes_at(totals.peak_batch_size),
            rank_peaks_bytes=rank_peaks_bytes,
            validation=self._summary("validate"),
        )


def with_flops(summary: Summary, flops: FlopStep, samples_per_second: float | None) -> Summary:
    """Add what one device computes at this speed of its own."""
    rate = flops.rate(samples_per_second)
    return replace(
        summary,
        flops_per_sample=flops.flops_per_sample,
        tflops_per_device=None if rate is None else rate.tflops_per_device,
        mfu_pct=None if rate is None else rate.mfu_pct,
        no_flops_reason=flops.why_not,
    )


def _last_step(trainer: Trainer) -> int:
    """The step before the next one: Lightning also logs the values of an epoch's end there."""
    return max(0, logging_step(trainer) - 1)


def _warn(sentence: str) -> None:
    rank_zero_warn(f"MemoryProfiler: {sentence}")
