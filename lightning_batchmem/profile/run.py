"""A run of a Trainer that is recorded, from its first hook to its summary."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_batchmem._lightning.logged_plan import log_plan
from lightning_batchmem._lightning.profiled_stage import (
    PlacedBatch,
    WatchedCalls,
    logging_step,
    logs_now,
)
from lightning_batchmem._lightning.trainer_state import callbacks_of
from lightning_batchmem.devices import device_name
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.foreign_values import attributes_of, value_or_none
from lightning_batchmem.devices.oom_snapshot import AllocatorHistory
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.devices.peaks import PhasePeaks
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import mib
from lightning_batchmem.profile.alerts import Alerts
from lightning_batchmem.profile.columns import LoggerMetrics, StepCsv, loggers_of
from lightning_batchmem.profile.device_reader import DeviceReader
from lightning_batchmem.profile.recorder import StepRecorder
from lightning_batchmem.profile.run_folder import PLAN_NAME, RunFolder, summary_name
from lightning_batchmem.profile.steady_steps import Options
from lightning_batchmem.profile.step import UNREAD, DeviceReading, Step, Totals
from lightning_batchmem.profile.step_memory import peaks_of_ranks
from lightning_batchmem.profile.summary import RunMemory, RunSpeed, Summary
from lightning_batchmem.profile.text import fits_text

# At most this many steps are kept without a log.
_MAX_STEPS = 1000


class Takers:
    """All that take the steps of a run.

    The loggers get the steps of each log. The others get those between two readings of the device
    together, because many steps at a time take less time.

    Args:
        loggers: the loggers of the Trainer.
        alerts: the alerts.
        csv: the file; None to write none.
    """

    def __init__(self, loggers: LoggerMetrics, alerts: Alerts, csv: StepCsv | None) -> None:
        self.loggers = loggers
        self.alerts = alerts
        # By stage.
        self.totals: defaultdict[str, Totals] = defaultdict(Totals)
        self._csv = csv
        # Those since the last reading, all of one stage.
        self._steps: list[Step] = []

    def keep(self, steps: list[Step]) -> None:
        """Keep the steps of a log until the next reading of the device."""
        self._steps += steps

    def flush(self, reading: DeviceReading) -> None:
        """Use all steps since the last call, with the reading of the device at their end."""
        if not self._steps:
            return
        totals = Totals(self._steps, reading)
        # After an error in a taker, the others must not take the steps twice.
        self._steps = []
        self.totals[totals.stage].add(totals)
        # The file comes first, because an alert may end the run where warnings are errors.
        if self._csv is not None:
            self._csv.take(totals)
        self.alerts.take(totals)

    def close(self) -> None:
        if self._csv is not None:
            self._csv.close()


class Run:
    """Records the steps of one ``fit``, ``validate``, ``test`` or ``predict``, and reports them.

    Args:
        trainer: the Trainer.
        module: its module.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        device_memory: the memory to measure; None if it cannot be measured.
        plan: the plan of a BatchFinder for this run.
        options: what the profiler records besides.
        folder: the files of the run; None to write none.
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
        folder: RunFolder | None,
        snapshot: AllocatorHistory | None,
    ) -> None:
        device = trainer.strategy.root_device
        if device_memory is None:
            rank_zero_warn(
                f"MemoryProfiler measures no memory, because {device.type} or its allocator has no"
                " peak counter."
            )
        loggers = loggers_of(trainer, all_loggers=not options.is_optional)
        if plan is not None and stage == "train" and trainer.is_global_zero:
            # What loggers and matplotlib import is none of the memory of the steps.
            log_plan(plan, loggers, logging_step(trainer))
        recorder = StepRecorder(trainer, module, device_memory, stage, options)
        csv = None
        if folder is not None:
            if plan is not None:
                folder.write(PLAN_NAME, plan.to_json())
            csv = StepCsv(
                folder.csv,
                world_size=trainer.world_size,
                has_exact_times=device.type == "cpu",
            )
        self.peaks = recorder.memory.peaks
        # Ends the last step of an evaluation.
        self.leave = recorder.leave
        self._folder = folder
        self._snapshot = snapshot
        self._recorder = recorder
        self._plan = plan
        self._reader = DeviceReader(
            device, device_memory, math.inf if plan is None else plan.limit_bytes
        )
        self._takers = Takers(
            LoggerMetrics(loggers, trainer.world_size, recorder.steady.flops),
            Alerts(
                lambda sentence: rank_zero_warn(f"MemoryProfiler: {sentence}"),
                stage,
                granularity_bytes=0 if device_memory is None else device_memory.granularity_bytes,
                planned_bytes=0 if plan is None else plan.limit_bytes,
                steps_in_epoch=trainer.num_training_batches if stage == "train" else math.inf,
            ),
            csv,
        )
        # The steps since the last log, all of one stage.
        self._steps: list[Step] = []
        self._is_due = False
        self._logging_step = 0
        self._calls = WatchedCalls(
            trainer,
            recorder.run_clock.request,
            recorder.validation_clock.request,
            recorder.leave,
            recorder.end_work,
        )

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A loader that spawns workers may pickle the Trainer, and open files cannot be pickled.
        return type(None), ()

    def begin_epoch(self) -> None:
        """Begin the peak of an epoch."""
        self._recorder.steady.begin_epoch()
        self.peaks.begin_epoch()

    def begin_step(self, module: LightningModule, batch: PlacedBatch) -> PhasePeaks | None:
        """Begin a step, whose batch has arrived, and log the steps before it if that is due.

        Returns:
            The phases of the step if they are measured.
        """
        recorder = self._recorder
        arrived = recorder.clock.now()
        self._complete()
        phases = recorder.start(module, batch, arrived)
        if self._snapshot is not None and recorder.clock.stage == "train":
            self._snapshot.begin_step(recorder.clock.number)
        return phases

    def end_step(self, trainer: Trainer, batch: PlacedBatch) -> None:
        """End a step, except its time."""
        if not self._recorder.stop(batch):
            return
        if self._snapshot is not None and (text := self._snapshot.end_step(trainer.global_rank)):
            rank_zero_info(text)
        self._logging_step = logging_step(trainer)
        self._is_due = self._recorder.clock.stage == "train" and logs_now(
            trainer, self._logging_step
        )

    def end_epoch(self) -> None:
        """Add the last step."""
        self._complete()
        self._recorder.skip()

    def begin_validation(self) -> None:
        """Report the training steps before a validation, whose time does not belong to them."""
        self._report()
        self._recorder.begin_validation()

    def end_validation(self) -> None:
        """Report a validation in the training."""
        self._report()
        self._recorder.end_validation()
        self._recorder.leave()
        # The next utilization of the training is without the validation.
        self._reader.leave_out()

    def notes(self, error: BaseException, trainer: Trainer) -> Iterable[str]:
        """Return sentences about an error that ended the run."""
        if is_out_of_memory(error):
            self._reader.ignore_failure()
            note = self._recorder.explain_out_of_memory(error, trainer)
            if self.peaks.run_bytes:
                peaks = self.peaks
                note += f" The highest peak before was {mib(peaks.run_bytes)}, {peaks.place}."
            yield note
            if self._snapshot is not None and (text := self._snapshot.write(trainer.global_rank)):
                yield text

    def finish(self, trainer: Trainer, *, is_complete: bool) -> Summary | None:
        """Log the remaining metrics, close the CSV and summarize the run.

        After an exception, the ranks exchange nothing.
        """
        if self._snapshot is not None:
            self._snapshot.stop()
        self._calls.close()
        self._recorder.close()
        rank_peaks_bytes: tuple[int, ...] = ()
        if is_complete:
            self._reader.expire()
        try:
            self._report()
            stage = self._recorder.run_clock.stage
            if is_complete and stage == "train" and trainer.world_size > 1:
                rank_peaks_bytes = peaks_of_ranks(self._takers.totals["train"].peak_bytes)
        finally:
            # After an error of the device too, the file has all steps that were reported.
            try:
                self._takers.flush(self._reader.last)
            finally:
                self._takers.close()
        summary = self._summary(trainer, rank_peaks_bytes, is_complete=is_complete)
        if summary is not None and self._folder is not None:
            self._folder.write(summary_name(summary.stage), summary.to_json())
        return summary

    def _complete(self) -> None:
        """Add the time to the step that has ended, and log the steps if that is due."""
        ended = self._recorder.complete()
        if ended is not None:
            self._steps.append(ended)
            if self._is_due or len(self._steps) >= _MAX_STEPS:
                self._log()

    def _report(self) -> None:
        """Log the steps so far, and let the takers use them."""
        self._complete()
        self._log()
        self._takers.flush(self._reader.read() or self._reader.last)

    def _log(self) -> None:
        """Hand the steps since the last log to the takers."""
        self._is_due = False
        if not self._steps:
            return
        steps = self._steps
        self._steps = []
        # They are kept even if a reading fails, or a logger is interrupted.
        self._takers.keep(steps)
        reading = self._reader.read()
        self._takers.loggers.take(Totals(steps, reading or UNREAD), self._logging_step)
        if reading is not None:
            self._takers.flush(reading)

    def _summary(
        self, trainer: Trainer, rank_peaks_bytes: tuple[int, ...], *, is_complete: bool
    ) -> Summary | None:
        """Return the summary of the stage of the run; None if it had no step."""
        stage = self._recorder.run_clock.stage
        by_stage = self._takers.totals
        totals = by_stage[stage]
        if not totals.steps:
            return None
        steady = self._recorder.steady
        flops = steady.flops
        alerts = self._takers.alerts.issued
        is_leak = "leak" in alerts
        breakdown = steady.breakdown
        highest = totals.highest
        # Only an allocator reserves memory; without one a peak is the process's.
        is_host = totals.peak_reserved_bytes is None
        memory = RunMemory(
            peak_step=0 if highest is None else highest.number,
            batch_size=totals.batch_size if highest is None else highest.batch_size,
            peak_allocated_bytes=None if is_host else totals.peak_bytes,
            peak_reserved_bytes=totals.peak_reserved_bytes,
            peak_process_bytes=totals.peak_bytes if is_host else None,
            limit_bytes=self._reader.last.limit_bytes,
            breakdown=None if breakdown is None else breakdown.at_peak(is_leak=is_leak),
            rank_peaks_bytes=rank_peaks_bytes,
            validation_peak_bytes=by_stage["validate"].peak_bytes if stage == "train" else None,
            graph_steps=totals.graph_steps,
            is_planned=self._plan is not None,
            between_steps=self.peaks.between,
        )
        times = totals.steady
        cores = self._reader.cores
        busy_percent = times.per_second("busy")
        speed = RunSpeed(
            1e3 * totals.times.step_seconds,
            # All ranks have batches of one size.
            times.per_second("samples", trainer.world_size),
            times.per_second("items", trainer.world_size),
            times.per_second("wait", 100),
            gpu_utilization_pct=busy_percent if cores is None else None,
            cpu_utilization_pct=None if cores is None else busy_percent,
            cores=cores,
            first_step_ms=1e3 * totals.first_seconds,
        )
        fits = ""
        # The size may not fit in a longer run, or without the steps that were skipped.
        is_proven = totals.steps > 1 and not self._reader.last.num_ooms and not is_leak
        if is_complete and self._plan is not None and is_proven:
            device = value_or_none("The device", device_name, trainer.strategy.root_device)
            fits = fits_text(self._plan, memory, f"{device}", str(trainer.precision))
        return Summary(
            self._reader.device_name,
            stage,
            totals.steps,
            memory,
            speed,
            None if steady.modules is None else steady.modules.peak,
            None if flops is None else flops.rate(times.per_second("samples")),
            tuple(alerts.values()),
            fits,
            self._plan.training if self._plan is not None and stage == "train" else "",
        )


def plan_in(trainer: Trainer) -> Plan | None:
    """Return the plan of a BatchFinder beside the profiler."""
    plans = (attributes_of(one).get("plan") for one in callbacks_of(trainer))
    return next((plan for plan in plans if isinstance(plan, Plan)), None)
