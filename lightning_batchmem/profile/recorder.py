"""Measure the steps of one run for the MemoryProfiler.

A run is one ``fit``, ``validate``, ``test`` or ``predict``.
"""

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
from lightning_batchmem.devices import utilization_for
from lightning_batchmem.devices.accelerator import AcceleratorTimer
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.peaks import PhasePeaks
from lightning_batchmem.devices.tensors import samples_in
from lightning_batchmem.plan.options import number_from
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import mib
from lightning_batchmem.profile.steady_breakdown import SteadyBreakdown
from lightning_batchmem.profile.step_record import DeviceReading, StageTimer, StepRecord

# So many steps lie between two reports if log_every_n_steps=0. This is Lightning's default.
_UNLOGGED_INTERVAL = 50
# The limit changes slowly, and reading it takes system calls.
LIMIT_INTERVAL_SECONDS = 1.0


class StepRecorder:
    """Measures the steps of one run. A training may contain evaluations."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        device_memory: DeviceMemory | None,
        stage: str,
        device_timer: AcceleratorTimer | None,
        *,
        items_fn: Callable[[Any], float] | None,
        plan: Plan | None,
    ) -> None:
        self.phase_peaks = PhasePeaks(device_memory)
        self.limit_bytes: int | None = None
        self._device_memory = device_memory
        self._device_timer = device_timer
        self._items_fn = items_fn
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
        optimizers = [
            optimizer for optimizer in trainer.optimizers if isinstance(optimizer, Optimizer)
        ]
        if list(map(id, optimizers)) != list(map(id, self._optimizers)):
            self.close()
            self._optimizers = optimizers
            self._is_manual = not module.automatic_optimization
            self._handles = [
                optimizer.register_step_post_hook(self._note_step) for optimizer in optimizers
            ]

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
        # The start of workers and other callbacks take time around an evaluation.
        self.main.forget_wait()
        if self._utilization is not None:
            # This reading excludes the evaluation from the next one.
            self._utilization.percent()

    def start(self, module: LightningModule, batch: object) -> None:
        timer = self._timer
        if not timer.start():
            self._mark()
        self._stepped = False
        self._in_step = True
        self._batch = batch
        self._start_bytes = None
        is_training = timer.stage == "train"
        is_due = is_training and timer.steps >= self._next_start_reading
        if is_due and self._device_memory is not None:
            # The bytes are read in each of the first 96 steps, then 33 times per doubling of the
            # steps, at places that no period repeats.
            self._next_start_reading = timer.steps + max(1, timer.steps // 48)
            self._start_bytes = self._device_memory.private_bytes()
        self.phase_peaks.start("forward" if is_training else "evaluation")
        breakdown = self.breakdown
        is_steady = self._is_steady and timer is self.main
        if is_steady and breakdown is not None and breakdown.is_due:
            timer.pause()
            breakdown.take(module, self._optimizers, batch)
            timer.resume()

    def stop(self, trainer: Trainer, batch: object) -> StepRecord | None:
        """End the step; None if Lightning skipped it because the loader returned None."""
        if not self._in_step:
            return None
        timer = self._timer
        peaks = self.phase_peaks.stop()
        number = self._timer.steps
        marks = None
        seconds, wait_seconds = timer.stop()
        if self._device_timer is not None:
            marks = (timer.mark, self._device_timer.mark())
            timer.mark = marks[1]
        if timer.stage == "train":
            number = trainer.fit_loop.total_batch_idx
            # Under gradient accumulation no optimizer stepped, and the phase after backward belongs
            # to backward.
            if not self._stepped:
                phases = peaks.phase_peak_bytes
                if "optimizer_step" in phases:
                    after_bytes = phases.pop("optimizer_step")
                    phases["backward"] = max(phases.get("backward", 0), after_bytes)
        elif timer is self.main:
            self._is_steady = True
        self._in_step = False
        self._batch = None
        samples = self._samples_in(trainer, batch)
        items = None
        if self._items_fn is not None:
            items = number_from("items_fn", self._items_fn(batch), nan=True)
        record = StepRecord(
            number,
            samples,
            peaks,
            seconds,
            wait_seconds,
            timer.stage,
            items,
            marks,
            self._start_bytes,
        )
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
        return logs_now(trainer) or (
            not self._timer.steps % _UNLOGGED_INTERVAL and not logs_at_all(trainer)
        )

    def read_device(self) -> DeviceReading:
        """Read the limit, the utilization and the allocator's retries.

        The first two also become part of the last record.
        """
        utilization = None
        retries = None
        limit_bytes = None
        # The limit and the retries are read at most once a second.
        if self._read_limit() and self._device_memory is not None:
            retries = self._device_memory.counters().get("num_alloc_retries")
            limit_bytes = self.limit_bytes
        if self._utilization is not None and (percent := self._utilization.percent()) is not None:
            utilization = (self._utilization.key, percent)
        if self._record is not None:
            self._record.limit_bytes = limit_bytes or self._record.limit_bytes
            self._record.utilization = utilization
            self._record = None
        return DeviceReading(self.limit_bytes, utilization, retries)

    def explain_out_of_memory(self, trainer: Trainer, module: LightningModule) -> str:
        """The note of an error: the step that ran out of memory, and the contents of the memory."""
        where = "between two steps"
        if self._in_step:
            stage = self._timer.stage
            number = self._timer.steps
            if stage == "train":
                number = trainer.fit_loop.total_batch_idx
            where = f"in {stage} step {number}"
            if (samples := samples_in(self._batch)) is not None:
                where += f" with a batch of {samples:,} samples"
        if trainer.world_size > 1:
            where += f" on rank {trainer.global_rank}"
        text = f"memory ran out {where}."
        peak_bytes = self.phase_peaks.stop().peak_bytes
        if self.breakdown is not None and self.limit_bytes is not None:
            breakdown = self.breakdown.at_failure(module, self._optimizers, self._batch, peak_bytes)
            text += (
                f" Until then it held up to {mib(peak_bytes)} of {mib(self.limit_bytes)}:"
                f" {breakdown}."
            )
        return text

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._optimizers = []

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
            # Several loaders, and loaders that make their own batches, have no batch size.
            size = getattr(trainer.train_dataloader, "batch_size", None)
            if size is not None:
                # The last batch may be smaller.
                return None if trainer.is_last_batch else int(size)
        if not self._warned_of_size:
            self._warned_of_size = True
            rank_zero_warn(
                f"MemoryProfiler cannot count the samples of a {self._timer.stage} batch: its"
                " tensors differ in their first dimension, or it has none. Such steps are left out"
                " of batch/size and throughput/samples_per_s."
            )
        return None

    def _note_step(self, *_: Any) -> None:
        self._stepped = self._is_steady = True
        # Another forward pass may follow, and Lightning has no hook after an optimizer's step.
        if self._is_manual:
            self.phase_peaks.enter("forward")
