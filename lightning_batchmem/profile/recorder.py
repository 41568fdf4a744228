"""Measure the steps of one run for the MemoryProfiler.

A run is one ``fit``, ``validate``, ``test`` or ``predict``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.trainer_state import callbacks_of
from lightning_batchmem.devices.accelerator import replays_graphs
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.foreign_values import attributes_of, error_text, value_or_none
from lightning_batchmem.devices.optimizers import StepHooks
from lightning_batchmem.devices.tensors import has_own_tensors, samples_in
from lightning_batchmem.plan.options import count_from
from lightning_batchmem.plan.records import counted
from lightning_batchmem.profile.flop_step import FlopStep
from lightning_batchmem.profile.module_memory import ModuleStep
from lightning_batchmem.profile.steady_breakdown import SteadyBreakdown
from lightning_batchmem.profile.step import Step
from lightning_batchmem.profile.step_clock import StepClock
from lightning_batchmem.search.compiled import compiled_frames

_BREAKDOWN = "The memory breakdown"
_PEAK = "The memory of a step"
_COMPILED = "torch.compile has compiled something in this process"


class StepRecorder:
    """Measures the steps of one run. A training may contain evaluations.

    Args:
        trainer: the Trainer.
        module: its module.
        device_memory: the memory to measure; None if it cannot be measured.
        stage: the stage of the run.
        items_fn: counts items in a batch.
        measurements: each of these measures a steady step of its own, since all slow a step down.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        device_memory: DeviceMemory | None,
        stage: str,
        *,
        items_fn: Callable[[Any], float] | None,
        measurements: list[ModuleStep | FlopStep],
    ) -> None:
        device = trainer.strategy.root_device
        self._device = device
        self._device_memory = device_memory
        self._items_fn = items_fn
        self._optimizers: list[Any] = []
        # The clock of the run, and that of the stage that runs now.
        self.run_clock = StepClock(stage)
        self.validation_clock = StepClock("validate")
        self.clock = self.run_clock
        self._batch: object = None
        # The step that has ended, whose time is not known yet.
        self._ended: Callable[..., Step] | None = None
        self._next_reading = 1
        self._has_graphs = False
        self._is_steady = False
        self._warned_of_size = False
        self._warned_of_items = False
        # An OomGuard counts in this attribute.
        self._guards: list[Any] = [
            one for one in callbacks_of(trainer) if "oom_splits" in attributes_of(one)
        ]
        self._splits_before = 0
        self._to_measure = measurements
        self._measured: ModuleStep | FlopStep | None = None
        if stage == "train":
            # A run that resumes goes on counting.
            self.run_clock.first_number = trainer.fit_loop.total_batch_idx + 1
            self._optimizers = trainer.optimizers
        self._hooks = StepHooks()
        are_noted = [self._hooks.add(one, self._note_step) for one in self._optimizers]
        # Without a hook, the state is steady after the first step.
        self._is_noted = any(are_noted)
        self.breakdown: SteadyBreakdown | None = None
        if device_memory is not None:
            self.breakdown = value_or_none(
                _BREAKDOWN, SteadyBreakdown, device_memory, device, module, self._optimizers
            )

    def skip(self) -> None:
        """Forget a step that has begun without an end, and the wait for its batch.

        Lightning ends an epoch early where ``on_train_batch_start`` returns -1.
        """
        self._drop_measurement()
        self.clock.forget()

    def begin_validation(self) -> None:
        """Begin a validation in the training."""
        self.clock = self.validation_clock
        self.clock.steps = 0

    def end_validation(self) -> None:
        self.clock = self.run_clock

    def start(self, module: LightningModule, batch: object, arrived: float) -> None:
        """Begin a step, whose batch has arrived at this time."""
        self.clock.start(arrived)
        self._batch = batch
        self._has_graphs = replays_graphs(self._device)
        if self._device_memory is not None and not value_or_none(
            _PEAK, self._has_reset, self._device_memory
        ):
            self._device_memory = None
        if self._is_steady and self.clock is self.run_clock:
            self._begin_measurement(module, batch)

    def _begin_measurement(self, module: LightningModule, batch: object) -> None:
        """Begin what is measured once, in a steady step."""
        self._hooks.remove()
        breakdown = self.breakdown
        if breakdown is not None and breakdown.is_due:
            begin = self.clock.now()
            value_or_none(_BREAKDOWN, breakdown.take, module, self._optimizers, batch)
            if breakdown.is_due:
                self.breakdown = None
            self.clock.leave_out(self.clock.now() - begin)
        elif self._to_measure:
            measurement = self._to_measure.pop()
            self._splits_before = self._splits()
            self._measured = measurement
            try:
                if reason := why_not_measurable(module):
                    measurement.refuse(reason)
                    self._measured = None
                else:
                    measurement.begin(module, self._optimizers, batch)
            # Modules and optimizers of others may raise any error.
            except Exception as error:  # noqa: BLE001
                self._refuse(measurement, error)

    def _end_measurement(
        self, measured: ModuleStep | FlopStep, samples: int | None, peak_bytes: int | None
    ) -> None:
        if self._splits() != self._splits_before:
            # It includes the attempt that failed.
            self._drop_measurement()
            return
        self._measured = None
        measured.close()
        if compiled_frames() > 0:
            measured.refuse(_COMPILED)
            return
        try:
            measured.end(samples, peak_bytes)
        # As at its begin.
        except Exception as error:  # noqa: BLE001
            self._refuse(measured, error)

    def _refuse(self, measurement: ModuleStep | FlopStep, error: Exception) -> None:
        measurement.close()
        measurement.refuse(f"the step could not be measured ({error_text(error)})")
        self._measured = None

    def _splits(self) -> int:
        """Return how many batches an OomGuard has run in parts."""
        counts = [attributes_of(guard).get("oom_splits") for guard in self._guards]
        return sum(count for count in counts if isinstance(count, int))

    def stop(self, trainer: Trainer, batch: object) -> int | None:
        """End the step, except its time, and return its peak bytes, 0 if they are unknown.

        The result is None if Lightning skipped the step, as for a batch of None.
        """
        clock = self.clock
        if not clock.in_step:
            return None
        clock.in_step = False
        samples = samples_in(batch)
        if samples is None:
            samples = self._loader_size(trainer)
        peak_bytes = None
        reserved_bytes = None
        end_bytes = None
        if self._device_memory is not None:
            if (peak := value_or_none(_PEAK, self._device_memory.peak)) is not None:
                peak_bytes, reserved_bytes, _ = peak
            if clock.stage == "train" and clock.steps >= self._next_reading:
                self._next_reading = next_reading(clock.steps)
                end_bytes = value_or_none(_PEAK, self._device_memory.private_bytes)
        is_slowed = self._measured is not None
        if self._measured is not None:
            self._end_measurement(self._measured, samples, peak_bytes)
        if self._has_graphs:
            # The allocator counts the memory of the graphs as free.
            peak_bytes = None
        if clock is self.run_clock:
            if not self._is_noted:
                # An evaluation is in its steady state from the second step on too.
                self._is_steady = True
            if self.breakdown is not None and peak_bytes is not None:
                self.breakdown.add_peak(peak_bytes)
        self._batch = None
        items = None if self._items_fn is None else self._count_items(self._items_fn(batch))
        self._ended = partial(
            Step,
            number=clock.number,
            stage=clock.stage,
            batch_size=samples,
            peak_bytes=peak_bytes,
            peak_reserved_bytes=reserved_bytes,
            end_bytes=end_bytes,
            items=items,
            is_slowed=is_slowed,
            has_graphs=self._has_graphs,
        )
        return peak_bytes or 0

    def complete(self) -> Step | None:
        """Return the step that has ended, with its time; None without such a step."""
        if self._ended is None:
            return None
        seconds, wait_seconds = self.clock.seconds()
        step = self._ended(seconds=seconds, wait_seconds=wait_seconds)
        self._ended = None
        return step

    def explain_out_of_memory(self, trainer: Trainer) -> str:
        """The note of an error: the step that ran out of memory."""
        where = "between two steps"
        if self.clock.in_step:
            where = f"in {self.clock.stage} step {self.clock.number}"
            if (samples := samples_in(self._batch)) is not None:
                where += f" with a batch of {counted(samples, 'sample')}"
        if trainer.world_size > 1:
            where += f" on rank {trainer.global_rank}"
        return f"memory ran out {where}."

    @staticmethod
    def _has_reset(device_memory: DeviceMemory) -> bool:
        device_memory.reset_peak()
        return True

    def close(self) -> None:
        """Remove all hooks."""
        self._hooks.remove()
        self._drop_measurement()

    def _note_step(self, *_: object) -> None:
        """Begin the steady state after a step of an optimizer."""
        self._is_steady = True

    def _drop_measurement(self) -> None:
        """Stop to measure a step that has not ended, and measure another one instead."""
        if self._measured is not None:
            self._measured.close()
            self._to_measure.append(self._measured)
            self._measured = None

    def _count_items(self, returned: object) -> float | None:
        """Return the items of a batch; warn once if ``items_fn`` has returned something else."""
        items = count_from(returned)
        if items is None and not self._warned_of_items:
            self._warned_of_items = True
            rank_zero_warn(
                "items_fn must return a finite number that is not negative, got a value of type"
                f" {type(returned).__name__}. Such steps are left out of throughput/items_per_s."
            )
        return items

    def _loader_size(self, trainer: Trainer) -> int | None:
        """Return the batch size of the training loader; warn once if it is not known either."""
        if self.clock.stage == "train":
            size = value_or_none("The batch size of the training loader", _loader_size, trainer)
            if size is not None:
                # The last batch may be smaller.
                return None if trainer.is_last_batch else size
        if not self._warned_of_size:
            self._warned_of_size = True
            rank_zero_warn(
                f"MemoryProfiler cannot count the samples of a {self.clock.stage} batch: its"
                " tensors differ in their first dimension, or it has none. Such steps are left out"
                " of batch/size and throughput/samples_per_s."
            )
        return None


def _loader_size(trainer: Trainer) -> int | None:
    # Several loaders, and loaders that make their own batches, have no batch size.
    size = getattr(trainer.train_dataloader, "batch_size", None)
    return None if size is None else int(size)


def why_not_measurable(module: LightningModule) -> str:
    """Return why a step can be divided neither among modules nor operators; empty if it can."""
    if compiled_frames() > 0:
        return _COMPILED
    if has_own_tensors(module):
        return "some parameters are of a type of their own, as under FSDP2"
    return ""


def next_reading(step: int) -> int:
    """Return the step after ``step`` at whose end the memory in use is read.

    The gap is a 48th of the steps so far. It is one step until step 96, so a leak is found early.
    Later it grows, so each doubling of the steps has 48 * ln(2) = 33 readings, and no work with a
    fixed period falls on all of them.
    """
    return step + max(1, step // 48)
