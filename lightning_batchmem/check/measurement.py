"""Measure the live bytes of a training step on the host, as lines over samples."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer

from lightning_batchmem._lightning.clean_start import CleanStart
from lightning_batchmem._lightning.packages import end_of_tuning
from lightning_batchmem._lightning.recorded_state import RecordedState
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.trainer_search import TrainerSearch
from lightning_batchmem.check.reference import PhaseMemory, StepMemory, current_versions
from lightning_batchmem.comparison import Make, check_one_device, make_trainer
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.module_memory import ModuleStorages, Moment, why_not_possible
from lightning_batchmem.find import SearchOnly
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import PHASES
from lightning_batchmem.search.compiled import each_size_static
from lightning_batchmem.search.readings import TrialReadings
from lightning_batchmem.search.session import Session, Steps
from lightning_batchmem.search.steps import ConsecutiveSteps, StepMeter

_SMALL_SIZE = 2
_LARGE_SIZE = 8
# The samples that are read must not depend on the speed or the free memory of the machine.
_POLICY = replace(SearchPolicy(), max_samples=1, max_sample_sizes=64, scan_seconds=math.inf)
_TRAINER = {
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "limit_val_batches": 0,
}


class Measurement(NamedTuple):
    """The memory of a training step.

    Attributes:
        memory: what a reference has.
        model_name: the name of the model's class.
    """

    memory: StepMemory
    model_name: str


def measure(make: Make, base: Mapping[str, Any]) -> Measurement:
    """Make the model, and measure its training step on the host at 2 and 8 samples.

    Args:
        make: a function without arguments that returns ``(model, data)``.
        base: arguments of the Trainer.

    Raises:
        ValueError: if the step cannot be measured in this way.
    """
    accelerator = base.get("accelerator", "cpu")
    if accelerator != "cpu":
        raise ValueError(f"accelerator must be cpu for the memory test, got {accelerator!r}")
    check_one_device("the memory test", base)
    with _seeded():
        trainer, model, data = make_trainer(make, {**_TRAINER, **base})
        probes = _Probes(worst_case="longest", min_steps_per_epoch=None)
        probes.policy = _POLICY
        probes.search(trainer, model, None, data, None)
    if probes.phases is None:
        raise ValueError(
            "the Trainer must be one that trains for the memory test, got fast_dev_run, or no"
            " batches or epochs"
        )
    return Measurement(StepMemory(probes.phases, current_versions()), type(model).__name__)


@contextmanager
def _seeded() -> Iterator[None]:
    """Set the random seeds of the host, and restore the random states at the end."""
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    # To seed CUDA too would change a state that is not restored.
    torch.default_generator.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


class _Probes(SearchOnly):
    """Runs the probes of the memory test in place of a search."""

    phases: dict[str, PhaseMemory] | None = None

    def _search_in(self, trainer: Trainer) -> TrainerSearch:
        search = super()._search_in(trainer)
        return _TrainerProbes(
            trainer, search.device_memory, search.options, search.policy, search.ranks, self
        )


@dataclass(eq=False)
class _TrainerProbes(TrainerSearch):
    """The probes in a Trainer whose loop has not started."""

    probes: _Probes

    def training(
        self,
        setting: BatchSizeSetting,
        recorded: RecordedState,
        given_plan: Plan | str | Path | None,
    ) -> Plan:
        """Measure the phases, and end ``fit`` without a plan."""
        clean_start = CleanStart(self.trainer, self.device_memory, recorded)
        with each_size_static(), clean_start.entered():
            session, _ = self._training_sessions(clean_start, setting)
            self.probes.phases = _measure_phases(session, self.device_memory)
        raise end_of_tuning(self.trainer)


def _measure_phases(session: Session, device: DeviceMemory) -> dict[str, PhaseMemory]:
    largest, reason = min(session.bounds())
    if largest < _LARGE_SIZE:
        raise ValueError(
            f"the data must have batches of {_LARGE_SIZE} samples for the memory test, got at most"
            f" {largest} ({reason})"
        )
    if session.training is None:
        raise ValueError("the memory test needs training steps")
    meter = StepMeter(session, device, _POLICY)
    small = _storages_at(_SMALL_SIZE, meter, session.training)
    large = _storages_at(_LARGE_SIZE, meter, session.training)
    phases = {phase: _fit(phase, small, large) for phase in PHASES}
    return {phase: memory for phase, memory in phases.items() if memory is not None}


def _storages_at(batch_size: int, meter: StepMeter, steps: Steps) -> ModuleStorages:
    """Run steps until the optimizers have their state, and then one that is measured."""
    session = meter.session
    session.restart(batch_size)
    session.phases.watch(session.optimizers, forward_follows=True)
    try:
        with ConsecutiveSteps(meter, steps, batch_size, TrialReadings(steps)) as consecutive:
            consecutive.warm_up(_POLICY.first_warmup_steps)
            reason = why_not_possible(session.module, is_compiled=meter.is_compiled)
            if reason:
                raise ValueError(f"the memory of a step cannot be counted: {reason}")
            storages = ModuleStorages(
                session.module, session.optimizers, None, session.device.type, session.phases
            )
            with _without_collections(), storages:
                consecutive.run(1)
    finally:
        session.phases.unwatch()
    return storages


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect garbage now, and not at a moment that depends on what ran before."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Line(NamedTuple):
    """Live bytes over samples, through one moment of the step at both sizes."""

    small: Moment
    large: Moment

    @property
    def sample_bytes(self) -> int:
        return _sample_bytes(self.small.live_bytes, self.large.live_bytes)

    @property
    def fixed_bytes(self) -> int:
        return _fixed_bytes(self.small.live_bytes, self.large.live_bytes)


def _fit(phase: str, small: ModuleStorages, large: ModuleStorages) -> PhaseMemory | None:
    """The fixed part of a phase and the part of a sample; ``None`` if it did not run.

    At each moment of a step the live bytes are a line over samples. The peak of a phase follows the
    steepest of these lines at large sizes, and the one with the largest fixed part at small sizes.
    """
    small_moments = [moment for moment in small.moments() if moment.phase == phase]
    large_moments = [moment for moment in large.moments() if moment.phase == phase]
    if not small_moments or not large_moments:
        return None
    lines = _lines(small_moments, large_moments)
    steepest = max(lines, key=lambda line: (line.sample_bytes, line.fixed_bytes))
    highest = max(lines, key=lambda line: (line.fixed_bytes, line.sample_bytes))
    sample_bytes_of_modules = {}
    fixed_bytes_of_modules = {}
    large_bytes = large.bytes_by_module(steepest.large)
    for name, small_bytes in small.bytes_by_module(steepest.small).items():
        if of_sample := _sample_bytes(small_bytes, large_bytes[name]):
            sample_bytes_of_modules[name] = of_sample
    large_bytes = large.bytes_by_module(highest.large)
    for name, small_bytes in small.bytes_by_module(highest.small).items():
        if fixed := _fixed_bytes(small_bytes, large_bytes[name]):
            fixed_bytes_of_modules[name] = fixed
    return PhaseMemory(
        fixed_bytes=highest.fixed_bytes,
        sample_bytes=steepest.sample_bytes,
        fixed_bytes_of_modules=fixed_bytes_of_modules,
        sample_bytes_of_modules=sample_bytes_of_modules,
    )


def _lines(small: list[Moment], large: list[Moment]) -> list[_Line]:
    """The lines through the moments after the same operators at both sizes."""
    lines: list[_Line] = []
    # The forward pass begins with a batch, for which each sample is copied. So moments belong
    # together if they are equally far from the end of the phase.
    for pair in zip(reversed(small), reversed(large), strict=False):
        line = _Line(*pair)
        if line.small.operator is not line.large.operator:
            break
        lines.append(line)
    peak = _Line(_highest(small), _highest(large))
    small_events = {line.small.num_events for line in lines}
    large_events = {line.large.num_events for line in lines}
    if peak.small.num_events in small_events and peak.large.num_events in large_events:
        return lines
    # The step runs other operators at the other size.
    return [peak]


def _highest(moments: list[Moment]) -> Moment:
    return max(moments, key=lambda moment: moment.live_bytes)


def _sample_bytes(small_bytes: int, large_bytes: int) -> int:
    return round((large_bytes - small_bytes) / (_LARGE_SIZE - _SMALL_SIZE))


def _fixed_bytes(small_bytes: int, large_bytes: int) -> int:
    grown_bytes = large_bytes - small_bytes
    return small_bytes - round(_SMALL_SIZE * grown_bytes / (_LARGE_SIZE - _SMALL_SIZE))
