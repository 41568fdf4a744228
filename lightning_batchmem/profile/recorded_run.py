"""A run of a Trainer, from its first hook to its summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console

from lightning_batchmem._lightning.trainer_state import (
    callbacks_of,
    logging_step,
    logs_at_all,
    logs_now,
)
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.oom_snapshot import OomSnapshot
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.profile.figures import log_figures
from lightning_batchmem.profile.flop_step import FlopStep
from lightning_batchmem.profile.recorder import StepRecorder
from lightning_batchmem.profile.reporter import StepReporter
from lightning_batchmem.profile.step_csv import PLAN_NAME, StepCsv
from lightning_batchmem.profile.summary import Summary, show_summary, summary_name

# So many steps lie between two reports if log_every_n_steps=0. This is Lightning's default.
_UNLOGGED_INTERVAL = 50


class Run:
    """What the hooks of a profiler call before the first run and after the last one.

    It records nothing, and keeps the results of the last run. :class:`RecordedRun` is a run.

    Args:
        summary: the summary of the last run; None if there was none.
        peak_bytes: the highest peak of the last run.
        is_table_due: whether the summary is to be printed.
    """

    def __init__(
        self,
        summary: Summary | None = None,
        peak_bytes: int | None = None,
        *,
        is_table_due: bool = False,
    ) -> None:
        self.summary = summary
        self.is_table_due = is_table_due
        # It records the allocator's events.
        self.snapshot: OomSnapshot | None = None
        self._peak_bytes = peak_bytes

    @property
    def epoch_peak_bytes(self) -> int | None:
        return None

    @property
    def run_peak_bytes(self) -> int | None:
        return self._peak_bytes

    def _record_nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    begin_epoch = end_step = end_epoch = end_validation = _record_nothing
    # A recorded run replaces these by methods of its recorder.
    begin_step: Callable[..., None] = _record_nothing
    enter_phase: Callable[..., None] = _record_nothing
    begin_validation: Callable[..., None] = _record_nothing
    forget_wait: Callable[..., None] = _record_nothing

    def notes(
        self, error: BaseException, trainer: Trainer, module: LightningModule
    ) -> Iterable[str]:
        """Return sentences about an error that ended the run."""
        return ()

    def finish(self, trainer: Trainer, *, is_complete: bool) -> Run:
        """End the run; the result records nothing and has the summary."""
        return self

    def show_table(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Print the summary once, if it is due."""
        if self.is_table_due and self.summary is not None and trainer.is_global_zero:
            bar = trainer.progress_bar_callback
            if bar is not None:
                # Lightning ends the progress bar last, and the bar of Rich would overwrite the
                # table.
                bar.teardown(trainer, module, stage)
            show_summary(self.summary, Console())
        self.is_table_due = False


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
        # An OomGuard counts in this attribute.
        guards = (one for one in callbacks_of(trainer) if "oom_splits" in vars(one))
        self._guard: Any = next(guards, None)
        self._oom_splits = 0
        if csv is not None and plan is not None:
            csv.write_text(PLAN_NAME, plan.to_json())
        self._stage = stage
        self._plan = plan
        self._csv = csv
        self._has_progress_bar = has_progress_bar
        self._recorder = StepRecorder(
            trainer,
            module,
            device_memory,
            stage,
            items_fn=items_fn,
            max_limit_bytes=math.inf if plan is None else plan.limit_bytes,
            has_modules=has_modules,
            flops=flops,
        )
        self.begin_step = self._recorder.start
        self._flops = flops
        enter_phase = self._recorder.phase_peaks.enter
        self.enter_phase = enter_phase
        if flops is not None:

            def enter_counted_phase(phase: str) -> None:
                flops.enter_phase(phase)
                enter_phase(phase)

            self.enter_phase = enter_counted_phase
        self.begin_validation = self._recorder.begin_validation
        self.forget_wait = self._recorder.run_clock.forget_wait
        self._reporter = StepReporter(trainer, device_memory, plan=plan, csv=csv, flops=flops)
        # It is the last step of an epoch whose ranks have not exchanged their totals yet.
        self._epoch_end_step: int | None = None
        # The first step starts now.
        self._recorder.clock.restart()

    def __reduce__(self) -> tuple[type[Run], tuple[()]]:
        # A loader that spawns workers may pickle the Trainer, and open files cannot be pickled.
        return Run, ()

    @property
    def epoch_peak_bytes(self) -> int | None:
        return self._reporter.epoch_peak_bytes

    @property
    def run_peak_bytes(self) -> int | None:
        return self._reporter.run_peak_bytes

    def begin_epoch(self, trainer: Trainer, module: LightningModule) -> None:
        """Report the epoch before, and leave out the time between two epochs."""
        if self._epoch_end_step is not None:
            self._join_ranks()
        self._recorder.watch(trainer, module)
        self._recorder.clock.restart()
        self._reporter.begin_epoch()

    def end_step(self, trainer: Trainer, module: LightningModule, batch: object) -> None:
        """End a step, and log the training if it is due."""
        oom_splits = None
        # The guard counts nothing where it does nothing.
        total_splits = None if self._guard is None else self._guard.oom_splits
        if total_splits is not None:
            oom_splits = total_splits - self._oom_splits
            self._oom_splits = total_splits
        if oom_splits:
            # It would count the failed attempt too.
            self._recorder.drop_measurement()
        record = self._recorder.stop(trainer, batch)
        if record is None:
            return
        is_training = record.stage == "train"
        if is_training:
            record.oom_splits = oom_splits
        is_interval = self._recorder.run_clock.steps % _UNLOGGED_INTERVAL == 0
        is_logged = is_training and (
            logs_now(trainer) or (is_interval and not logs_at_all(trainer))
        )
        self._reporter.add(record)
        if is_logged:
            self._reporter.log("train", logging_step(trainer), self._recorder.read_device())
        self._recorder.clock.begin_wait()
        is_due = is_logged or record.limit_bytes is not None
        if self._has_progress_bar and is_training and is_due:
            values = self._reporter.progress_bar_values()
            module.log_dict(values, prog_bar=True, logger=False)

    def end_epoch(self, trainer: Trainer) -> None:
        """Prepare the exchange between the ranks.

        In this hook a progress bar, which only rank 0 has, may reduce the metrics of the module
        over all ranks. An exchange here would wait for that rank without end, so it is made
        when the next epoch begins, or at the end of the training.
        """
        self._recorder.drop_measurement()
        if trainer.world_size > 1 and logs_at_all(trainer):
            self._epoch_end_step = _last_step(trainer)

    def _join_ranks(self) -> tuple[int, ...]:
        """Exchange the totals of the ranks, and log them if an epoch has ended."""
        rank_peaks_bytes = self._reporter.join_ranks(self._epoch_end_step)
        self._epoch_end_step = None
        return rank_peaks_bytes

    def end_validation(self, trainer: Trainer) -> None:
        """Report a validation in the training."""
        self._reporter.log_validation(logging_step(trainer), self._recorder.read_device())
        self._recorder.end_validation()

    def notes(
        self, error: BaseException, trainer: Trainer, module: LightningModule
    ) -> Iterable[str]:
        if is_out_of_memory(error):
            yield self._recorder.explain_out_of_memory(trainer, module)
            if self.snapshot is not None:
                yield self.snapshot.write(trainer.global_rank)

    def finish(self, trainer: Trainer, *, is_complete: bool) -> Run:
        """Log the remaining metrics, close the CSV and summarize the run.

        After an exception, the ranks exchange nothing, and no figures are logged.
        """
        if self.snapshot is not None:
            self.snapshot.stop()
        self._recorder.close()
        is_training = self._stage == "train"
        step = _last_step(trainer) if is_training else logging_step(trainer)
        rank_peaks_bytes: tuple[int, ...] = ()
        try:
            self._reporter.log(self._stage, step, self._recorder.read_device())
            if is_complete and is_training and trainer.world_size > 1:
                rank_peaks_bytes = self._join_ranks()
        finally:
            self._reporter.close()
        summary = self._reporter.summary(self._stage, self._recorder.breakdown, rank_peaks_bytes)
        modules = self._recorder.modules
        if summary is not None and modules is not None:
            summary = replace(summary, modules=modules.peak, no_modules_reason=modules.why_not)
        if summary is not None and self._flops is not None:
            summary = with_flops(summary, self._flops, world_size=trainer.world_size)
        csv_path = None
        if self._csv is not None and summary is not None:
            csv_path = self._csv.path
            self._csv.write_text(summary_name(self._stage), summary.to_json())
        if is_complete and is_training and summary is not None and trainer.is_global_zero:
            log_figures(self._reporter.loggers, csv_path, self._plan, summary, step)
        return Run(summary, self.run_peak_bytes, is_table_due=is_complete)


def with_flops(summary: Summary, flops: FlopStep, *, world_size: int) -> Summary:
    """Add what one device of ``world_size`` ranks computes."""
    samples_per_second = summary.samples_per_second
    if samples_per_second is not None:
        # These are the samples of all ranks.
        samples_per_second /= world_size
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
