"""What grew between a reference and a measurement, one part at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from lightning_batchmem.check.reference import PhaseMemory, StepMemory
from lightning_batchmem.plan.records import MIB, PHASES

# Smaller parts are shown in bytes.
_LEAST_IN_MIB = 0.1 * MIB


@dataclass(frozen=True)
class Comparison:
    """The parts of the memory of a step that differ from a reference by more than the tolerance.

    Args:
        grown: a line for each part that is larger.
        smaller: a line for each part that is smaller.
        notes: a line for each version that differs.
    """

    grown: list[str]
    smaller: list[str]
    notes: list[str]


@dataclass(frozen=True)
class _Part:
    """A part of the memory: the fixed part of a phase, or what a sample adds to it."""

    label: str
    unit: str
    before: int
    now: int
    before_of_modules: Mapping[str, int]
    now_of_modules: Mapping[str, int]

    @property
    def growth(self) -> int:
        return self.now - self.before

    def exceeds(self, tolerance: float) -> bool:
        # The text of a float is the number that a person wrote, so a part that is exactly at the
        # limit has not grown.
        return abs(self.growth) > Fraction(str(tolerance)) * abs(self.before)

    def text(self) -> str:
        before = f"{self.before / MIB:,.3f}"
        now = f"{self.now / MIB:,.3f}"
        if self.before < _LEAST_IN_MIB or before == now:
            text = f"{self.label}: {self.before:,} -> {self.now:,} bytes{self.unit}"
        else:
            text = f"{self.label}: {before} -> {now} MiB{self.unit}"
        if self.before > 0:
            text += f", {100 * self.growth / self.before:+.1f} %"
        return text

    def grown_text(self, root_name: str) -> str:
        return f"{self.text()}, largest growth in {self._grown_module() or root_name}"

    def _grown_module(self) -> str:
        """The innermost module with more than half of the growth; empty for the root."""
        growth = Counter[str]()
        names = {**self.now_of_modules, **self.before_of_modules}
        for name in names:
            of_module = self.now_of_modules.get(name, 0) - self.before_of_modules.get(name, 0)
            while name:
                growth[name] += of_module
                name = name.rpartition(".")[0]
        holders = [name for name in growth if 2 * growth[name] > self.growth]
        return max(holders, key=lambda name: name.count("."), default="")


def compared(
    reference: StepMemory, measured: StepMemory, tolerance: float, root_name: str
) -> Comparison:
    """Compare each part with the reference.

    Args:
        reference: the memory before.
        measured: the memory now.
        tolerance: a part may differ by this share of the reference.
        root_name: the name of the model, for bytes that are in none of its modules.
    """
    samples, fixed = _parts(reference, measured)
    changed = [part for part in samples if part.exceeds(tolerance)]
    changed_fixed = [part for part in fixed if part.exceeds(tolerance)]
    if changed_fixed:
        # Weights are in the fixed part of every phase, so one line has the phase that grew most.
        most = max(changed_fixed, key=lambda part: (part.growth > 0, abs(part.growth)))
        changed.append(most)
    return Comparison(
        grown=[part.grown_text(root_name) for part in changed if part.growth > 0],
        smaller=[part.text() for part in changed if part.growth < 0],
        notes=[
            f"The reference was measured with {name} {reference.versions.get(name)}, and this with"
            f" {name} {version}."
            for name, version in sorted(measured.versions.items())
            if reference.versions.get(name) != version
        ],
    )


def _parts(reference: StepMemory, measured: StepMemory) -> tuple[list[_Part], list[_Part]]:
    """What a sample adds to each phase, and the fixed part of each phase."""
    samples = []
    fixed = []
    for phase in PHASES:
        before = reference.phases.get(phase, PhaseMemory())
        now = measured.phases.get(phase, PhaseMemory())
        name = phase.replace("_", " ")
        samples.append(
            _Part(
                name,
                " a sample",
                before.sample_bytes,
                now.sample_bytes,
                before.sample_bytes_of_modules,
                now.sample_bytes_of_modules,
            )
        )
        fixed.append(
            _Part(
                f"fixed part ({name})",
                "",
                before.fixed_bytes,
                now.fixed_bytes,
                before.fixed_bytes_of_modules,
                now.fixed_bytes_of_modules,
            )
        )
    return samples, fixed
