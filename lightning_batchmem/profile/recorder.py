"""Measure the steps of one run for the MemoryProfiler.

A run is one ``fit``, ``validate``, ``test`` or ``predict``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.peaks import PhasePeaks
from lightning_batchmem.devices.tensors import samples_in
from lightning_batchmem.plan.options import number_from
from lightning_batchmem.plan.records import mib
from lightning_batchmem.profile.device_reader import DeviceReader
from lightning_batchmem.profile.flop_step import FlopStep
from lightning_batchmem.profile.module_step import ModuleStep
from lightning_batchmem.profile.steady_breakdown import SteadyBreakdown
from lightning_batchmem.profile.step_clock import StepClock
from lightning_batchmem.profile.step_record import DeviceReading, StepRecord


class StepRecorder:
    """Measures the steps of one run. A training may contain evaluations."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        device_memory: DeviceMemory | None,
        stage: str,
        *,
        items_fn: Callable[[Any], float] | None,
        max_limit_bytes: float,
        has_modules: bool,
        flops: FlopStep | None,
    ) -> None:
        device = trainer.strategy.root_device
        self.phase_peaks = PhasePeaks(device_memory)
        self._device_memory = device_memory
        self._device_reader = DeviceReader(device, device_memory, max_limit_bytes)
        self._items_fn = items_fn
        self._optimizers: list[Optimizer] = []
        # The clock of the run, and that of the stage that runs now.
        self.run_clock = StepClock(stage)
        self.clock = self.run_clock
        self._batch: object = None
        self._record: StepRecord | None = None
        self._start_bytes: int | None = None
        self._next_start_reading = 0
        self._in_step = False
        self._is_steady = False
        self._warned_of_size = False
        if stage == "train":
            self.watch(trainer, module)
        # Each of these measures a steady step of its own, since both slow a step down.
        self._to_measure: list[ModuleStep | FlopStep] = [] if flops is None else [flops]
        self._measured: ModuleStep | FlopStep | None = None
        self.modules: ModuleStep | None = None
        if has_modules and stage == "train":
            self.modules = ModuleStep(device, trainer.accumulate_grad_batches)
            self._to_measure.append(self.modules)
        self.breakdown: SteadyBreakdown | None = None
        if device_memory is not None:
            self.breakdown = SteadyBreakdown(device_memory, device, module, self._optimizers)

    def watch(self, trainer: Trainer, module: LightningModule) -> None:
        """Watch the trainer's optimizers, which may have been configured again."""
        optimizers = [
            optimizer for optimizer in trainer.optimizers if isinstance(optimizer, Optimizer)
        ]
        if optimizers != self._optimizers:
            self._optimizers = optimizers
            # Under manual optimization, another forward pass may follow an optimizer's step.
            forward_follows = not module.automatic_optimization
            self.phase_peaks.watch(optimizers, forward_follows=forward_follows)

    def drop_measurement(self) -> None:
        """Stop to measure a step that has not ended, and measure another one instead.

        Under gradient accumulation a validation may come between two batches of it, and Lightning
        ends an epoch early where ``on_train_batch_start`` returns -1.
        """
        if self._measured is not None:
            self._measured.close()
            self._to_measure.append(self._measured)
            self._measured = None

    def begin_validation(self) -> None:
        """Begin a validation in the training."""
        self.drop_measurement()
        self.clock = StepClock("validate")

    def end_validation(self) -> None:
        self.clock = self.run_clock
        # This leaves out the evaluation, and the start of workers and other callbacks around it.
        self.run_clock.forget_wait()
        # This reading excludes the evaluation from the next one.
        self._device_reader.read_utilization()

    def start(self, module: LightningModule, batch: object) -> None:
        """Begin a step, whose batch has arrived."""
        clock = self.clock
        clock.start()
        self._in_step = True
        self._batch = batch
        self._start_bytes = None
        # The steady state begins with the first step after an optimizer step.
        if self.phase_peaks.stepped:
            self._is_steady = True
        phase = "evaluation"
        if clock.stage == "train":
            phase = "forward"
            if clock.steps >= self._next_start_reading and self._device_memory is not None:
                self._next_start_reading = next_start_reading(clock.steps)
                self._start_bytes = self._device_memory.private_bytes()
        self.phase_peaks.start(phase)
        breakdown = self.breakdown
        is_steady = self._is_steady and clock is self.run_clock
        if is_steady and breakdown is not None and breakdown.is_due:
            begin = clock.now()
            breakdown.take(module, self._optimizers, batch)
            clock.leave_out(clock.now() - begin)
        elif is_steady and self._to_measure and self._measured is None:
            self._measured = self._to_measure.pop()
            self._measured.begin(module, self._optimizers, batch)

    def stop(self, trainer: Trainer, batch: object) -> StepRecord | None:
        """End the step; None if Lightning skipped it because the loader returned None."""
        if not self._in_step:
            return None
        clock = self.clock
        is_slowed = self._measured is not None and clock is self.run_clock
        if self._measured is not None and is_slowed:
            has_stepped = bool(self.phase_peaks.stepped)
            samples = self._samples_in(trainer, batch)
            if self._measured.end_batch(samples=samples, has_stepped=has_stepped):
                self._measured = None
        peaks = self.phase_peaks.stop()
        number = clock.steps
        seconds, wait_seconds = clock.stop()
        if clock.stage == "train":
            number = trainer.fit_loop.total_batch_idx
            if not self.phase_peaks.stepped and "optimizer_step" in peaks.phase_peak_bytes:
                # No optimizer stepped after backward, as in a gradient accumulation.
                after_bytes = peaks.phase_peak_bytes.pop("optimizer_step")
                backward_bytes = peaks.phase_peak_bytes.get("backward", 0)
                peaks.phase_peak_bytes["backward"] = max(backward_bytes, after_bytes)
        elif clock is self.run_clock:
            # An evaluation is in its steady state from the second step on.
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
            clock.stage,
            items,
            self._start_bytes,
        )
        record.is_slowed = is_slowed
        if clock is self.run_clock:
            record.is_steady = self.breakdown is not None and self.breakdown.num_taken > 0
            if clock.steps == 1:
                record.limit_bytes = self._device_reader.limit_bytes
        self._record = record
        return record

    def read_device(self) -> DeviceReading:
        """Read the device; the limit and the utilization become part of the last record."""
        reading = self._device_reader.read()
        if self._record is not None:
            self._record.limit_bytes = reading.limit_bytes or self._record.limit_bytes
            self._record.utilization = reading.utilization
            self._record = None
        return reading

    def explain_out_of_memory(self, trainer: Trainer, module: LightningModule) -> str:
        """The note of an error: the step that ran out of memory, and the contents of the memory."""
        where = "between two steps"
        if self._in_step:
            number = self.clock.steps
            if self.clock.stage == "train":
                number = trainer.fit_loop.total_batch_idx
            where = f"in {self.clock.stage} step {number}"
            if (samples := samples_in(self._batch)) is not None:
                where += f" with a batch of {samples:,} samples"
        if trainer.world_size > 1:
            where += f" on rank {trainer.global_rank}"
        text = f"memory ran out {where}."
        peak_bytes = self.phase_peaks.stop().peak_bytes
        limit_bytes = self._device_reader.limit_bytes
        if self.breakdown is not None and limit_bytes is not None:
            breakdown = self.breakdown.at_failure(module, self._optimizers, self._batch, peak_bytes)
            text += (
                f" Until then it held up to {mib(peak_bytes)} of {mib(limit_bytes)}: {breakdown}."
            )
        return text

    def close(self) -> None:
        """Remove all hooks."""
        self.phase_peaks.unwatch()
        if self._measured is not None:
            self._measured.close()

    def _samples_in(self, trainer: Trainer, batch: object) -> int | None:
        """Return the samples of a batch, or the batch size of the training loader.

        Warn once if neither is known.
        """
        samples = samples_in(batch)
        if samples is not None:
            return samples
        if self.clock.stage == "train":
            # Several loaders, and loaders that make their own batches, have no batch size.
            size = getattr(trainer.train_dataloader, "batch_size", None)
            if size is not None:
                # The last batch may be smaller.
                return None if trainer.is_last_batch else int(size)
        if not self._warned_of_size:
            self._warned_of_size = True
            rank_zero_warn(
                f"MemoryProfiler cannot count the samples of a {self.clock.stage} batch: its"
                " tensors differ in their first dimension, or it has none. Such steps are left out"
                " of batch/size and throughput/samples_per_s."
            )
        return None


def next_start_reading(step: int) -> int:
    """Return the step after ``step`` at whose start the memory in use is read for the leak alert.

    The gap is a 48th of the steps so far. It is one step until step 96, so a leak is found early.
    Later it grows, so each doubling of the steps has 48 * ln(2) = 33 readings, and no work with a
    fixed period falls on all of them.
    """
    return step + max(1, step // 48)
