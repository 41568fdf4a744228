"""The memory test: the lines of a plan for few samples, compared with those in a file."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything

from lightning_batchmem._version import __version__
from lightning_batchmem.comparison import (
    Make,
    check_make,
    check_one_device,
    make_trainer,
    restored_process,
)
from lightning_batchmem.devices.base import MemoryStats
from lightning_batchmem.devices.host import HostMemory
from lightning_batchmem.find import SearchOnly
from lightning_batchmem.plan.json_fields import from_json, read_small
from lightning_batchmem.plan.options import names_our_arguments
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.policy import ReadingPolicy, SearchPolicy
from lightning_batchmem.plan.records import PHASES

HOST = "cpu"

# A search up to 8 samples runs 2 samples too.
_MAX_BATCH_SIZE = 8
# The samples that are read must not depend on the speed or the free memory of the machine.
_READING = ReadingPolicy(max_sample_sizes=64, scan_seconds=math.inf)
_TRAINER = {
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "limit_val_batches": 0,
}


@dataclass(frozen=True)
class PhaseMemory:
    """What tensors take in one phase of a step, as a line over samples.

    Args:
        fixed_bytes: bytes at 0 samples.
        sample_bytes: bytes that each sample adds.
    """

    fixed_bytes: int = 0
    sample_bytes: int = 0


@dataclass(frozen=True)
class MeasuredStep:
    """The memory of a training step, which a file has as JSON.

    Args:
        phases: the lines of its phases.
        versions: the versions that it was measured with.
        device: ``"cpu"``, or the name of a simulated GPU such as ``"simulated RTX-4090"``.
    """

    phases: Mapping[str, PhaseMemory]
    versions: Mapping[str, str]
    device: str = HOST


class _TensorsOnHost(HostMemory):
    """A host with endless memory, where a process holds nothing but tensors of the step.

    So the lines are the same in every process.
    """

    def current(self) -> MemoryStats:
        return MemoryStats(0)

    def available_bytes(self) -> int:
        return 2**62


class _SearchOnHost(SearchOnly):
    def device_memory(self, device: torch.device) -> _TensorsOnHost:
        return _TensorsOnHost()


@names_our_arguments
def assert_memory(
    make: Make,
    reference: str | Path,
    tolerance: float = 0.01,
    *,
    base: Mapping[str, Any] | None = None,
) -> None:
    """Compare the memory of a training step on the CPU with that in a file.

    A search on the CPU runs the step at 2 and 8 samples, after ``make`` was called with fixed
    random seeds, and fits the lines of a plan to what tensors take in each phase. They are the same
    to the byte in every process with the same versions. What a sample adds to forward, backward and
    optimizer step, and the fixed part of each, are compared one by one. A smaller result passes.

    Args:
        make: a function without arguments that returns a module, or ``(module, data)``; data is a
            datamodule, training loaders or ``None``.
        reference: the file that ``python -m lightning_batchmem check`` writes with
            ``--update``.
        tolerance: each part may grow by this share of the reference.
        base: arguments of the Trainer, such as ``precision``.

    Raises:
        AssertionError: with a line for each part that grew; if there is no file, with the command
            that writes it.
        ValueError: for an argument out of range, a damaged file, and a step that cannot be
            measured.

    Example:
        >>> from lightning_batchmem import assert_memory
        >>> assert_memory(make, "memory.json", tolerance=0.01)  # doctest: +SKIP
    """
    check_make(make)
    path = Path(reference)
    if not path.exists():
        function = getattr(make, "__qualname__", "")
        remark = ""
        # The command finds neither a lambda nor a function in another one.
        if not function.isidentifier():
            function = "MAKE"
            remark = ", where MAKE is the name of a function"
        options = "".join(f" --trainer.{name}={value}" for name, value in (base or {}).items())
        raise AssertionError(
            f"{path} does not exist. Write it with: python -m lightning_batchmem check"
            f" {make.__module__}:{function} --reference {path}{options} --update{remark}"
        )
    before = read_reference(path, tolerance, HOST)
    grown, smaller = compared(before, measure(make, base or {}), tolerance)
    if grown:
        raise AssertionError("\n".join(grown))
    if smaller:
        sys.stdout.write("\n".join(smaller) + "\n")


def read_reference(path: Path, tolerance: float, device: str) -> MeasuredStep:
    """Read the memory to compare with.

    Args:
        path: the file.
        tolerance: the share by which a part may grow.
        device: what the step is measured on now, as in :class:`MeasuredStep`.

    Raises:
        ValueError: for a tolerance out of range, a damaged file, and a file of another device.
    """
    is_number = isinstance(tolerance, Real) and not isinstance(tolerance, bool)
    if not is_number or not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be a share such as 0.01, got {tolerance!r}")
    if not path.exists():
        raise ValueError(f"{path} does not exist. Write it with --update.")
    try:
        reference = from_json(MeasuredStep, read_small(path))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} must be a reference of the memory test ({error}). Write it again with"
            " --update."
        ) from error
    if reference.device != device:
        raise ValueError(
            f"{path} was measured on another device ({reference.device}, and not {device})."
            " Name another file, or write this one again with --update."
        )
    return reference


def measure(make: Make, base: Mapping[str, Any]) -> MeasuredStep:
    """Make the module, and search on the host up to 8 samples.

    Args:
        make: a function without arguments that returns a module, or ``(module, data)``.
        base: arguments of the Trainer.

    Raises:
        ValueError: if the step cannot be measured in this way.
    """
    with restored_process(), _without_collections():
        trainer, model, data = prepared(make, base, "cpu")
        plan = finder_of(_SearchOnHost).search(trainer, model, None, data, None)
    return memory_of(plan, HOST)


def prepared(
    make: Make, base: Mapping[str, Any], accelerator: str
) -> tuple[Trainer, LightningModule, Any]:
    """The trainer, the module and the data of a memory test, made with fixed random seeds.

    Raises:
        ValueError: for arguments of the Trainer with which the step is not measured.
    """
    arguments = {**_TRAINER, "accelerator": accelerator, **base}
    if arguments["accelerator"] != accelerator:
        raise ValueError(
            f"accelerator must be {accelerator} for the memory test, got"
            f" {arguments['accelerator']!r}"
        )
    check_one_device("the memory test", arguments)
    seed_everything(0, verbose=False)
    return make_trainer(make, arguments)


def finder_of(kind: type[SearchOnly]) -> SearchOnly:
    """A finder that runs the same few steps in every process."""
    finder = kind(objective="memory", max_batch_size=_MAX_BATCH_SIZE, worst_case="longest")
    finder.policy = SearchPolicy(reading=_READING)
    return finder


def memory_of(plan: Plan, device: str) -> MeasuredStep:
    """The memory of a step in a plan of :func:`finder_of`.

    Raises:
        ValueError: if live bytes were not counted, or at one size only.
    """
    if not all(trial.memory.is_exact for trial in plan.trials):
        raise ValueError("the memory of a compiled step cannot be counted")
    if plan.memory is None:
        raise ValueError(f"the memory must be measured at two sizes, got one: {plan.reason}")
    phases = {
        phase: PhaseMemory(round(line.intercept), round(line.slope))
        for phase, line in plan.memory.lines.items()
    }
    versions = {"lightning_batchmem": __version__, "torch": torch.__version__}
    return MeasuredStep(phases, versions, device)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect garbage between the trials only, and not at a moment that depends on other work."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def compared(
    reference: MeasuredStep, measured: MeasuredStep, tolerance: float
) -> tuple[list[str], list[str]]:
    """A line for each part that has grown, and for each that is smaller.

    A line for each version that differs follows them.

    Args:
        reference: the memory before.
        measured: the memory now.
        tolerance: a part may differ by this share of the reference.
    """
    grown: list[str] = []
    smaller: list[str] = []
    for phase in PHASES:
        before = reference.phases.get(phase, PhaseMemory())
        now = measured.phases.get(phase, PhaseMemory())
        name = phase.replace("_", " ")
        for part, old, new in (
            (f"{name}, a sample", before.sample_bytes, now.sample_bytes),
            (f"{name}, fixed part", before.fixed_bytes, now.fixed_bytes),
        ):
            # The text of a float is the number that a person wrote, so a part that is exactly at
            # the limit has not grown.
            if abs(new - old) > Fraction(str(tolerance)) * abs(old):
                share = f" ({(new - old) / old:+.1%})" if old else ""
                lines = grown if new > old else smaller
                lines.append(f"{part}: {old:,} -> {new:,} bytes{share}")
    versions = [
        f"The reference was measured with {name} {reference.versions.get(name)}, and this with"
        f" {name} {version}."
        for name, version in measured.versions.items()
        if reference.versions.get(name) != version
    ]
    return grown + versions * bool(grown), smaller + versions * bool(smaller)
