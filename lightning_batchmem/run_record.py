"""One run of ``fit`` as the MemoryProfiler records it: steps to rows, metrics and the summary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_batchmem._lightning.progress import logging_step, logs_now
from lightning_batchmem.meters import Meter, Utilization, utilization_for
from lightning_batchmem.parts import Parts, measure_parts, samples_in
from lightning_batchmem.phases import PhaseMarks, StepPeaks
from lightning_batchmem.report import Step, StepClock, Tally
from lightning_batchmem.report.csv import NAME, BatchCsv
from lightning_batchmem.report.table import Summary

_LOOKS_FOR_PARTS = 3
"""How many steps may be looked at for gradients that outlive a step; where nobody keeps them there are none."""


class RunRecord:
    """All that is known of one run of ``fit``; constant in size, however many steps it has.

    Args:
        trainer: when training starts.
        module: the module that is trained.
        meter: of the device that is trained on.

    Attributes:
        epoch_peak_bytes: highest allocated bytes inside a step of this epoch; ``None`` before its first step has ended.
        run_peak_bytes: highest allocated bytes inside a step of this run; ``None`` likewise.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, meter: Meter) -> None:
        self.marks = PhaseMarks(meter)
        self.clock = StepClock()
        self._meter = meter
        self._device = trainer.strategy.root_device
        self._utilization: Utilization | None = utilization_for(self._device)
        self._world_size = trainer.world_size
        self._limit_bytes = meter.budget_bytes()
        self._limit_is_new = True
        self._total, self._interval = Tally(), Tally()
        self._csv: BatchCsv | None = None
        self._loggers_given_up: list[Logger] = []
        self.epoch_peak_bytes: int | None = None
        self.run_peak_bytes: int | None = None
        self._optimizers: list[Optimizer] = []
        self._handles: list[RemovableHandle] = []
        self._in_step = self._stepped = self._has_stepped = self._size_warned = False
        self._parts: Parts | None = None
        self._looks_for_parts = 0
        self._steady_peak_bytes = 0
        self._rest_bytes = self._rest_before_training(trainer, module)

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Watch these optimizers and no others."""
        wanted = [optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer)]  # a strategy's may not be
        if list(map(id, wanted)) != list(map(id, self._optimizers)):
            self._unwatch()
            self._optimizers = wanted
            self._handles = self.marks.watch(wanted)
            self._handles += [optimizer.register_step_post_hook(self._note_step) for optimizer in wanted]

    def open_csv(self, log_dir: str, *, resume: bool) -> None:
        """Open the CSV of this run; a directory that cannot be written is an error here."""
        if "://" in log_dir:
            rank_zero_warn(f"MemoryProfiler writes no {NAME}: the log directory {log_dir} is not a local one.")
        else:
            self._csv = BatchCsv(Path(log_dir), resume=resume, has_peak=self._meter.has_peak)

    def end_evaluation(self) -> None:
        """Let the clock run on; what the device did for the evaluation is not training."""
        self.clock.resume()
        if self._utilization is not None:
            self._utilization.percent_since_last_call()

    def start(self, module: LightningModule, batch: object) -> None:
        """Begin a step."""
        self.clock.start()
        self._stepped, self._in_step = False, True
        self.marks.start()
        if self._has_stepped and self._looks_for_parts < _LOOKS_FOR_PARTS:
            self._take_parts(module, batch)

    def stop(self, trainer: Trainer, batch: object) -> None:
        """End the step."""
        if not self._in_step:  # the loader gave None: Lightning runs no step, and still calls this hook
            return
        self._in_step = False
        peaks = self.marks.stop()
        seconds, wait_seconds = self.clock.stop()
        if not self._stepped:
            _fold_optimizer_step(peaks)
        step = Step(trainer.fit_loop.total_batch_idx, self._samples(batch), peaks, seconds, wait_seconds)
        self._interval.add(step)
        self.epoch_peak_bytes = max(self.epoch_peak_bytes or 0, peaks.peak_bytes)
        self.run_peak_bytes = max(self.run_peak_bytes or 0, peaks.peak_bytes)
        if self._parts is not None:
            self._steady_peak_bytes = max(self._steady_peak_bytes, peaks.peak_bytes)
        if logs_now(trainer):
            self._write(step, self.log(trainer, logging_step(trainer)))
            if self._csv is not None:
                self._csv.flush()
        else:
            self._write(step, None)
        self.clock.leave()

    def log(self, trainer: Trainer, step: int) -> tuple[str, float] | None:
        """Send what was tallied since the last time to the loggers, and begin anew.

        Returns:
            Key and percent of the utilization since then, where it is known.
        """
        if not self._interval.steps:
            return None
        self._limit_bytes, self._limit_is_new = self._meter.budget_bytes(), True
        metrics = self._interval.metrics(
            limit_bytes=self._limit_bytes, world_size=self._world_size, has_peak=self._meter.has_peak
        )
        utilization = None
        if self._utilization is not None and (percent := self._utilization.percent_since_last_call()) is not None:
            utilization = (self._utilization.key, percent)
            metrics[f"utilization/{self._utilization.key}"] = percent
        for logger in trainer.loggers:
            if logger in self._loggers_given_up:
                continue
            try:
                logger.log_metrics(metrics, step=step)
            except Exception as error:  # noqa: BLE001 - whatever a logger raises, training is worth more than its metrics
                self._loggers_given_up.append(logger)
                rank_zero_warn(
                    f"{type(logger).__name__} gets no more metrics of MemoryProfiler: it raised"
                    f" {type(error).__name__}: {error}"
                )
        self._total.merge(self._interval)
        self._interval = Tally()
        return utilization

    def close(self) -> Summary | None:
        """Take the hooks off the optimizers, close the CSV, and say what the run used; ``None`` without a step."""
        self._unwatch()
        if self._csv is not None:
            self._csv.close()
        total, parts = self._total, self._parts
        if parts is not None:
            # without a peak the run broke off inside the very step that the parts were taken in
            parts = parts.at_peak(self._steady_peak_bytes) if self._steady_peak_bytes else None
        total.merge(self._interval)
        if not total.steps:
            return None
        return Summary(
            device=self._meter.name,
            steps=total.steps,
            peak_bytes=total.peak_bytes,
            peak_step=total.peak_step,
            batch_size=total.peak_batch_size,
            phase_peak_bytes=total.phase_peak_bytes,
            peak_reserved_bytes=total.peak_reserved_bytes,
            limit_bytes=self._limit_bytes,
            parts=parts,
            samples_per_second=total.samples_per_second(self._world_size),
            step_seconds=total.seconds / total.steps,
            data_wait_share=total.data_wait_share,
            has_peak=self._meter.has_peak,
        )

    def _take_parts(self, module: LightningModule, batch: object) -> None:
        self.clock.pause()
        start_bytes = self._meter.current().allocated_bytes
        self._parts = measure_parts(module, self._optimizers, batch, self._device, start_bytes=start_bytes)
        if self._rest_bytes is not None:
            self._parts = replace(self._parts, rest_bytes=min(self._parts.rest_bytes, self._rest_bytes))
        self._looks_for_parts = _LOOKS_FOR_PARTS if self._parts.gradients_bytes else self._looks_for_parts + 1
        self.clock.resume()

    def _rest_before_training(self, trainer: Trainer, module: LightningModule) -> int | None:
        """What is in use beside the module before the first step, where it cannot be told later.

        The resident set still holds what the step before has freed (the heap keeps it), which is activations by right.
        An allocator that counts what it reserves counts the freed apart: ``None``.
        """
        if self._meter.current().reserved_bytes is not None:
            return None
        self._meter.release_cached()
        now = self._meter.current().allocated_bytes
        return measure_parts(module, trainer.optimizers, None, self._device, start_bytes=now).rest_bytes

    def _samples(self, batch: object) -> int | None:
        samples = samples_in(batch)
        if samples is None and not self._size_warned:
            self._size_warned = True
            rank_zero_warn(
                "MemoryProfiler cannot tell how many samples a batch holds, as its tensors do not agree in their first"
                " dimension, or there are none: batch/size and throughput/samples_per_s leave such steps out."
            )
        return samples

    def _write(self, step: Step, utilization: tuple[str, float] | None) -> None:
        if self._csv is not None:
            limit_bytes = self._limit_bytes if self._limit_is_new else None
            self._csv.write(step, world_size=self._world_size, limit_bytes=limit_bytes, utilization=utilization)
        self._limit_is_new = False

    def _note_step(self, *_: Any) -> None:
        self._stepped = self._has_stepped = True

    def _unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._optimizers = [], []


def _fold_optimizer_step(peaks: StepPeaks) -> None:
    """Where no optimizer stepped (accumulation), what followed backward is the end of backward."""
    phases = peaks.phase_peak_bytes
    if (after := phases.pop("optimizer_step", None)) is not None:
        phases["backward"] = max(phases.get("backward", 0), after)
