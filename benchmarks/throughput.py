"""Speed at the batch size that a search chooses, against the best speed of all sizes.

    # five networks, three searches of each kind; about ten minutes on one core
    python -m benchmarks.throughput
    # one network, one search of each kind; half a minute
    python -m benchmarks.throughput --only "small MLP" --repeats 1
    # also to benchmarks/results
    python -m benchmarks.throughput --write

For each network, on one thread and in fresh processes:

1. ``BatchFinder`` searches under a memory limit with ``objective="memory"`` and with
   ``objective="throughput"``, and Lightning's ``BatchSizeFinder`` doubles the size. Lightning's
   finder ends at the largest power of two that the memory objective has just found to fit. It knows
   no limit, and would be killed above that of a host. The training that follows each search is
   timed in the same process.
2. New processes train a few steps at the sizes 2, 4, 8 and so on up to the largest size that was
   chosen, in eight rounds, as with a size that is written into the program.

A speed is the median over the rounds of the fastest step in each. The regret of a search is 1 -
the samples per second of its training over the most of all sizes. It is 0 if the training after the
search is at least as fast as a new process at any size. On the host it may be faster, because a
heap that larger steps have used keeps its memory. The cost of a search is its CPU time (on CUDA:
its wall time), also in steps at the chosen size.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import command_line, in_fresh_process, markdown, report
from benchmarks.networks import group
from benchmarks.throughput_ways import ROUNDS, WAYS

MODULE = "benchmarks.throughput_ways"


def measure(name: str, repeats: int, num_rounds: int) -> dict[str, Any]:
    """Search ``repeats`` times in each way, and then time the steps of one network."""
    rounds = ("--rounds", str(num_rounds))
    searches: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        trials = 1
        # The search for memory comes first, because it bounds the trials of Lightning's finder.
        for way, runs in searches.items():
            run = in_fresh_process(MODULE, name, "--way", way, "--trials", str(trials), *rounds)
            runs.append(run)
            print(f"{time.strftime('%H:%M:%S')} {name}, {way}: {run}", file=sys.stderr, flush=True)
            if way == "memory" and run.get("batch_size"):
                # Trials at 2, 4, 8 and so on: the last is the largest power of two that fits.
                trials = max(1, run["batch_size"].bit_length() - 1)
    chosen = [size for runs in searches.values() for size in _sizes(runs)]
    sizes = [str(2**power) for power in range(1, max(chosen, default=1).bit_length())]
    steps = in_fresh_process(MODULE, name, "--sizes", *sizes, *rounds)
    return {"searches": searches, "steps": steps}


def speeds(known: dict[str, Any], first: int = 0, every: int = 1) -> dict[int, float]:
    """Samples per second at each size of the ladder: the median of its rounds, or of some."""
    rounds = known["steps"].get("step_seconds", {})
    return {
        int(size): int(size) / statistics.median(seconds[first::every])
        for size, seconds in rounds.items()
    }


def regrets(known: dict[str, Any], way: str) -> list[float]:
    """The regret, at least 0, of each search in this way that found a size.

    The best of many sizes looks too good in the rounds that made it the best. So it is looked up in
    every other round, and its speed is that of the rounds between them, in both ways.
    """
    halves = [speeds(known, first, 2) for first in (0, 1)]
    if not halves[0]:
        return []
    best = statistics.fmean(
        by_size[max(others, key=others.__getitem__)] for by_size, others in (halves, halves[::-1])
    )
    runs = (run for run in known["searches"][way] if run.get("batch_size"))
    return [max(0.0, 1 - _speed(run) / best) for run in runs]


def _speed(run: dict[str, Any]) -> float:
    """Samples per second of the training after a search."""
    return float(run["batch_size"] / statistics.median(run["step_seconds"]))


def table(by_name: dict[str, Any]) -> str:
    """The results as Markdown: a row for each network and way, and a summary below them."""
    rows = list[dict[str, Any]]()
    notes = list[str]()
    for name, known in by_name.items():
        by_size = speeds(known)
        for way, runs in known["searches"].items():
            rows.append({"network": name, "way": way, **_columns(known, way, runs)})
            errors = [run["error"] for run in runs if run["error"]]
            notes += [f"{name}, {way}: {error}" for error in dict.fromkeys(errors)]
        if known["steps"]["error"]:
            notes.append(f"{name}, steps: {known['steps']['error']}")
        ladder = ", ".join(f"{size:,}: {by_size[size]:,.0f}" for size in sorted(by_size))
        notes.append(f"{name}, samples/s by size: {ladder}")
    return markdown(rows, [*_summary(by_name), *notes])


def _columns(known: dict[str, Any], way: str, runs: Sequence[dict[str, Any]]) -> dict[str, str]:
    by_size = speeds(known)
    complete = [run for run in runs if run.get("batch_size")]
    if not complete or not by_size:
        return {"sizes": "none"}
    regret = regrets(known, way)
    search_seconds = [run["search_seconds"] for run in complete]
    search_steps = [
        run["search_seconds"] / statistics.median(run["step_seconds"]) for run in complete
    ]
    return {
        "sizes": ", ".join(f"{size:,}" for size in _sizes(complete)),
        "samples/s": ", ".join(f"{_speed(run):,.0f}" for run in complete),
        # Samples per second are compared with those of the fastest size.
        "fastest of the ladder": f"{max(by_size, key=by_size.__getitem__):,}",
        "regret, median": f"{statistics.median(regret):.1%}",
        "regret, worst": f"{max(regret):.1%}",
        "search, s": f"{statistics.median(search_seconds):.1f}",
        "search, steps": f"{statistics.median(search_steps):,.0f}",
    }


def _summary(by_name: dict[str, Any]) -> list[str]:
    lines = []
    for way in WAYS:
        by_network = [regrets(known, way) for known in by_name.values()]
        medians = [statistics.median(regret) for regret in by_network if regret]
        if medians:
            worst = max(max(regret) for regret in by_network if regret)
            lines.append(
                f"{way}: regret {statistics.median(medians):.1%} in the median over the networks,"
                f" {worst:.1%} at most"
            )
    costs = [
        [_median_seconds(known["searches"][way]) for way in ("throughput", "memory")]
        for known in by_name.values()
    ]
    compared = [(throughput, memory) for throughput, memory in costs if throughput and memory]
    cheaper = sum(throughput < memory for throughput, memory in compared)
    lines.append(
        f"the search for throughput costs less than that for memory on {cheaper} of"
        f" {len(compared)} networks"
    )
    return lines


def _median_seconds(runs: Sequence[dict[str, Any]]) -> float | None:
    seconds = [run["search_seconds"] for run in runs if run.get("batch_size")]
    return statistics.median(seconds) if seconds else None


def _sizes(runs: Sequence[dict[str, Any]]) -> list[int]:
    return [run["batch_size"] for run in runs if run.get("batch_size")]


def main() -> None:
    parser = command_line(__doc__, group("host, quick"), writes=True)
    parser.add_argument(
        "--repeats", type=int, default=3, help="searches of each kind; default: %(default)s"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=ROUNDS,
        help="in which all sizes are timed in turn, at least two; default: %(default)s",
    )
    arguments = parser.parse_args()
    # The processes that measure use one thread as well, and the table names this number.
    torch.set_num_threads(1)
    by_name = {name: measure(name, arguments.repeats, arguments.rounds) for name in arguments.only}
    report("throughput", table(by_name), write=arguments.write)


if __name__ == "__main__":
    main()
