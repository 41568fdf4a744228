"""Measure the steps of one run for the MemoryProfiler.

A run is one ``fit``, ``validate``, ``test`` or ``predict``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_batchmem._lightning.trainer_state import callbacks_of
from lightning_batchmem.devices.accelerator import replays_graphs
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.peaks import PhasePeaks
from lightning_batchmem.devices.tensors import has_own_tensors, samples_in
from lightning_batchmem.plan.options import number_from
from lightning_batchmem.profile.flop_step import FlopStep
from lightning_batchmem.profile.module_memory import ModuleStep
from lightning_batchmem.profile.steady_breakdown import SteadyBreakdown
from lightning_batchmem.profile.step import Step
from lightning_batchmem.profile.step_clock import StepClock
from lightning_batchmem.search.compiled import compiled_frames

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
        self.phase_peaks = PhasePeaks(device_memory)
        self._device = device
        self._device_memory = device_memory
        self._items_fn = items_fn
        self._optimizers: list[Optimizer] = []
        # The clock of the run, and that of the stage that runs now.
        self.run_clock = StepClock(stage)
        self.validation_clock = StepClock("validate")
        self.clock = self.run_clock
        self._batch: object = None
        # The fields of the step that has ended, whose time is not known yet.
        self._ended: dict[str, Any] | None = None
        self._start_bytes: int | None = None
        self._has_graphs = False
        self._is_detailed = True
        self._next_detailed = 1
        self._is_steady = False
        self._warned_of_size = False
        # An OomGuard counts in this attribute.
        guards = (one for one in callbacks_of(trainer) if "oom_splits" in vars(one))
        self._guard: Any = next(guards, None)
        self._oom_splits = 0
        self._to_measure = measurements
        self._measured: ModuleStep | FlopStep | None = None
        if stage == "train":
            # A run that resumes goes on counting.
            self.run_clock.first_number = trainer.fit_loop.total_batch_idx + 1
            optimizers = trainer.optimizers
            self._optimizers = [one for one in optimizers if isinstance(one, Optimizer)]
            # Under manual optimization, another forward pass may follow an optimizer's step.
            forward_follows = not module.automatic_optimization
            self.phase_peaks.watch(self._optimizers, forward_follows=forward_follows)
        self.breakdown: SteadyBreakdown | None = None
        if device_memory is not None:
            self.breakdown = SteadyBreakdown(device_memory, device, module, self._optimizers)

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
        clock = self.clock
        clock.start(arrived)
        self._batch = batch
        self._start_bytes = None
        # The steady state begins with the first step after an optimizer step.
        if self.phase_peaks.stepped:
            self._is_steady = True
        self._has_graphs = replays_graphs(self._device)
        self._is_detailed = clock.stage != "train" or clock.steps >= self._next_detailed
        if clock.stage != "train":
            self.phase_peaks.start("evaluation")
        elif self._is_detailed:
            self._next_detailed = next_detailed(clock.steps)
            if self._device_memory is not None:
                self._start_bytes = self._device_memory.private_bytes()
            self.phase_peaks.start("forward")
        elif self._device_memory is not None:
            self._device_memory.reset_peak()
        if clock is self.run_clock and self._is_steady:
            self._begin_measurement(module, batch)

    def _begin_measurement(self, module: LightningModule, batch: object) -> None:
        """Begin what is measured once, in a steady step."""
        breakdown = self.breakdown
        if breakdown is not None and breakdown.is_due:
            begin = self.clock.now()
            breakdown.take(module, self._optimizers, batch)
            self.clock.leave_out(self.clock.now() - begin)
        elif self._to_measure:
            measurement = self._to_measure.pop()
            reason = why_not_measurable(module)
            if reason:
                measurement.refuse(reason)
            else:
                measurement.begin(module, self._optimizers, batch)
                self._measured = measurement

    def enter_phase(self, phase: str) -> None:
        """End a phase of the step and begin another one, where phases are measured."""
        if self._is_detailed:
            self.phase_peaks.enter(phase)

    def stop(self, trainer: Trainer, batch: object) -> int | None:
        """End the step, except its time, and return its peak bytes, 0 if they are unknown.

        The result is None if Lightning skipped the step, as for a batch of None.
        """
        clock = self.clock
        if not clock.in_step:
            return None
        clock.in_step = False
        is_training = clock.stage == "train"
        oom_splits = self._new_splits() if is_training else None
        if oom_splits:
            # It would count the failed attempt too.
            self._drop_measurement()
        samples = samples_in(batch)
        if samples is None:
            samples = self._loader_size(trainer)
        phases, peak_bytes, reserved_bytes = self._peaks()
        measured = self._measured
        if measured is not None:
            self._measured = None
            measured.close()
            if compiled_frames() > 0:
                measured.refuse(_COMPILED)
            else:
                measured.end(samples, peak_bytes)
        if self._has_graphs:
            # The allocator counts the memory of the graphs as free.
            peak_bytes = None
            phases = {}
        if "optimizer_step" in phases and not self.phase_peaks.stepped:
            # No optimizer stepped after backward, as in a gradient accumulation.
            after_bytes = phases.pop("optimizer_step")
            phases["backward"] = max(phases.get("backward", 0), after_bytes)
        if clock is self.run_clock:
            if not is_training:
                # An evaluation is in its steady state from the second step on.
                self._is_steady = True
            if self.breakdown is not None and peak_bytes is not None:
                self.breakdown.add_peak(peak_bytes)
        self._batch = None
        items = None
        if self._items_fn is not None:
            items = number_from("items_fn", self._items_fn(batch))
        self._ended = {
            "number": clock.first_number + clock.steps - 1,
            "stage": clock.stage,
            "batch_size": samples,
            "peak_bytes": peak_bytes,
            "peak_reserved_bytes": reserved_bytes,
            "phase_peak_bytes": phases,
            "items": items,
            "start_bytes": self._start_bytes,
            "is_slowed": measured is not None,
            "oom_splits": oom_splits,
            "has_graphs": self._has_graphs,
        }
        return peak_bytes or 0

    def complete(self) -> Step | None:
        """Return the step that has ended, with its time; None without such a step."""
        if self._ended is None:
            return None
        self._ended["seconds"], self._ended["wait_seconds"] = self.clock.seconds()
        step = Step(**self._ended)
        self._ended = None
        return step

    def explain_out_of_memory(self, trainer: Trainer) -> str:
        """The note of an error: the step that ran out of memory."""
        where = "between two steps"
        if self.clock.in_step:
            number = self.clock.first_number + self.clock.steps - 1
            where = f"in {self.clock.stage} step {number}"
            if (samples := samples_in(self._batch)) is not None:
                where += f" with a batch of {samples:,} samples"
        if trainer.world_size > 1:
            where += f" on rank {trainer.global_rank}"
        return f"memory ran out {where}."

    def close(self) -> None:
        """Remove all hooks."""
        self.phase_peaks.unwatch()
        self._drop_measurement()

    def _drop_measurement(self) -> None:
        """Stop to measure a step that has not ended, and measure another one instead."""
        if self._measured is not None:
            self._measured.close()
            self._to_measure.append(self._measured)
            self._measured = None

    def _peaks(self) -> tuple[dict[str, int], int | None, int | None]:
        """Return the peaks of the phases, where they are measured, of the step, and reserved."""
        if self._is_detailed:
            phases, reserved_bytes = self.phase_peaks.stop()
            return phases, max(phases.values(), default=None), reserved_bytes
        if self._device_memory is None:
            return {}, None, None
        stats = self._device_memory.peak()
        return {}, stats.allocated_bytes, stats.reserved_bytes

    def _new_splits(self) -> int | None:
        """Return how often an OomGuard has split a batch since the last step; None without one."""
        # The guard counts nothing where it does nothing.
        total_splits = None if self._guard is None else self._guard.oom_splits
        if total_splits is None:
            return None
        splits = total_splits - self._oom_splits
        self._oom_splits = total_splits
        return int(splits)

    def _loader_size(self, trainer: Trainer) -> int | None:
        """Return the batch size of the training loader; warn once if it is not known either."""
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


def why_not_measurable(module: LightningModule) -> str:
    """Return why a step can be divided neither among modules nor operators; empty if it can."""
    if compiled_frames() > 0:
        return _COMPILED
    if has_own_tensors(module):
        return "some parameters are of a type of their own, as under FSDP2"
    return ""


def next_detailed(step: int) -> int:
    """Return the step after ``step`` whose phases and whose memory at the start are read.

    The gap is a 48th of the steps so far. It is one step until step 96, so a leak is found early.
    Later it grows, so each doubling of the steps has 48 * ln(2) = 33 readings, and no work with a
    fixed period falls on all of them.
    """
    return step + max(1, step // 48)
