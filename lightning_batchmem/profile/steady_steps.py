"""What is measured once in a run, in its steady state: breakdown, modules and operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.breakdown import (
    MemoryBreakdown,
    gradient_bytes,
    measure_breakdown,
)
from lightning_batchmem.devices.foreign_values import error_text, value_or_none
from lightning_batchmem.devices.optimizers import StepHooks
from lightning_batchmem.devices.peaks import PhasePeaks, RisingPeak
from lightning_batchmem.devices.tensors import has_own_tensors, tensors_in
from lightning_batchmem.profile.flop_step import FlopStep
from lightning_batchmem.profile.module_memory import ModuleStep
from lightning_batchmem.search.compiled import compiled_frames

_BREAKDOWN = "The memory breakdown"
_COMPILED = "torch.compile has compiled something in this process"


class Options(NamedTuple):
    """What a MemoryProfiler records besides memory and time."""

    items_fn: Callable[[Any], float] | None
    modules: bool
    flops: bool
    peak_flops: float | None
    # Whether the script may not know the profiler. Then only loggers of Lightning get metrics.
    is_optional: bool = False


class SteadyBreakdown:
    """The memory breakdown of a run, taken at the start of its first steady step."""

    def __init__(
        self,
        device_memory: DeviceMemory,
        device: torch.device,
        module: Module,
        optimizers: list[Optimizer],
    ) -> None:
        # The highest peak of the steps since the breakdown, and what steps had kept before it.
        self._peak_bytes = 0
        self._kept_bytes = 0
        self._gradients_bytes = 0
        # A tensor that has a gradient in most steps.
        self._trained: Tensor | None = None
        # Those of the step in which it is taken.
        self.phases: PhasePeaks | None = None
        self._device_memory = device_memory
        self._device = device
        self._module = module
        self._optimizers = optimizers
        self._at_start: MemoryBreakdown | None = None
        # Numbers in the parameters that got gradients then.
        self._num_trained = 0
        # The resident set includes memory that earlier steps freed, which belongs to the
        # activations. An allocator counts freed memory separately.
        self._other_bytes: int | None = None
        if device_memory.is_host:
            device_memory.release_cached()
            now_bytes = device_memory.current().allocated_bytes
            breakdown = measure_breakdown(module, optimizers, None, device, start_bytes=now_bytes)
            self._other_bytes = breakdown.other_bytes

    def has_changed(self) -> bool:
        """Return whether other parameters get gradients than when it was taken."""
        return self._num_trained != _num_trained(self._module)

    def forget(self) -> None:
        """Forget what was measured, to take the breakdown again."""
        self._at_start = None
        self._peak_bytes = self._gradients_bytes = 0

    @property
    def is_due(self) -> bool:
        """Whether to call :meth:`take` at the start of the next steady step."""
        return self._at_start is None

    def take(self, batch: object, number: int) -> None:
        """Measure the storages alive at the start of the step with this number."""
        start_bytes = self._device_memory.current().allocated_bytes
        breakdown = measure_breakdown(
            self._module, self._optimizers, batch, self._device, start_bytes=start_bytes
        )
        if self._other_bytes is not None:
            other_bytes = min(breakdown.other_bytes, self._other_bytes)
            breakdown = replace(breakdown, other_bytes=other_bytes)
        outside_bytes = self._device_memory.non_torch_bytes()
        self._at_start = replace(breakdown, step=number, outside_bytes=outside_bytes)
        self._num_trained = _num_trained(self._module)
        if self._optimizers:
            self.phases = PhasePeaks(RisingPeak(self._device_memory))
            self.phases.start("forward")

    def end_step(self) -> None:
        """Note the phase of the step's peak; the name is empty if it did not rise in the step."""
        if self.phases is None or self._at_start is None:
            return
        peaks = self.phases.stop().phase_peak_bytes
        phase = max(peaks, key=lambda name: peaks[name])
        self._at_start = replace(self._at_start, phase=phase if peaks[phase] else "")
        self.phases = None

    def add_gradients(self, trained: Tensor) -> None:
        """Measure the gradients after a step of an optimizer, which has changed this tensor."""
        self._trained = trained
        count_bytes = gradient_bytes(self._module, self._optimizers, self._device)
        self._gradients_bytes = max(self._gradients_bytes, count_bytes)

    def freed_bytes(self) -> int:
        """Return the bytes of gradients that are freed now, and are held in most steps.

        A validation frees them, and a manual step may. The host keeps freed memory.
        """
        if self._trained is None or self._trained.grad is not None or self._device_memory.is_host:
            return 0
        return self._gradients_bytes

    def add_peak(self, peak_bytes: int, kept_bytes: int) -> None:
        """Add the peak of a step, and what the steps before it have kept."""
        if self._at_start is not None and peak_bytes > self._peak_bytes:
            self._peak_bytes = peak_bytes
            self._kept_bytes = kept_bytes

    def at_peak(self, *, is_leak: bool) -> MemoryBreakdown | None:
        """Return the breakdown at the highest peak; None before the first steady step.

        Args:
            is_leak: whether the memory grew steadily. On the host other growth may be memory that
                was freed.
        """
        if self._at_start is None or not self._peak_bytes:
            return None
        # Equal steps may differ by this much.
        is_kept = self._kept_bytes > self._device_memory.granularity_bytes
        if self._device_memory.is_host:
            is_kept &= is_leak
        # At a peak in forward only the gradients of the step before exist.
        has_gradients = self._at_start.phase != "forward"
        return self._at_start.at_peak(
            self._peak_bytes,
            gradients_bytes=self._gradients_bytes if has_gradients else 0,
            kept_bytes=self._kept_bytes if is_kept else 0,
        )


