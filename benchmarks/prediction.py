"""Predicted and measured live bytes at sizes beyond those that the lines were fitted to.

The sizes are at least twice as large as those that the lines were fitted to.

Reads the peaks in results of ``benchmarks.search`` with the way BatchFinder. The error is predicted
over measured live bytes, less one; that of the growth leaves out the peak of the smallest size,
which is mostly interpreter and weights.

    python -m benchmarks.prediction                 # the results in benchmarks/results
    python -m benchmarks.prediction --file FILE
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, command_line, markdown
from lightning_batchmem.plan.fit import fit_memory
from lightning_batchmem.plan.records import Trial, TrialMemory

# The searches that docs/comparison.md shows. They can be read on any machine.
RESULTS = ROOT / "benchmarks" / "results" / "cpu-2-cores" / "search.json"


def errors(trials: Sequence[Trial]) -> Iterable[tuple[float, float]]:
    """The error of the peak and that of its growth, for each trial that can be predicted.

    Such a trial has two trials of at most half its size.
    """
    for trial in trials:
        smaller = [other for other in trials if 2 * other.batch_size <= trial.batch_size]
        if (model := fit_memory(smaller)) is not None:
            difference_bytes = model.predict_bytes(trial.batch_size) - trial.memory.peak_bytes
            first_bytes = min(other.memory.peak_bytes for other in smaller)
            yield (
                difference_bytes / trial.memory.peak_bytes,
                difference_bytes / (trial.memory.peak_bytes - first_bytes),
            )


def trials_of(run: dict[str, Any]) -> list[Trial]:
    """The trials of a stored search."""
    start_bytes = run["start_bytes"]
    return [
        Trial(
            size,
            "ok",
            TrialMemory({phase: start_bytes + peaks[i] for phase, peaks in run["peaks"].items()}),
        )
        for i, size in enumerate(run["sizes"])
    ]


def table(by_name: dict[str, Any]) -> str:
    """One row per network, and one for all."""
    found = {}
    for name, known in by_name.items():
        runs = known["searches"].get("BatchFinder", [])
        found[name] = [error for run in runs if "peaks" in run for error in errors(trials_of(run))]
    found["all"] = [error for each in found.values() for error in each]
    return markdown([{"network": name, **_columns(each)} for name, each in found.items()])


def _columns(found: Sequence[tuple[float, float]]) -> dict[str, str]:
    columns = {"predictions": str(len(found))}
    for name, values in zip(("peak", "growth"), zip(*found, strict=True), strict=False):
        columns[f"error of the {name}, median"] = f"{statistics.median(map(abs, values)):.2%}"
        columns[f"error of the {name}, largest"] = f"{max(values, key=abs):+.2%}"
    peaks = [peak for peak, _ in found]
    for share in (0.0, 0.01):
        too_low = sum(peak < -share for peak in peaks)
        name = f"peak too low by more than {share:.0%}"
        columns[name] = f"{too_low / len(peaks):.0%}" if peaks else ""
    return columns


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--file", type=Path, default=RESULTS, help="default: %(default)s")
    print(table(json.loads(parser.parse_args().file.read_text())["networks"]))


if __name__ == "__main__":
    main()
