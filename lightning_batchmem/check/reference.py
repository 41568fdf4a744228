"""The memory of a training step as a reference: small, sorted JSON with the versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from lightning_batchmem import __version__
from lightning_batchmem.plan.json_fields import from_json


@dataclass(frozen=True)
class PhaseMemory:
    """The live bytes of one phase of a step, as a line over samples.

    Args:
        fixed_bytes: bytes at 0 samples.
        sample_bytes: bytes that each sample adds.
        fixed_bytes_of_modules: the bytes at 0 samples that each module holds itself, without those
            of its submodules. The name of the root is empty, and modules with 0 bytes are left out.
        sample_bytes_of_modules: the same for the bytes of a sample.
    """

    fixed_bytes: int = 0
    sample_bytes: int = 0
    fixed_bytes_of_modules: Mapping[str, int] = field(default_factory=dict)
    sample_bytes_of_modules: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StepMemory:
    """The memory of a training step.

    Args:
        phases: the lines of its phases.
        versions: the versions that it was measured with.
    """

    phases: Mapping[str, PhaseMemory]
    versions: Mapping[str, str]

    def to_json(self) -> str:
        """Return the content of a reference file."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def current_versions() -> dict[str, str]:
    """The versions of torch and of this package."""
    return {"lightning_batchmem": __version__, "torch": torch.__version__}


def read_reference(path: Path) -> StepMemory:
    """Read a reference file.

    Raises:
        ValueError: if the file is no reference.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return from_json(StepMemory, text)
    # Without a field, the data class cannot be made.
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must be a reference of the memory test, got {text[:80]!r}. Write it again with"
            " --update."
        ) from error