def _num_trained(module: Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


class SteadySteps:
    """Measures the memory breakdown, and what is asked for besides, in a steady step each.

    All of these slow a step down. A training is steady after the first step of an optimizer, and an
    evaluation from its second step on.

    Args:
        trainer: the Trainer.
        module: its module.
        device_memory: the memory to measure; None if it cannot be measured.
        stage: the stage of the run. Only a training is divided among modules, and counted.
        options: what is asked for.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        device_memory: DeviceMemory | None,
        stage: str,
        options: Options,
    ) -> None:
        device = trainer.strategy.root_device
        self.modules: ModuleStep | None = None
        self.flops: FlopStep | None = None
        self._optimizers: list[Any] = []
        if stage == "train":
            self._optimizers = trainer.optimizers
            if options.modules:
                self.modules = ModuleStep(device)
            if options.flops:
                self.flops = FlopStep(device, str(trainer.precision), options.peak_flops)
        self._to_measure = [one for one in (self.flops, self.modules) if one is not None]
        self._measured: ModuleStep | FlopStep | None = None
        self._is_steady = False
        # Whether the breakdown or another measurement may be left.
        self._is_pending = True
        self._hooks = StepHooks()
        # Without a hook, the state is steady after the first step.
        self._is_noted = self._note_steps()
        self._may_have_changed = False
        self.breakdown: SteadyBreakdown | None = None
        if device_memory is not None:
            self.breakdown = value_or_none(
                _BREAKDOWN, SteadyBreakdown, device_memory, device, module, self._optimizers
            )

    def begin_epoch(self) -> None:
        """Compare at the next step what is trained: layers may have been unfrozen."""
        self._may_have_changed = True

    def begin(self, module: LightningModule, batch: object, number: int) -> SteadyBreakdown | None:
        """Begin what is measured in the step with this number.

        Returns:
            The breakdown if it is that.
        """
        if self._may_have_changed:
            self._may_have_changed = False
            self._compare()
        if not (self._is_pending and self._is_steady):
            return None
        breakdown = self.breakdown
        if breakdown is not None and breakdown.is_due:
            value_or_none(_BREAKDOWN, breakdown.take, batch, number)
            if breakdown.is_due:
                self.breakdown = None
            return self.breakdown
        self._hooks.remove()
        self._is_pending = bool(self._to_measure)
        if self._is_pending:
            self._begin_measurement(self._to_measure.pop(), module, batch)
        return None

    def end_work(self) -> None:
        """End the phases of a step before hooks follow."""
        if self.breakdown is not None:
            self.breakdown.end_step()

    def end(self, samples: int | None, peak_bytes: int | None, kept_bytes: int) -> bool:
        """Use what was measured in this step, and return whether anything was.

        Args:
            samples: the samples of its batch; None if they are unknown.
            peak_bytes: its peak; None if it is unknown.
            kept_bytes: what the steps before it have kept, as it was read last.
        """
        if self.breakdown is not None and peak_bytes is not None:
            self.breakdown.add_peak(peak_bytes, kept_bytes)
        if not self._is_noted:
            # An evaluation is in its steady state from the second step on too.
            self._is_steady = True
        measured = self._measured
        if measured is None:
            return False
        self._measured = None
        measured.close()
        if compiled_frames() > 0:
            measured.refuse(_COMPILED)
            return True
        _try(measured, measured.end, samples, peak_bytes)
        return True

    def drop(self) -> None:
        """Stop to measure a step that has not ended, and measure another one instead."""
        self.end_work()
        if self._measured is not None:
            self._measured.close()
            self._to_measure.append(self._measured)
            self._measured = None

    def close(self) -> None:
        """Remove all hooks."""
        self._hooks.remove()
        self.drop()

    def _compare(self) -> None:
        """Take the breakdown again if other layers are trained than before.

        Their gradients and states would count as activations.
        """
        breakdown = self.breakdown
        if breakdown is None or breakdown.is_due:
            return
        if value_or_none(_BREAKDOWN, breakdown.has_changed):
            self._is_steady = False
            self._is_pending = True
            self._is_noted = self._note_steps()
            breakdown.forget()
            if self.modules is not None and self.modules.peak is not None:
                self.modules.refuse("layers were unfrozen after the step that was measured")
                self._to_measure.append(self.modules)

    def _note_steps(self) -> bool:
        """Note the next step of an optimizer; returns whether it will be noted."""
        are_noted = [self._hooks.add(one, self._note_step) for one in self._optimizers]
        return any(are_noted)

    def _begin_measurement(
        self, measurement: ModuleStep | FlopStep, module: LightningModule, batch: object
    ) -> None:
        if compiled_frames() > 0:
            measurement.refuse(_COMPILED)
        elif has_own_tensors(module):
            measurement.refuse("some parameters are of a type of their own, as under FSDP2")
        else:
            # It is noted first, because an interrupt has to close it too.
            self._measured = measurement
            if not _try(measurement, measurement.begin, module, self._optimizers, batch):
                self._measured = None

    def _note_step(self, optimizer: Any, *_: object) -> None:
        """Begin the steady state after a step of an optimizer, and measure gradients in it."""
        trained = [
            tensor
            for tensor in tensors_in(optimizer.param_groups)
            if tensor.is_leaf and tensor.grad is not None
        ]
        if not trained:
            # Lightning calls this step too where training_step returned None.
            return
        self._is_steady = True
        breakdown = self.breakdown
        if breakdown is not None:
            value_or_none(_BREAKDOWN, breakdown.add_gradients, trained[0])
            if breakdown.phases is not None:
                breakdown.phases.enter("forward")


def _try(measured: ModuleStep | FlopStep, method: Callable[..., None], *arguments: object) -> bool:
    """Call a method; False after an error, as modules and optimizers of others may raise any."""
    try:
        method(*arguments)
    except Exception as error:  # noqa: BLE001
        measured.close()
        measured.refuse(f"the step could not be measured ({error_text(error)})")
        return False
    return True
