"""Measure the live bytes of a training step on the host, as lines over samples."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_batchmem.check.module_probe import storages_of_steps
from lightning_batchmem.check.reference import PhaseMemory, StepMemory, current_versions
from lightning_batchmem.comparison import Make, check_one_device, make_trainer
from lightning_batchmem.devices.module_memory import ModuleStorages
from lightning_batchmem.devices.moment_lines import moment_lines
from lightning_batchmem.plan.policy import ReadingPolicy, SearchPolicy
from lightning_batchmem.plan.records import PHASES

_SIZES = (2, 8)
# The samples that are read must not depend on the speed or the free memory of the machine.
_READING = ReadingPolicy(max_samples=1, max_sample_sizes=64, scan_seconds=math.inf)
_POLICY = SearchPolicy(reading=_READING)
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
    if base.get("compile"):
        raise ValueError(
            "the memory of a compiled step cannot be counted, so compile must be False for the"
            " memory test"
        )
    with _seeded():
        trainer, model, data = make_trainer(make, {**_TRAINER, **base})
        small, large = storages_of_steps(trainer, model, data, _SIZES, _POLICY)
    phases = {phase: _fit(phase, small, large) for phase in PHASES}
    memory = StepMemory(
        {phase: memory for phase, memory in phases.items() if memory is not None},
        current_versions(),
    )
    return Measurement(memory, type(model).__name__)


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


def _fit(phase: str, small: ModuleStorages, large: ModuleStorages) -> PhaseMemory | None:
    """The fixed part of a phase and the part of a sample; ``None`` if it did not run.

    The peak of a phase follows the steepest line of its moments at large sizes, and the one with
    the largest fixed part at small sizes.
    """
    lines = moment_lines(phase, small, large, _SIZES)
    if not lines:
        return None
    steepest = max(lines, key=lambda line: (line.sample_bytes, line.fixed_bytes))
    highest = max(lines, key=lambda line: (line.fixed_bytes, line.sample_bytes))
    sample_bytes_of_modules = {}
    fixed_bytes_of_modules = {}
    large_bytes = large.bytes_by_module(steepest.large)
    for name, small_bytes in small.bytes_by_module(steepest.small).items():
        if of_sample := steepest.sample_bytes_of(small_bytes, large_bytes[name]):
            sample_bytes_of_modules[name] = of_sample
    large_bytes = large.bytes_by_module(highest.large)
    for name, small_bytes in small.bytes_by_module(highest.small).items():
        if fixed := highest.fixed_bytes_of(small_bytes, large_bytes[name]):
            fixed_bytes_of_modules[name] = fixed
    return PhaseMemory(
        fixed_bytes=highest.fixed_bytes,
        sample_bytes=steepest.sample_bytes,
        fixed_bytes_of_modules=fixed_bytes_of_modules,
        sample_bytes_of_modules=sample_bytes_of_modules,
    )
