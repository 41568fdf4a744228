"""Measure the steps of one ``fit``, ``validate``, ``test`` or ``predict`` for the MemoryProfiler."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_batchmem._lightning.trainer_state import logs_at_all, logs_now
from lightning_batchmem.devices import utilization_for
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.cuda import CudaTimer
from lightning_batchmem.devices.tensors import samples_in
from lightning_batchmem.measure.breakdown import MemoryBreakdown, SteadyBreakdown
from lightning_batchmem.measure.peaks import PhasePeaks
from lightning_batchmem.measure.step_record import DeviceReading, StepRecord, StepTimer
from lightning_batchmem.plan.plan import Plan

_UNLOGGED_INTERVAL = 50  # steps between two reports if log_every_n_steps=0; Lightning's default
LIMIT_INTERVAL_SECONDS = 1.0  # the limit changes slowly, and reading it takes system calls
READINGS_PER_WINDOW = 16  # of the memory at step start, see report.alerts.LeakDetector


class OutOfMemoryReport(NamedTuple):
    """Where a step ran out of memory, and what the memory contained."""

    where: str
    peak_bytes: int
    limit_bytes: int | None
    breakdown: MemoryBreakdown | None


@dataclass
class _Stage:
    name: str
    timer: StepTimer = field(default_factory=StepTimer)
    steps: int = 0
    mark: object = None  # of the device, at the end of the last step


class StepRecorder:
    """Measures the steps of one run. A training may contain evaluations."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        device_memory: DeviceMemory | None,
        stage: str,
        device_timer: CudaTimer | None,
        *,
        items_fn: Callable[[Any], float] | None,
        plan: Plan | None,
    ) -> None:
        self.phase_peaks = PhasePeaks(device_memory)
        self.stage = stage
        self.limit_bytes: int | None = None
        self._device_memory, self._device_timer, self._items_fn = device_memory, device_timer, items_fn
        self._max_limit_bytes = math.inf if plan is None else plan.limit_bytes
        self._limit_read_at = -math.inf
        self._optimizers: list[Optimizer] = []
        self._handles: list[RemovableHandle] = []
        number = trainer.fit_loop.total_batch_idx + 1 if stage == "train" else 0  # of the next step; resumed or not
        self._main = self._stage = _Stage(stage, steps=number)
        self._is_logging = logs_at_all(trainer)
        self._utilization = utilization_for(trainer.strategy.root_device)
        self._batch: object = None
        self._record: StepRecord | None = None
        self._start_bytes: int | None = None
        self._num_start_readings, self._next_start_reading, self._stretch_end = 0, 0, 0
        self._in_step = self._stepped = self._is_steady = self._warned_of_size = False
        self._num_steps = 0
        if stage == "train":
            self.watch(trainer, module)
        self.breakdown: SteadyBreakdown | None = None
        if device_memory is not None:
            device = trainer.strategy.root_device
            self.breakdown = SteadyBreakdown(device_memory, device, module, self._optimizers)
        self._read_limit()

    def watch(self, trainer: Trainer, module: LightningModule) -> None:
        """Register hooks on the trainer's optimizers, and remove them from others."""
        optimizers = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, Optimizer)]
        if list(map(id, optimizers)) != list(map(id, self._optimizers)):
            self.close()
            self._optimizers = optimizers
            # after an automatic optimization's step no forward follows
            self._handles = [] if module.automatic_optimization else self.phase_peaks.watch(optimizers)
            self._handles += [optimizer.register_step_post_hook(self._note_step) for optimizer in optimizers]

    def restart(self) -> None:
        """Start the next step now."""
        self._stage.timer.restart()
        self._mark()

    def begin_evaluation(self, stage: str) -> None:
        """Pause the timer of training for an evaluation."""
        self._main.timer.pause()
        self._stage = _Stage(stage)
        self.restart()

    def end_evaluation(self) -> None:
        """Continue with training."""
        self._stage = self._main
        self._main.timer.resume()
        self.forget_wait()  # starting workers, and other callbacks, take time around an evaluation
        if self._utilization is not None:
            self._utilization.percent()  # excludes the evaluation from the next reading

    def forget_wait(self) -> None:
        """Make the wait for the next batch of the training unknown."""
        self._main.timer.forget_wait()

    def start(self, module: LightningModule, batch: object) -> None:
        """Begin a step."""
        stage = self._stage
        if not stage.timer.start():
            self._mark()
        self._stepped, self._in_step, self._batch = False, True, batch
        is_due = stage.name == "train" and self._num_steps >= self._next_start_reading
        self._start_bytes = self._read_start_bytes() if is_due else None
        self.phase_peaks.start("forward" if stage.name == "train" else "evaluation")
        if self._is_steady and stage is self._main and self.breakdown is not None and self.breakdown.is_due:
            stage.timer.pause()
            self.breakdown.take(module, self._optimizers, batch)
            stage.timer.resume()

    def stop(self, trainer: Trainer, batch: object) -> StepRecord | None:
        """End the step; None if Lightning skipped it because the loader returned None."""
        if not self._in_step:
            return None
        stage, peaks = self._stage, self.phase_peaks.stop()
        seconds, wait_seconds = stage.timer.stop()
        number, marks = stage.steps, None
        if self._device_timer is not None:
            marks = (stage.mark, self._device_timer.mark())
            stage.mark = marks[1]
        if stage.name == "train":
            number = trainer.fit_loop.total_batch_idx
            phases = peaks.phase_peak_bytes
            if not self._stepped and "optimizer_step" in phases:  # gradient accumulation: it belongs to backward
                phases["backward"] = max(phases.get("backward", 0), phases.pop("optimizer_step"))
        if stage is self._main:
            self._is_steady = self._is_steady or stage.name != "train"
            if self.breakdown is not None:
                self.breakdown.add_peak(peaks.peak_bytes)
        self._in_step, self._batch, stage.steps = False, None, stage.steps + 1
        self._num_steps += stage is self._main
        samples = self._samples_in(trainer, batch)
        items = None if self._items_fn is None else float(self._items_fn(batch))
        self._record = StepRecord(number, samples, peaks, seconds, wait_seconds, stage.name, items, marks)
        self._record.start_bytes = self._start_bytes
        if self._num_steps == 1:
            self._record.limit_bytes = self.limit_bytes
        return self._record

    def leave(self) -> None:
        """Start the wait for the next batch: the callback's own work has ended."""
        self._stage.timer.leave()

    def is_logging_step(self, trainer: Trainer) -> bool:
        """Whether training is logged after the step that ended."""
        if self._stage.name != "train":
            return False
        return logs_now(trainer) if self._is_logging else not self._stage.steps % _UNLOGGED_INTERVAL

    def read_device(self) -> DeviceReading:
        """Read limit, utilization and allocator retries; the first two also become part of the last record."""
        record, self._record = self._record, None
        utilization, retries = None, None
        if self._read_limit() and self._device_memory is not None:  # both once a second
            retries = self._device_memory.counters().get("num_alloc_retries")
            if record is not None:
                record.limit_bytes = self.limit_bytes
        if self._utilization is not None and (percent := self._utilization.percent()) is not None:
            utilization = (self._utilization.key, percent)
            if record is not None:
                record.utilization = utilization
        return DeviceReading(self.limit_bytes, utilization, retries)

    def explain_out_of_memory(self, trainer: Trainer, module: LightningModule) -> OutOfMemoryReport:
        """Describe the step that ran out of memory."""
        where = "between two steps"
        if self._in_step:
            number = trainer.fit_loop.total_batch_idx if self._stage.name == "train" else self._stage.steps
            where = f"in {self._stage.name} step {number}"
            if (samples := samples_in(self._batch)) is not None:
                where += f" with a batch of {samples:,} samples"
        if trainer.world_size > 1:
            where += f" on rank {trainer.global_rank}"
        peak_bytes, breakdown = self.phase_peaks.stop().peak_bytes, None
        if self.breakdown is not None:
            breakdown = self.breakdown.at_failure(module, self._optimizers, self._batch, peak_bytes)
        return OutOfMemoryReport(where, peak_bytes, self.limit_bytes, breakdown)

    def close(self) -> None:
        """Remove the hooks from the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._optimizers = [], []

    def _mark(self) -> None:
        if self._device_timer is not None:
            self._stage.mark = self._device_timer.mark()

    def _read_limit(self) -> bool:
        now = time.monotonic()
        if self._device_memory is None or now - self._limit_read_at < LIMIT_INTERVAL_SECONDS:
            return False
        self.limit_bytes = int(min(self._device_memory.budget_bytes(), self._max_limit_bytes))
        self._limit_read_at = now
        return True

    def _read_start_bytes(self) -> int | None:
        """Read the memory at the start of each of the first 64 steps, then 32 times per doubling of the steps."""
        if self._device_memory is None:
            return None
        self._num_start_readings += 1
        stride = 2 ** max(0, self._num_start_readings // (2 * READINGS_PER_WINDOW) - 1)
        # a place in the stretch that no period of the training repeats: multiples of the golden ratio, modulo 1
        place = int(stride * (0.618034 * self._num_start_readings % 1))
        self._stretch_end += stride
        self._next_start_reading = self._stretch_end + place
        return self._device_memory.private_bytes()

    def _samples_in(self, trainer: Trainer, batch: object) -> int | None:
        samples = samples_in(batch)
        if samples is None and self._stage.name == "train":
            size = getattr(trainer.train_dataloader, "batch_size", None)  # None for several loaders, and own batches
            if size is not None:
                return None if trainer.is_last_batch else int(size)  # the last one may be smaller
        if samples is None and not self._warned_of_size:
            self._warned_of_size = True
            rank_zero_warn(
                "MemoryProfiler cannot count the samples of a batch: its tensors differ in their first dimension, or it"
                " has none. Such steps are left out of batch/size and throughput/samples_per_s."
            )
        return samples

    def _note_step(self, *_: Any) -> None:
        self._stepped = self._is_steady = True
