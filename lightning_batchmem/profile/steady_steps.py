"""What is measured once in a run, in its steady state: breakdown, modules and operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer

from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.foreign_values import error_text, value_or_none
from lightning_batchmem.devices.optimizers import StepHooks
from lightning_batchmem.devices.tensors import has_own_tensors
from lightning_batchmem.profile.flop_step import FlopStep
from lightning_batchmem.profile.module_memory import ModuleStep
from lightning_batchmem.profile.steady_breakdown import SteadyBreakdown
from lightning_batchmem.profile.step_memory import PEAK
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

    def begin(self, module: LightningModule, batch: object, number: int) -> bool:
        """Begin what is measured in the step with this number.

        Returns:
            Whether that is the breakdown. Its time does not belong to the step.
        """
        if self._may_have_changed:
            self._may_have_changed = False
            self._compare()
        if not self._is_steady:
            return False
        breakdown = self.breakdown
        if breakdown is not None and breakdown.is_due:
            value_or_none(_BREAKDOWN, breakdown.take, batch, number)
            if breakdown.is_due:
                self.breakdown = None
            return True
        self._hooks.remove()
        if self._to_measure:
            self._begin_measurement(self._to_measure.pop(), module, batch)
        return False

    def end(self, samples: int | None, peak_bytes: int | None) -> bool:
        """Use what was measured in this step, and return whether anything was.

        Args:
            samples: the samples of its batch; None if they are unknown.
            peak_bytes: its peak; None if it is unknown.
        """
        self.enter("")
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
        try:
            measured.end(samples, peak_bytes)
        # As at its begin.
        except Exception as error:  # noqa: BLE001
            self._refuse(measured, error)
        return True

    def enter(self, phase: str) -> None:
        """Begin a phase of a training step; noted in the step of the breakdown."""
        breakdown = self.breakdown
        if breakdown is not None and breakdown.phases.now:
            value_or_none(PEAK, breakdown.phases.enter, phase)

    def drop(self) -> None:
        """Stop to measure a step that has not ended, and measure another one instead."""
        self.enter("")
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
        try:
            if compiled_frames() > 0:
                measurement.refuse(_COMPILED)
                return
            if has_own_tensors(module):
                measurement.refuse("some parameters are of a type of their own, as under FSDP2")
                return
            # It is noted first, because an interrupt has to close it too.
            self._measured = measurement
            measurement.begin(module, self._optimizers, batch)
        # Modules and optimizers of others may raise any error.
        except Exception as error:  # noqa: BLE001
            self._measured = None
            self._refuse(measurement, error)

    def _refuse(self, measurement: ModuleStep | FlopStep, error: Exception) -> None:
        measurement.close()
        measurement.refuse(f"the step could not be measured ({error_text(error)})")

    def _note_step(self, *_: object) -> None:
        """Begin the steady state after a step of an optimizer, and measure gradients in it."""
        self._is_steady = True
        if self.breakdown is not None:
            value_or_none(_BREAKDOWN, self.breakdown.add_gradients)
        self.enter("forward")
