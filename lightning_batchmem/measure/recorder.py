"""Measure the steps of one ``fit``, ``validate``, ``test`` or ``predict`` for the MemoryProfiler."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_batchmem._lightning.trainer_state import logs_at_all, logs_now
from lightning_batchmem.devices import DeviceMemory, utilization_for
from lightning_batchmem.devices.cuda import CudaTimer
from lightning_batchmem.devices.tensors import samples_in
from lightning_batchmem.measure.breakdown import SteadyBreakdown
from lightning_batchmem.measure.peaks import PhasePeaks
from lightning_batchmem.measure.step_record import DeviceReading, StageTimer, StepRecord
from lightning_batchmem.plan.options import number_from
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import mib

_UNLOGGED_INTERVAL = 50  # steps between two reports if log_every_n_steps=0; Lightning's default
LIMIT_INTERVAL_SECONDS = 1.0  # the limit changes slowly, and reading it takes system calls


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
        self.limit_bytes: int | None = None
        self._device_memory, self._device_timer, self._items_fn = device_memory, device_timer, items_fn
        self._max_limit_bytes = math.inf if plan is None else plan.limit_bytes
        self._limit_read_at = -math.inf
        self._optimizers: list[Optimizer] = []
        self._handles: list[RemovableHandle] = []
        self.main = self._timer = StageTimer(stage)
        self._utilization = utilization_for(trainer.strategy.root_device)
        self._batch: object = None
        self._record: StepRecord | None = None
        self._start_bytes: int | None = None
        self._next_start_reading = 0
        self._in_step = self._stepped = self._is_steady = self._warned_of_size = False
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
            self._is_manual = not module.automatic_optimization
            self._handles = [optimizer.register_step_post_hook(self._note_step) for optimizer in optimizers]

    def restart(self) -> None:
        self._timer.restart()
        self._mark()

    def begin_evaluation(self, stage: str) -> None:
        self.main.pause()
        self._timer = StageTimer(stage)
        self.restart()

    def end_evaluation(self) -> None:
        self._timer = self.main
        self.main.resume()
        self.main.forget_wait()  # starting workers, and other callbacks, take time around an evaluation
        if self._utilization is not None:
            self._utilization.percent()  # excludes the evaluation from the next reading

    def start(self, module: LightningModule, batch: object) -> None:
        timer = self._timer
        if not timer.start():
            self._mark()
        self._stepped, self._in_step, self._batch, self._start_bytes = False, True, batch, None
        is_training = timer.stage == "train"
        if is_training and timer.steps >= self._next_start_reading and self._device_memory is not None:
            # each of the first 96 steps, then 33 times per doubling of the steps, at places that no period repeats
            self._next_start_reading = timer.steps + max(1, timer.steps // 48)
            self._start_bytes = self._device_memory.private_bytes()
        self.phase_peaks.start("forward" if is_training else "evaluation")
        if self._is_steady and timer is self.main and self.breakdown is not None and self.breakdown.is_due:
            timer.pause()
            self.breakdown.take(module, self._optimizers, batch)
            timer.resume()

    def stop(self, trainer: Trainer, batch: object) -> StepRecord | None:
        """End the step; None if Lightning skipped it because the loader returned None."""
        if not self._in_step:
            return None
        timer, peaks, number, marks = self._timer, self.phase_peaks.stop(), self._timer.steps, None
        seconds, wait_seconds = timer.stop()
        if self._device_timer is not None:
            marks = (timer.mark, self._device_timer.mark())
            timer.mark = marks[1]
        if timer.stage == "train":
            number = trainer.fit_loop.total_batch_idx
            if not self._stepped:  # gradient accumulation: what follows backward belongs to it
                phases = peaks.phase_peak_bytes
                if "optimizer_step" in phases:
                    phases["backward"] = max(phases.get("backward", 0), phases.pop("optimizer_step"))
        elif timer is self.main:
            self._is_steady = True
        self._in_step, self._batch = False, None
        samples = self._samples_in(trainer, batch)
        items = None if self._items_fn is None else number_from("items_fn", self._items_fn(batch), nan=True)
        record = StepRecord(number, samples, peaks, seconds, wait_seconds, timer.stage, items, marks, self._start_bytes)
        if timer is self.main:
            record.is_steady = self.breakdown is not None and self.breakdown.num_taken > 0
            if timer.steps == 1:
                record.limit_bytes = self.limit_bytes
        self._record = record
        return record

    def leave(self) -> None:
        self._timer.leave()

    def is_logging_step(self, trainer: Trainer) -> bool:
        """Whether training is logged after the step that ended."""
        if self._timer.stage != "train":
            return False
        return logs_now(trainer) or (not self._timer.steps % _UNLOGGED_INTERVAL and not logs_at_all(trainer))

    def read_device(self) -> DeviceReading:
        """Read limit, utilization and allocator retries; the first two also become part of the last record."""
        utilization, retries, limit_bytes = None, None, None
        if self._read_limit() and self._device_memory is not None:  # both once a second
            retries, limit_bytes = self._device_memory.counters().get("num_alloc_retries"), self.limit_bytes
        if self._utilization is not None and (percent := self._utilization.percent()) is not None:
            utilization = (self._utilization.key, percent)
        if self._record is not None:
            self._record.limit_bytes, self._record.utilization = limit_bytes or self._record.limit_bytes, utilization
            self._record = None
        return DeviceReading(self.limit_bytes, utilization, retries)

    def explain_out_of_memory(self, trainer: Trainer, module: LightningModule) -> str:
        """The note of an error: the step that ran out of memory, and what the memory contained."""
        where = "between two steps"
        if self._in_step:
            stage = self._timer.stage
            where = f"in {stage} step {trainer.fit_loop.total_batch_idx if stage == 'train' else self._timer.steps}"
            if (samples := samples_in(self._batch)) is not None:
                where += f" with a batch of {samples:,} samples"
        if trainer.world_size > 1:
            where += f" on rank {trainer.global_rank}"
        text, peak_bytes = f"memory ran out {where}.", self.phase_peaks.stop().peak_bytes
        if self.breakdown is not None and self.limit_bytes is not None:
            breakdown = self.breakdown.at_failure(module, self._optimizers, self._batch, peak_bytes)
            text += f" Until then it held up to {mib(peak_bytes)} of {mib(self.limit_bytes)}: {breakdown}."
        return text

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._optimizers = [], []

    def _mark(self) -> None:
        if self._device_timer is not None:
            self._timer.mark = self._device_timer.mark()

    def _read_limit(self) -> bool:
        now = time.monotonic()
        if self._device_memory is None or now - self._limit_read_at < LIMIT_INTERVAL_SECONDS:
            return False
        self.limit_bytes = int(min(self._device_memory.budget_bytes(), self._max_limit_bytes))
        self._limit_read_at = now
        return True

    def _samples_in(self, trainer: Trainer, batch: object) -> int | None:
        samples = samples_in(batch)
        if samples is not None:
            return samples
        if self._timer.stage == "train":
            size = getattr(trainer.train_dataloader, "batch_size", None)  # None for several loaders, and own batches
            if size is not None:
                return None if trainer.is_last_batch else int(size)  # the last one may be smaller
        if not self._warned_of_size:
            self._warned_of_size = True
            rank_zero_warn(
                f"MemoryProfiler cannot count the samples of a {self._timer.stage} batch: its tensors differ in their"
                " first dimension, or it has none. Such steps are left out of batch/size and throughput/samples_per_s."
            )
        return None

    def _note_step(self, *_: Any) -> None:
        self._stepped = self._is_steady = True
        if self._is_manual:  # another forward may follow; Lightning has no hook after this step
            self.phase_peaks.enter("forward")
