"""Search and train under a memory limit: the size found, the largest that survives, and how many trainings are killed.

    python -m benchmarks.search                                              # everything; hours
    python -m benchmarks.search --only LSTM --ways BatchFinder --quick       # one search, two trainings; a minute
    python -m benchmarks.search --only LSTM --ways BatchFinder --repeats 5   # with the largest size that survives
    python -m benchmarks.search --only LSTM --sizes 48 60                    # only trainings at these sizes

On the host each process runs in a memory control group (version 1 or 2; needs root or a delegated group) with the room
of its network beyond the memory in use at the start of ``fit``. Exceeding it is SIGKILL. For each search:

1. a fresh process searches, and trains for 60 steps with three evaluations and the Trainer's default checkpointing;
2. a fresh process trains for 60 steps in the same way with the size that was found. A size found twice gets two.

"survives" is the largest size at which 5 of 5 trainings in fresh processes complete, found by bisection with the same
trainings. Results are written to a file as they are measured (``--file``); the same command continues from it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import command_line, in_fresh_process, machine, markdown
from benchmarks.oracle import largest_surviving
from benchmarks.ways import WAYS
from benchmarks.workloads import MIB, WORKLOADS

_PRINTED = ("error", "batch_size", "last_new_size", "steps", "used_bytes", "peak_bytes", "search_seconds")


class Measurements:
    """Results by network, written to a file as they are measured.

    Args:
        path: JSON file; ``None``: not written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.by_name: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.exists() else {}

    def of(self, name: str) -> dict[str, Any]:
        """``searches`` (way -> runs) and ``trainings`` (size -> runs) of a network."""
        known: dict[str, Any] = self.by_name.setdefault(name, {"searches": {}, "trainings": {}})
        return known

    def run(self, name: str, way: str, runs: list[dict[str, Any]]) -> None:
        """Run one process, append its result to ``runs`` and write everything."""
        result = in_fresh_process("benchmarks.ways", name, way, room_bytes=WORKLOADS[name].room_bytes)
        runs.append(result)
        self.save()
        shown = {key: result[key] for key in _PRINTED if key in result}
        print(f"{time.strftime('%H:%M:%S')} {name}, {way}: {shown}", file=sys.stderr, flush=True)

    def save(self) -> None:
        """Write everything, so that the file is whole at any time."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(self.by_name, indent=1) + "\n")
            partial.replace(self._path)

    def trainings(self, name: str) -> Callable[[int, int], list[bool]]:
        """(size, count) -> whether each training survived; runs what is missing of ``count`` trainings."""
        known = self.of(name)["trainings"]

        def outcomes(size: int, count: int) -> list[bool]:
            runs = known.setdefault(str(size), [])
            while len(runs) < count:
                self.run(name, str(size), runs)
            return [run["error"] is None for run in runs]

        return outcomes


def measure(measurements: Measurements, name: str, ways: Sequence[str], repeats: int, *, has_oracle: bool) -> None:
    """Measure one network: ``repeats`` searches in each way, a training for each size that one found, the oracle."""
    known = measurements.of(name)
    for repeat in range(repeats):
        for way in ways:
            runs = known["searches"].setdefault(way, [])
            if len(runs) <= repeat:
                measurements.run(name, way, runs)
    outcomes = measurements.trainings(name)
    found = Counter(size for way in ways for size in _sizes(known["searches"].get(way, [])[:repeats]))
    for size, count in found.items():
        outcomes(size, count)
    if has_oracle:
        survivals = {int(size): [run["error"] is None for run in runs] for size, runs in known["trainings"].items()}
        known["oracle"] = largest_surviving(outcomes, known=survivals)
        measurements.save()
        print(f"{name}: {known['oracle']}", file=sys.stderr)


def table(by_name: dict[str, Any]) -> str:
    """The results as Markdown: medians with the range, and a note for each kind of error."""
    rows: list[dict[str, str]] = []
    notes = []
    for name, known in by_name.items():
        best = known.get("oracle")
        for way, runs in (known["searches"] or {"none": []}).items():
            found = [run for run in runs if run.get("batch_size")]
            fresh = [run for size in sorted(set(_sizes(runs))) for run in known["trainings"].get(str(size), [])]
            row = {
                "network": name,
                "room MiB": f"{WORKLOADS[name].room_bytes / MIB:,.0f}",
                "way": way,
                "found": _summary(_sizes(runs), "{:,.0f}"),
                "survives": f"{best:,}" if best else "unknown",
                "share": _summary([size / best for size in _sizes(runs)], "{:.0%}") if best else "unknown",
                "no size found": f"{len(runs) - len(found)} of {len(runs)}",
                "killed after it": _failures(found),
                "killed in a fresh process": _failures(fresh),
                "search s": _summary([run["search_seconds"] for run in found], "{:.1f}"),
                "samples run / size": _summary([run["samples_run"] / run["batch_size"] for run in found], "{:.1f}"),
            }
            rows.append(row)
            causes = {run["error"] for run in [*runs, *fresh]} - {None, "killed"}
            notes += [f"{name}, {way}: {cause}" for cause in sorted(causes)]
    return markdown(rows, notes)


def _sizes(runs: Sequence[dict[str, Any]]) -> list[int]:
    return [run["batch_size"] for run in runs if run.get("batch_size")]


def _failures(runs: Sequence[dict[str, Any]]) -> str:
    return f"{sum(run['error'] is not None for run in runs)} of {len(runs)}"


def _summary(values: Sequence[float], form: str) -> str:
    if not values:
        return "none"
    low, high = form.format(min(values)), form.format(max(values))
    return form.format(statistics.median(values)) + ("" if low == high else f" ({low} to {high})")


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__, WORKLOADS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="these ways to search")
    parser.add_argument("--repeats", type=int, default=5, help="searches; 0: only the largest size; default: 5")
    parser.add_argument("--quick", action="store_true", help="one search and one training, no largest surviving size")
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[], help="no search: train --repeats times at each of these sizes"
    )
    parser.add_argument("--file", type=Path, help="write results to this JSON file, and continue from it")
    arguments = parser.parse_args()
    measurements, repeats = Measurements(arguments.file), 1 if arguments.quick else arguments.repeats
    for name in arguments.only:
        for size in arguments.sizes:
            outcomes = measurements.trainings(name)(size, repeats)
            print(f"{name} at {size}: {outcomes.count(True)} of {len(outcomes)} survived")
        if not arguments.sizes:
            measure(measurements, name, arguments.ways, repeats, has_oracle=not arguments.quick)
    if not arguments.sizes:
        print(f"{machine()}\n\n{table(measurements.by_name)}")


if __name__ == "__main__":
    main()
