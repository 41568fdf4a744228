"""Search and train under a memory limit.

The table has the size found, the largest that survives, and how many trainings are killed.

    # everything; hours
    python -m benchmarks.search
    # one search, two trainings; a minute
    python -m benchmarks.search --only LSTM --ways BatchFinder --quick
    # with the largest size that survives
    python -m benchmarks.search --only LSTM --ways BatchFinder --repeats 5
    # thirteen networks of other kinds
    python -m benchmarks.search --held-out --ways BatchFinder --repeats 5
    # only trainings at these sizes
    python -m benchmarks.search --only LSTM --sizes 48 60

On the host each process runs in a memory control group (version 1 or 2; needs root or a delegated
group) with the room of its network beyond the memory in use at the start of ``fit``. Exceeding it
is SIGKILL. For each search:

1. a fresh process searches, and trains for 60 steps with three evaluations and the Trainer's
   default checkpointing;
2. a fresh process trains for 60 steps in the same way with the size that was found. A size found
   twice gets two.

"survives" is the largest size at which 5 of 5 trainings in fresh processes complete, found by
bisection with the same trainings. With ``--file`` results are written to a JSON file as they are
measured, and the table to a Markdown file beside it; the same command continues from them. The JSON
has only what the table and ``benchmarks.prediction`` read.

    # the table of docs/comparison.md is made anew
    python -m benchmarks.search --file /tmp/search.json
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import command_line, in_fresh_process, machine, markdown, write_page
from benchmarks.networks import MIB, group
from benchmarks.ways import NETWORKS, WAYS

AGREEING = 5
"""Trainings, each in a fresh process, that must all survive."""

RESOLUTION = 0.02
"""Share of the size at which bisection stops."""

FIRST_SIZE = 32

_PRINTED = (
    "error",
    "batch_size",
    "last_new_size",
    "steps",
    "used_bytes",
    "peak_bytes",
    "search_seconds",
)
_STORED = ("error", "batch_size", "search_seconds", "used_bytes", "start_bytes", "sizes", "peaks")


class Measurements:
    """Results by network, written to a JSON file as they are measured, if there is a path."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.by_name: dict[str, Any] = {}
        # Versions, device and commit of each run that added results.
        self.machines: list[str] = []
        if path is not None and path.exists():
            known = json.loads(path.read_text())
            self.by_name = known["networks"]
            self.machines = known["machines"]

    def of(self, name: str) -> dict[str, Any]:
        """``searches`` (way -> runs) and ``trainings`` (size -> errors) of a network."""
        known: dict[str, Any] = self.by_name.setdefault(name, {"searches": {}, "trainings": {}})
        return known

    def search(self, name: str, way: str) -> None:
        """Search and train in one process, and write what is read of its result."""
        result = self._run(name, way)
        stored = {key: result[key] for key in _STORED if key in result}
        self.of(name)["searches"][way].append(stored)
        self.save()

    def outcomes(self, name: str, size: int, count: int) -> list[bool]:
        """Whether each training at a size survived; runs what is missing of ``count`` trainings."""
        errors = self.of(name)["trainings"].setdefault(str(size), [])
        while len(errors) < count:
            errors.append(self._run(name, str(size))["error"])
            self.save()
        return [error is None for error in errors]

    def _run(self, name: str, way: str) -> dict[str, Any]:
        if machine() not in self.machines:
            self.machines.append(machine())
        result = in_fresh_process(
            "benchmarks.ways", name, way, room_bytes=NETWORKS[name].room_bytes
        )
        shown = {key: result[key] for key in _PRINTED if key in result}
        print(f"{time.strftime('%H:%M:%S')} {name}, {way}: {shown}", file=sys.stderr, flush=True)
        return result

    def page(self) -> str:
        """What was measured with, and the table."""
        return "\n\n".join([*self.machines, table(self.by_name)])

    def save(self) -> None:
        """Write everything, so that the files are whole at any time."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        compact = partial(json.dumps, separators=(",", ":"))
        networks = (f"{compact(name)}: {compact(known)}" for name, known in self.by_name.items())
        text = (
            f'{{"machines": {json.dumps(self.machines)},\n'
            '"networks": {\n' + ",\n".join(networks) + "\n}}\n"
        )
        written = self._path.with_suffix(".partial")
        written.write_text(text)
        written.replace(self._path)
        write_page(self._path.with_suffix(".md"), self.page())


def measure(
    measurements: Measurements, name: str, ways: Sequence[str], repeats: int, *, has_oracle: bool
) -> None:
    """Measure one network.

    There are ``repeats`` searches in each way, a training for each size that a search found, and
    with ``has_oracle`` the largest size that survives.
    """
    known = measurements.of(name)
    for repeat in range(repeats):
        for way in ways:
            runs = known["searches"].setdefault(way, [])
            if len(runs) <= repeat:
                measurements.search(name, way)
    outcomes = partial(measurements.outcomes, name)
    found = Counter(
        size for way in ways for size in _sizes(known["searches"].get(way, [])[:repeats])
    )
    for size, count in found.items():
        outcomes(size, count)
    if has_oracle:
        survivals = {}
        for trained_size, errors in known["trainings"].items():
            survivals[int(trained_size)] = [error is None for error in errors]
        known["oracle"] = largest_surviving(outcomes, known=survivals)
        measurements.save()
        print(f"{name}: {known['oracle']}", file=sys.stderr)


def largest_surviving(
    outcomes: Callable[[int, int], list[bool]], *, known: Mapping[int, list[bool]]
) -> int | None:
    """Bracket and bisect with single trainings, then step down until five of five survive.

    One failure is enough to go below a size; one survival is not enough to stay.
    ``outcomes(size, count)`` has at least ``count`` outcomes in fresh processes.
    """

    def survives(size: int, count: int = 1) -> bool:
        return all(all(outcomes(size, number)) for number in range(1, count + 1))

    above = min((size for size, each in known.items() if not all(each)), default=math.inf)
    start = max(
        (size for size in known if size < above),
        default=max(1, min(FIRST_SIZE, round(min(above, 64) / 1.5))),
    )
    size = largest_that(survives, start, above=above)
    while size > 0 and not survives(size, AGREEING):
        size -= max(1, int(RESOLUTION * size))
    return size or None


def largest_that(
    passes: Callable[[int], bool],
    start: int,
    *,
    above: float = math.inf,
    growth: float = 1.5,
    resolution: float = RESOLUTION,
) -> int:
    """The largest size that passes, or 0 if none does.

    It is bracketed from ``start`` in steps of ``growth``, and bisected to a share of
    ``resolution``.
    """
    below = 0
    size = start
    while above - below > max(1, int(resolution * below)):
        if passes(size):
            below = size
        else:
            above = size
        if above == math.inf:
            size = max(size + 1, round(size * growth))
        else:
            size = (below + int(above)) // 2 if below else max(1, int(size / growth))
    return below


def table(by_name: dict[str, Any]) -> str:
    """The results as Markdown: a row for each network, and a column for each way.

    There is a note for each kind of error.

    A cell has the size found (median and range), its share of the largest size that survives, how
    many processes did not survive (a search with its training, or a training in a fresh process),
    the time of a search, and the highest use for each live byte of :func:`_used_to_live`.
    """
    rows = list[dict[str, str]]()
    notes = list[str]()
    for name, known in by_name.items():
        best = known.get("oracle")
        room = f"{NETWORKS[name].room_bytes / MIB:,.0f}"
        row = {
            "network": name,
            "room MiB": room,
            "largest that survives": f"{best:,}" if best else "unknown",
        }
        for way, runs in known["searches"].items():
            sizes = _sizes(runs)
            errors = [run["error"] for run in runs]
            for size in sorted(set(sizes)):
                errors += known["trainings"].get(str(size), [])
            failed = [error for error in errors if error]
            cell = [_summary(sizes, "{:,.0f}") if sizes else "no size"]
            cell += [f"{statistics.median(sizes) / best:.0%}"] if sizes and best else []
            cell += [f"failed {len(failed)} of {len(errors)}"]
            seconds = [run["search_seconds"] for run in runs if run.get("batch_size")]
            cell += [_summary(seconds, "{:.0f}") + " s"] if seconds else []
            ratios = [_used_to_live(run) for run in runs if run.get("peaks")]
            cell += [f"used {max(ratios):.1f} bytes for each live byte"] if ratios else []
            row[way] = ", ".join(cell)
            notes += [
                f"{name}, {way}: {error}" for error in dict.fromkeys(failed) if error != "killed"
            ]
        rows.append(row)
    return markdown(rows, notes)


def _used_to_live(run: dict[str, Any]) -> float:
    """What a search and its training used, for each live byte of the step at the size found.

    Both are beyond what the process held before the first step.
    """
    live_bytes = max(peaks[-1] for peaks in run["peaks"].values())
    return float(run["used_bytes"] / live_bytes)


def _sizes(runs: Sequence[dict[str, Any]]) -> list[int]:
    return [run["batch_size"] for run in runs if run.get("batch_size")]


def _summary(values: Sequence[float], form: str) -> str:
    low = form.format(min(values))
    high = form.format(max(values))
    return form.format(statistics.median(values)) + ("" if low == high else f" ({low} to {high})")


def main() -> None:
    parser = command_line(__doc__, NETWORKS)
    parser.set_defaults(only=list(group("host")))
    parser.add_argument(
        "--held-out",
        action="store_const",
        dest="only",
        const=list(group("host, held out")),
        help="thirteen networks of other kinds",
    )
    parser.add_argument(
        "--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="these ways to search"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="searches; 0: only the largest size; default: 5"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one search and one training, no largest surviving size",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=int,
        default=[],
        help="no search: train --repeats times at each of these sizes",
    )
    parser.add_argument(
        "--file",
        type=Path,
        help="write results to this JSON file and a Markdown file beside it, and continue from it",
    )
    arguments = parser.parse_args()
    measurements = Measurements(arguments.file)
    repeats = 1 if arguments.quick else arguments.repeats
    for name in arguments.only:
        for size in arguments.sizes:
            outcomes = measurements.outcomes(name, size, repeats)
            print(f"{name} at {size}: {outcomes.count(True)} of {len(outcomes)} survived")
        if not arguments.sizes:
            measure(measurements, name, arguments.ways, repeats, has_oracle=not arguments.quick)
    if not arguments.sizes:
        measurements.save()
        print(measurements.page())


if __name__ == "__main__":
    main()
