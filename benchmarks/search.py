"""Search and train under a memory limit: the size found, the largest that survives, and how many trainings are killed.

    python -m benchmarks.search                                              # everything; hours
    python -m benchmarks.search --only LSTM --ways BatchFinder --quick       # one search, two trainings; a minute
    python -m benchmarks.search --only LSTM --ways BatchFinder --repeats 5   # with the largest size that survives
    python -m benchmarks.search --only LSTM --sizes 48 60                    # only trainings at these sizes

On the host each process runs in a memory control group (version 1 or 2; needs root or a delegated group) with the room
of its network beyond the memory in use at the start of ``fit``. Exceeding it is SIGKILL. For each search:

1. a fresh process searches, and trains for 60 steps with three evaluations and the Trainer's default checkpointing;
2. a fresh process trains for 60 steps in the same way with the size that was found.

"survives" is the largest size at which 5 of 5 trainings in fresh processes complete, found by bisection with the same
trainings. Results are written to a file as they are measured (``--file``); the same command continues from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import in_fresh_process, machine, markdown
from benchmarks.oracle import largest_surviving
from benchmarks.ways import WAYS
from benchmarks.workloads import MIB, WORKLOADS


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
        begin = time.monotonic()
        workload = WORKLOADS[name]
        result = in_fresh_process("benchmarks.ways", name, way, room_bytes=workload.room_bytes)
        runs.append(result)
        size = "" if way.isdecimal() else f" {result.get('batch_size', 'no size')}"
        used = f"{result.get('used_bytes', 0) / MIB:,.0f} (with page cache {result.get('peak_bytes', 0) / MIB:,.0f})"
        outcome = result["error"] or "survived"
        if result["error"]:
            outcome += f" at size {result.get('last_new_size')} after {result.get('steps', 0)} training steps"
        line = f"{name}, {way}:{size} {outcome}; peak {used} of {workload.room_bytes / MIB:,.0f} MiB"
        if "search_seconds" in result:
            line += f"; search {result['search_seconds']:.1f} s"
        print(
            f"{time.strftime('%H:%M:%S')} {line}; {time.monotonic() - begin:.0f} s in all", file=sys.stderr, flush=True
        )
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
    """Measure one network: ``repeats`` searches in each way, as many trainings at each size found, the oracle."""
    known = measurements.of(name)
    for repeat in range(repeats):
        for way in ways:
            runs = known["searches"].setdefault(way, [])
            if len(runs) <= repeat:
                measurements.run(name, way, runs)
    outcomes = measurements.trainings(name)
    for size in sorted({size for way in ways for size in _sizes(known["searches"][way])}):
        outcomes(size, repeats)
    if has_oracle:
        survivals = {int(size): [run["error"] is None for run in runs] for size, runs in known["trainings"].items()}
        known["oracle"] = largest_surviving(outcomes, known=survivals, largest=65_536)
        print(f"{name}: {known['oracle']}", file=sys.stderr)


def table(by_name: dict[str, Any]) -> str:
    """The results as Markdown: medians with the range, and a note for each kind of error."""
    rows: list[dict[str, str]] = []
    notes = []
    for name, known in by_name.items():
        best = known.get("oracle")
        for way, runs in known["searches"].items():
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
                "prediction error": _summary(
                    [e for run in found if (e := _prediction_error(run)) is not None], "{:+.1%}"
                ),
                "search s": _summary([run["search_seconds"] for run in found], "{:.1f}"),
                "samples run / size": _summary([run["samples_run"] / run["batch_size"] for run in found], "{:.1f}"),
            }
            rows.append(row)
            errors = {run["error"] for run in [*runs, *fresh]} - {None, "killed"}
            notes += [f"- {name}, {way}: {error}" for error in sorted(errors)]
    return "\n".join([markdown(rows), *([""] if notes else []), *notes])


def _sizes(runs: Sequence[dict[str, Any]]) -> list[int]:
    return [run["batch_size"] for run in runs if run.get("batch_size")]


def _failures(runs: Sequence[dict[str, Any]]) -> str:
    return f"{sum(run['error'] is not None for run in runs)} of {len(runs)}"


def _summary(values: Sequence[float], form: str) -> str:
    if not values:
        return "none"
    low, high = form.format(min(values)), form.format(max(values))
    return form.format(statistics.median(values)) + ("" if low == high else f" ({low} to {high})")


def _prediction_error(run: dict[str, Any]) -> float | None:
    predicted, measured = (run.get("plan", {}).get(f"{name}_peak_bytes") for name in ("predicted", "measured"))
    return predicted / measured - 1 if predicted and measured else None


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), help="these networks")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="these ways to search")
    parser.add_argument("--repeats", type=int, default=5, help="searches, and trainings at each size found; default: 5")
    parser.add_argument("--quick", action="store_true", help="one search and one training, no largest surviving size")
    parser.add_argument("--sizes", nargs="+", type=int, help="no search: train --repeats times at each of these sizes")
    parser.add_argument("--file", type=Path, help="write results to this JSON file, and continue from it")
    arguments = parser.parse_args()
    measurements = Measurements(arguments.file)
    for name in arguments.only:
        if arguments.sizes:
            for size in arguments.sizes:
                outcomes = measurements.trainings(name)(size, 1 if arguments.quick else arguments.repeats)
                print(f"{name} at {size}: {outcomes.count(True)} of {len(outcomes)} survived")
            continue
        repeats = 1 if arguments.quick else arguments.repeats
        measure(measurements, name, arguments.ways, repeats, has_oracle=not arguments.quick)
    if not arguments.sizes:
        print(f"{machine()}\n\n{table(measurements.by_name)}")


if __name__ == "__main__":
    main()
