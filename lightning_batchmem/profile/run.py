"""A run of a Trainer that is recorded, from its first hook to its summary."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.data_source import WatchedFetches
from lightning_batchmem._lightning.trainer_state import (
    callbacks_of,
    is_of_lightning,
    logging_step,
    logs_at_all,
    logs_now,
)
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.cpu import usable_cores
from lightning_batchmem.devices.foreign_values import attributes_of
from lightning_batchmem.devices.oom_snapshot import OomSnapshot
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.profile.alerts import Alerts
from lightning_batchmem.profile.device_reader import DeviceReader
from lightning_batchmem.profile.flop_step import FlopStep
from lightning_batchmem.profile.metrics import LoggerMetrics
from lightning_batchmem.profile.module_memory import ModuleStep
from lightning_batchmem.profile.ranks import HostGroup, RankTotals, rank_metrics
from lightning_batchmem.profile.recorder import StepRecorder
from lightning_batchmem.profile.step import DeviceReading, Step
from lightning_batchmem.profile.step_csv import PLAN_NAME, StepCsv
from lightning_batchmem.profile.summary import Summary, summary_name
from lightning_batchmem.profile.totals import Interval, Totals, ratio

# So many steps are kept at most.
_MAX_STEPS = 1000


class Sink(Protocol):
    """Takes the steps of a run."""

    def take(self, interval: Interval) -> None:
        """Use the steps since the last call."""


class Options(NamedTuple):
    """What a MemoryProfiler records besides memory and time."""

    items_fn: Callable[[Any], float] | None
    modules: bool
    flops: bool
    peak_flops: float | None
    # Loggers that are not Lightning's get metrics too.
    all_loggers: bool = True


class Run:
    """Records the steps of one ``fit``, ``validate``, ``test`` or ``predict``, and reports them.

    Args:
        trainer: the Trainer.
        module: its module.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        device_memory: the memory to measure; None if it cannot be measured.
        plan: the plan of a BatchFinder for this run.
        options: what the profiler records besides.
        csv: the file for the steps.
        snapshot: records the allocator's events; None to record none.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        stage: str,
        device_memory: DeviceMemory | None,
        plan: Plan | None,
        options: Options,
        *,
        csv: StepCsv | None,
        snapshot: OomSnapshot | None,
    ) -> None:
        device = trainer.strategy.root_device
        if device_memory is None:
            rank_zero_warn(
                f"MemoryProfiler measures no memory, because {device.type} or its allocator has no"
                " peak counter."
            )
        if csv is not None and plan is not None:
            csv.write_text(PLAN_NAME, plan.to_json())
        self.epoch_peak_bytes = 0
        self.run_peak_bytes = 0
        self._stage = stage
        self._csv = csv
        self._snapshot = snapshot
        self._modules: ModuleStep | None = None
        if options.modules and stage == "train":
            self._modules = ModuleStep(device)
        self._flops: FlopStep | None = None
        if options.flops and stage == "train":
            self._flops = FlopStep(device, str(trainer.precision), options.peak_flops)
        self._device_name = device.type if device_memory is None else device_memory.name
        self._cores = usable_cores() if device.type == "cpu" else None
        self._recorder = StepRecorder(
            trainer,
            module,
            device_memory,
            stage,
            items_fn=options.items_fn,
            measurements=[one for one in (self._flops, self._modules) if one is not None],
        )
        self._reader = DeviceReader(
            device, device_memory, math.inf if plan is None else plan.limit_bytes
        )
        self._metrics = LoggerMetrics(
            _loggers(trainer, all_loggers=options.all_loggers),
            trainer.world_size,
            self._flops,
        )
        self._alerts = Alerts(
            lambda sentence: rank_zero_warn(f"MemoryProfiler: {sentence}"),
            granularity_bytes=0 if device_memory is None else device_memory.granularity_bytes,
            planned_bytes=0 if plan is None else plan.limit_bytes,
        )
        # The file comes first, because an alert may end the run where warnings are errors.
        self._sinks: list[Sink] = [self._alerts] if csv is None else [csv, self._alerts]
        self._totals: defaultdict[str, Totals] = defaultdict(Totals)
        # These steps, all of one stage, are not logged yet.
        self._steps: list[Step] = []
        # These steps, all of one stage, are logged, and the sinks have not taken them.
        self._logged: list[Step] = []
        self._is_due = False
        self._logging_step = 0
        self._group = HostGroup() if stage == "train" else None
        # It is the last step of an epoch whose ranks have not exchanged their totals yet.
        self._epoch_end_step: int | None = None
        recorder = self._recorder
        self.end_time = recorder.run_clock.end
        self._fetches = WatchedFetches(
            trainer, recorder.run_clock.request, recorder.validation_clock.request
        )

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A loader that spawns workers may pickle the Trainer, and open files cannot be pickled.
        return type(None), ()

    def begin_epoch(self) -> None:
        """Report the epoch before."""
        if self._epoch_end_step is not None:
            self._join_ranks()
        self.epoch_peak_bytes = 0

    def begin_step(self, module: LightningModule, batch: object) -> None:
        """Begin a step, whose batch has arrived, and log the steps before it if that is due."""
        arrived = self._recorder.clock.now()
        self._complete()
        self._recorder.start(module, batch, arrived)

    def end_step(self, trainer: Trainer, batch: object) -> None:
        """End a step, except its time."""
        peak_bytes = self._recorder.stop(trainer, batch)
        if peak_bytes is None:
            return
        if peak_bytes > self.epoch_peak_bytes:
            self.epoch_peak_bytes = peak_bytes
            self.run_peak_bytes = max(self.run_peak_bytes, peak_bytes)
        self._logging_step = logging_step(trainer)
        is_training = self._recorder.clock.stage == "train"
        self._is_due = is_training and logs_now(trainer, self._logging_step)

    def end_epoch(self, trainer: Trainer) -> None:
        """Add the last step, and prepare the exchange between the ranks.

        In this hook a progress bar, which only rank 0 has, may reduce the metrics of the module
        over all ranks. An exchange here would wait for that rank without end, so it is made
        when the next epoch begins, or at the end of the training.
        """
        self._complete()
        self._recorder.skip()
        if trainer.world_size > 1:
            # The step before the next one: Lightning also logs the values of an epoch's end there.
            self._epoch_end_step = max(0, logging_step(trainer) - 1)

    def begin_validation(self) -> None:
        """Report the training steps before a validation: its time is none of theirs."""
        self._report()
        self._recorder.begin_validation()

    def end_validation(self) -> None:
        """Report a validation in the training."""
        self._report()
        self._recorder.end_validation()
        # The next utilization of the training is without that of the validation.
        self._reader.leave_out()

    def notes(self, error: BaseException, trainer: Trainer) -> Iterable[str]:
        """Return sentences about an error that ended the run."""
        if is_out_of_memory(error):
            yield self._recorder.explain_out_of_memory(trainer)
            if self._snapshot is not None:
                yield self._snapshot.write(trainer.global_rank)

    def finish(self, trainer: Trainer, *, is_complete: bool) -> Summary | None:
        """Log the remaining metrics, close the CSV and summarize the run.

        After an exception, the ranks exchange nothing.
        """
        if self._snapshot is not None:
            self._snapshot.stop()
        self._fetches.close()
        self._recorder.close()
        rank_peaks_bytes: tuple[int, ...] = ()
        try:
            self._report()
            if is_complete and trainer.world_size > 1:
                rank_peaks_bytes = self._join_ranks()
        finally:
            # After an error of the device too, the file has all steps that were reported.
            try:
                self._hand_over(self._reader.last)
            finally:
                if self._csv is not None:
                    self._csv.close()
        if self._stage not in self._totals:
            return None
        summary = self._summary(rank_peaks_bytes)
        if self._csv is not None:
            self._csv.write_text(summary_name(self._stage), summary.to_json())
        return summary

    def _complete(self) -> None:
        """Add the time to the step that has ended, and log the steps if that is due."""
        ended = self._recorder.complete()
        if ended is not None:
            self._steps.append(ended)
            if self._is_due or len(self._steps) >= _MAX_STEPS:
                self._log()

    def _report(self) -> None:
        """Log the steps so far, and hand them to the sinks."""
        self._complete()
        self._log()
        self._hand_over(self._reader.last)

    def _log(self) -> None:
        """Log the steps since the last log.

        The sinks take them with the next reading of the device, since many steps at a time take
        less time.
        """
        self._is_due = False
        if not self._steps:
            return
        steps = self._steps
        self._steps = []
        self._logged += steps
        reading = self._reader.read()
        if self._metrics.loggers:
            metrics = self._metrics.metrics(Interval(steps, reading or DeviceReading()))
            self._metrics.log(metrics, self._logging_step)
        if reading is not None:
            self._hand_over(reading)

    def _hand_over(self, reading: DeviceReading) -> None:
        """Add the steps that were logged to the totals, and hand them to the sinks."""
        if not self._logged:
            return
        interval = Interval(self._logged, reading)
        # An error in a sink must not make the others take the steps twice.
        self._logged = []
        self._totals[interval.stage].add(interval.steps, reading)
        for sink in self._sinks:
            sink.take(interval)

    def _join_ranks(self) -> tuple[int, ...]:
        """Exchange the totals of the ranks, and log them if an epoch has ended.

        Every rank must call this method.
        """
        if self._group is None:
            return ()
        self._report()
        totals = self._totals.get("train", Totals())
        ranks = self._group.exchange(RankTotals(totals.peak_bytes, totals.samples_per_second))
        if self._epoch_end_step is not None:
            self._metrics.log(rank_metrics(ranks), self._epoch_end_step)
        self._epoch_end_step = None
        return tuple(rank.peak_bytes for rank in ranks if rank.peak_bytes is not None)

    def _summary(self, rank_peaks_bytes: tuple[int, ...]) -> Summary:
        """Return the summary of the stage of the run."""
        totals = self._totals[self._stage]
        highest = totals.highest
        ranks = self._metrics.world_size
        more: dict[str, Any] = {}
        if self._stage == "train" and "validate" in self._totals:
            more["validation_peak_bytes"] = self._totals["validate"].peak_bytes
        breakdown = self._recorder.breakdown
        if breakdown is not None:
            more["breakdown"] = breakdown.at_peak()
            more["outside_bytes"] = breakdown.outside_bytes
        if self._modules is not None:
            more["modules"] = self._modules.peak
            more["no_modules_reason"] = self._modules.why_not
        if self._flops is not None:
            rate = self._flops.rate(totals.samples_per_second)
            more |= rate._asdict()
            more["flops_per_sample"] = self._flops.flops_per_sample
            more["no_flops_reason"] = self._flops.why_not
        return Summary(
            device=self._device_name,
            stage=self._stage,
            steps=totals.steps,
            peak_bytes=totals.peak_bytes,
            peak_step=0 if highest is None else highest.number,
            batch_size=totals.batch_size if highest is None else highest.batch_size,
            peak_reserved_bytes=totals.reserved_bytes,
            limit_bytes=self._reader.last.limit_bytes,
            samples_per_second=ratio(totals.samples, totals.samples_seconds, ranks),
            items_per_second=ratio(totals.items, totals.items_seconds, ranks),
            step_seconds=totals.step_seconds,
            data_wait_share=totals.wait_share,
            busy_percent=totals.busy_percent,
            cores=self._cores,
            graph_steps=totals.graph_steps,
            alerts=tuple(self._alerts.issued.values()),
            rank_peaks_bytes=rank_peaks_bytes,
            **more,
        )


def _loggers(trainer: Trainer, *, all_loggers: bool) -> list[Logger]:
    """Return the loggers that get metrics."""
    # Without log_every_n_steps, nothing is sent to them.
    loggers = list(trainer.loggers) if logs_at_all(trainer) else []
    if all_loggers:
        return loggers
    others = [one for one in loggers if not is_of_lightning(one)]
    if others:
        rank_zero_warn(
            f"{type(others[0]).__name__} gets no metrics of MemoryProfiler, which it may not"
            " expect. To log them there, add MemoryProfiler() to the callbacks."
        )
    return [one for one in loggers if one not in others]


def plan_in(trainer: Trainer) -> Plan | None:
    """Return the plan of a BatchFinder beside the profiler."""
    plans = (attributes_of(one).get("plan") for one in callbacks_of(trainer))
    return next((plan for plan in plans if isinstance(plan, Plan)), None)
