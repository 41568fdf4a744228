"""Measure the steps of one run for the MemoryProfiler.

A run is one ``fit``, ``validate``, ``test`` or ``predict``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.profiled_stage import BatchSamples, PlacedBatch
from lightning_batchmem._lightning.trainer_state import callbacks_of, has_hook_of_user
from lightning_batchmem.devices.accelerator import replays_graphs
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.devices.out_of_memory import phase_of
from lightning_batchmem.devices.peaks import PhasePeaks
from lightning_batchmem.plan.options import count_from
from lightning_batchmem.plan.records import counted
from lightning_batchmem.profile.steady_steps import Options, SteadySteps
from lightning_batchmem.profile.step import Step
from lightning_batchmem.profile.step_memory import StepMemory
from lightning_batchmem.search.compiled import compiled_frames

# Other hooks of a callback are followed by a reading, or are a part of a step.
_HOOKS = ("on_train_batch", "on_validation_batch", "on_test_batch", "on_predict_batch")

_NO_BATCH: PlacedBatch = (None, 0, 0)


class StepClock:
    """Wall time of each step, from the request of its batch to the next request.

    Lightning waits for the device after a step, to show and to log its metrics. This is a part of
    the step, and not a wait for data.

    Args:
        stage: the stage of the steps.
        first_number: the number of the first step.
    """

    # A test may set another clock.
    now = staticmethod(time.perf_counter)

    def __init__(self, stage: str, first_number: int = 0) -> None:
        self.stage = stage
        # The steps that have begun.
        self.steps = 0
        # The number of the last one.
        self.number = first_number - 1
        self.in_step = False
        self._begin = 0.0
        # The end of the time, which is after the end of the step; None before it.
        self._end: float | None = 0.0
        self._requested: float | None = None
        self._wait_seconds: float | None = None

    def request(self) -> None:
        """Note the request of a batch, which ends the time of the step before."""
        # A training step that fetches its batches itself does so within the step.
        if not self.in_step:
            self._requested = self.now()
            self.end()

    def stop(self) -> None:
        """Note the end of the step, whose time goes on until the next request."""
        self.in_step = False

    def restart(self) -> None:
        """Count the steps from the first one again."""
        self.number -= self.steps
        self.steps = 0

    def forget(self) -> None:
        """Forget a step that has begun without an end, and the request for its batch."""
        if self.in_step:
            self.steps -= 1
            self.number -= 1
        self.in_step = False
        self._requested = None

    def end(self) -> None:
        """End the time of the step, unless it has ended."""
        if self._end is None:
            self._end = self.now()

    def seconds(self) -> tuple[float, float | None]:
        """Return the seconds of the last step, and those before its batch arrived."""
        end = self.now() if self._end is None else self._end
        return end - self._begin, self._wait_seconds

    def start(self, arrived: float) -> None:
        """Begin a step, whose batch has arrived at this time."""
        self.steps += 1
        self.number += 1
        self.in_step = True
        self._begin = arrived if self._requested is None else self._requested
        self._wait_seconds = None if self._requested is None else arrived - self._requested
        self._requested = None
        self._end = None

    def leave_out(self, seconds: float) -> None:
        """Leave out a part of the step that has begun."""
        self._begin += seconds


class BatchCounter:
    """Counts the samples and the items of batches; warns once where these are not known.

    Args:
        trainer: the Trainer, in the stage of the run.
        items_fn: counts items in a batch; None to count none.
    """

    def __init__(self, trainer: Trainer, items_fn: Callable[[Any], float] | None) -> None:
        self._items_fn = items_fn
        # By stage. A training may contain validations.
        self._samples = defaultdict[str, BatchSamples](lambda: BatchSamples(trainer))
        self._warned_of_size = False
        self._warned_of_items = False

    def items(self, batch: object) -> float | None:
        if self._items_fn is None:
            return None
        returned = self._items_fn(batch)
        items = count_from(returned)
        if items is None and not self._warned_of_items:
            self._warned_of_items = True
            rank_zero_warn(
                "items_fn must return a finite number that is not negative, got a value of type"
                f" {type(returned).__name__}. Such steps are left out of speed/items_per_s."
            )
        return items

    def samples(self, placed: PlacedBatch, stage: str) -> int | None:
        """Count the samples of a batch of the stage that runs."""
        batches = self._samples[stage]
        samples = batches.in_batch(*placed)
        # The last batch of a stream is not worth a warning.
        if samples is None and not (batches.loaders_have_sizes or self._warned_of_size):
            self._warned_of_size = True
            rank_zero_warn(
                "MemoryProfiler cannot count the samples of a batch: its loader has no batch_size,"
                " and its tensors differ in their first dimension or have none. Such steps are left"
                " out of speed/batch_size and speed/samples_per_s."
            )
        return samples


class StepRecorder:
    """Measures the steps of one run. A training may contain validations.

    Args:
        trainer: the Trainer.
        module: its module.
        device_memory: the memory to measure; None if it cannot be measured.
        stage: the stage of the run.
        options: what is measured besides.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        device_memory: DeviceMemory | None,
        stage: str,
        options: Options,
    ) -> None:
        # A run that resumes goes on counting.
        first_number = trainer.fit_loop.total_batch_idx + 1 if stage == "train" else 0
        self.run_clock = StepClock(stage, first_number)
        self.validation_clock = StepClock("validate")
        # The clock of the stage that runs now.
        self.clock = self.run_clock
        self.steady = SteadySteps(trainer, module, device_memory, stage, options)
        self._device = trainer.strategy.root_device
        # A module's hooks at the start of a batch follow those of all callbacks, within the step.
        has_hooks = has_hook_of_user(module, *(f"{hook}_end" for hook in _HOOKS)) or any(
            has_hook_of_user(callback, *_HOOKS) for callback in callbacks_of(trainer)
        )
        self.memory = StepMemory(device_memory, self._device, reads_each=has_hooks)
        self._counter = BatchCounter(trainer, options.items_fn)
        self._batch = _NO_BATCH
        self._has_graphs = False
        self._compiled = compiled_frames()
        # What was read before the step that runs: the peak since the last one, and what is held.
        self._before: tuple[int | None, int | None] = (None, None)
        # Of a step that has ended, until its time is known: samples, items, both peaks, and whether
        # a measurement slowed it. None without such a step.
        self._ended: tuple[int | None, float | None, int | None, int | None, bool] | None = None

    def skip(self) -> None:
        """Forget a step that has begun without an end, and the wait for its batch.

        Lightning ends an epoch early where ``on_train_batch_start`` returns -1.
        """
        self.steady.drop()
        self.clock.forget()

    def begin_validation(self) -> None:
        """Begin a validation in the training."""
        self.clock = self.validation_clock
        self.clock.restart()

    def end_validation(self) -> None:
        self.clock = self.run_clock

    def leave(self) -> None:
        """End the time of a step: a checkpoint, an evaluation or the end of an epoch follows."""
        self.run_clock.end()
        if not self.clock.in_step:
            self.memory.leave()

    def start(
        self, module: LightningModule, batch: PlacedBatch, arrived: float
    ) -> PhasePeaks | None:
        """Begin a step, whose batch has arrived at this time.

        Returns:
            The phases of the step if they are measured.
        """
        clock = self.clock
        clock.start(arrived)
        self._batch = batch
        # Only a program of torch.compile has graphs, and this runs in every step.
        self._has_graphs = bool(self._compiled) and replays_graphs(self._device)
        is_of_run = clock is self.run_clock
        data = batch[0]
        self._before = self.memory.start(data, clock.steps if is_of_run else 0)
        breakdown = self.steady.begin(module, data, clock.number) if is_of_run else None
        if breakdown is None:
            return None
        self.memory.begin_growth(data, breakdown.freed_bytes)
        # This time does not belong to the step.
        clock.leave_out(clock.now() - arrived)
        return breakdown.phases

    def end_work(self) -> None:
        """Note the peak of a step before hooks follow, whose memory is none of its own."""
        if self.clock.in_step:
            self.steady.end_work()
            self.memory.note_peak()

    def stop(self, batch: PlacedBatch) -> bool:
        """End the step, except its time; False if Lightning skipped it, as for a batch of None."""
        clock = self.clock
        if not clock.in_step:
            return False
        clock.stop()
        self._batch = _NO_BATCH
        number = clock.number
        is_of_run = clock is self.run_clock
        samples = self._counter.samples(batch, clock.stage)
        peak_bytes, reserved_bytes = self.memory.end(number, is_of_run=is_of_run)
        if self._has_graphs:
            # The allocator counts the memory of the graphs as free.
            peak_bytes = None
        if peak_bytes is not None and peak_bytes > self.memory.peaks.epoch_bytes:
            self.memory.peaks.add(peak_bytes, f"in {clock.stage} step {number}")
        growth = self.memory.growth
        kept_bytes = 0 if growth is None else growth.grown_bytes
        is_slowed = is_of_run and self.steady.end(samples, peak_bytes, kept_bytes)
        items = self._counter.items(batch[0])
        self._ended = (samples, items, peak_bytes, reserved_bytes, is_slowed)
        return True

    def complete(self) -> Step | None:
        """Return the step that has ended, with its time; None without such a step."""
        ended = self._ended
        if ended is None:
            return None
        self._ended = None
        clock = self.clock
        seconds, wait_seconds = clock.seconds()
        samples, items, peak_bytes, reserved_bytes, is_slowed = ended
        # What is compiled takes seconds, and what is new to the device or the loader may too.
        compiled = compiled_frames()
        is_first = clock.steps == 1 or compiled != self._compiled
        self._compiled = compiled
        before_bytes, start_bytes = self._before
        return Step(
            number=clock.number,
            stage=clock.stage,
            batch_size=samples,
            seconds=seconds,
            wait_seconds=wait_seconds,
            peak_bytes=peak_bytes,
            peak_reserved_bytes=reserved_bytes,
            start_bytes=start_bytes,
            items=items,
            is_slowed=is_slowed,
            is_first=is_first,
            before_bytes=before_bytes,
        )

    def close(self) -> None:
        """Read the memory after the last step, and remove all hooks."""
        self.steady.close()
        if not self.clock.in_step:
            self.memory.read()

    def explain_out_of_memory(self, error: BaseException, trainer: Trainer) -> str:
        """Return the note of an error: the step that ran out of memory."""
        clock = self.clock
        where = "before the first step"
        if clock.in_step:
            where = f"in {clock.stage} step {clock.number}"
            if samples := self._counter.samples(self._batch, clock.stage):
                where += f" with a batch of {counted(samples, 'sample')}"
            phase = value_or_none("An error", phase_of, error)
            if phase and clock.stage == "train":
                where += f", in {phase}"
        # Before the first step of a validation, the last one is of the training.
        elif (last := clock if clock.steps else self.run_clock).steps:
            where = (
                f"after {last.stage} step {last.number} and before the next one, in a hook or a"
                " callback"
            )
        if trainer.world_size > 1:
            where += f" on rank {trainer.global_rank}"
        growth = self.memory.growth
        return f"memory ran out {where}.{growth.text if growth and self.memory.is_exact else ''}"
