"""The memory test in a test suite."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_batchmem.check.growth import Comparison, compared
from lightning_batchmem.check.measurement import measure
from lightning_batchmem.check.reference import read_reference
from lightning_batchmem.comparison import Make

SMALLER = "The reference can be lowered: --update writes it again."


def assert_memory(
    make: Make,
    reference: str | Path,
    tolerance: float = 0.01,
    *,
    base: Mapping[str, Any] | None = None,
) -> None:
    """Compare the memory of a training step on the host with a reference.

    The step runs at 2 and 8 samples on the CPU, after ``make`` was called with fixed random seeds.
    Live bytes are compared, so the result is the same to the byte in every process with the same
    versions. What a sample adds to forward, backward and optimizer step, and the fixed part, are
    compared one by one. A smaller result passes.

    Args:
        make: a function without arguments that returns ``(model, data)``; data is a datamodule,
            training loaders or ``None``.
        reference: the file that ``python -m lightning_batchmem check`` writes with ``--update``.
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
    check_tolerance(tolerance)
    path = Path(reference)
    if not path.exists():
        options = "".join(f" --trainer {name}={value}" for name, value in (base or {}).items())
        raise AssertionError(
            f"{path} does not exist. Write it with: python -m lightning_batchmem check"
            f" {_target(make)} --reference {path}{options} --update"
        )
    comparison = compare_with_reference(make, path, tolerance, base or {})
    if comparison.grown:
        raise AssertionError("\n".join([*comparison.grown, *comparison.notes]))
    if comparison.smaller:
        sys.stdout.write("\n".join([*comparison.smaller, *comparison.notes, SMALLER]) + "\n")


def compare_with_reference(
    make: Make, path: Path, tolerance: float, base: Mapping[str, Any]
) -> Comparison:
    """Measure the memory of a step, and compare it with that of a file.

    Raises:
        ValueError: for a damaged file, and a step that cannot be measured.
    """
    reference = read_reference(path)
    measured = measure(make, base)
    return compared(reference, measured.memory, tolerance, measured.model_name)


def _target(make: Make) -> str:
    """The name of a function for the command line; a placeholder if it has none there."""
    name = getattr(make, "__qualname__", "<none>")
    return f"{make.__module__}:{name}" if name.isidentifier() else "MODULE:MAKE"


def check_tolerance(tolerance: float) -> None:
    """Raise a ValueError unless this is a share of the reference."""
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be a share such as 0.01, got {tolerance!r}")
