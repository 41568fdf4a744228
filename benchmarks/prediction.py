"""How well does the fitted line predict the peak at sizes that were not probed?

For each workload one process searches; then, in a fresh process for each size, real training at 0.4, 0.6 and 0.9
of the chosen size (none of them probed) and at the chosen size shows the peak of 20 steps. The chosen size was probed,
so it is not counted among the predictions; it says whether the size held.

    python -m benchmarks.prediction            # all workloads, a Markdown table
    python -m benchmarks.prediction --json F   # the raw figures too
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything

from benchmarks.common import DEVICE_SHARE, answer, in_fresh_process, machine, report, trainer_for
from benchmarks.workloads import WORKLOADS, Training
from lightning_batchmem import BatchFinder, MemoryProfiler
from lightning_batchmem.records import MIB

MODULE = "benchmarks.prediction"
SHARES = (0.4, 0.6, 0.9)
STEPS = 20


def search(name: str) -> None:
    """Search, and print the sizes to test with what is predicted for them, as JSON."""
    workload = WORKLOADS[name]
    finder = BatchFinder(memory_limit=workload.host_limit if not torch.cuda.is_available() else DEVICE_SHARE)
    trainer_for([finder], 1).fit(Training(workload))
    plan = finder.plan
    assert plan is not None
    assert plan.memory is not None
    tried = {trial.batch_size for trial in plan.trials}
    sizes = [round(plan.batch_size * share) for share in SHARES]
    sizes = [size + 1 if size in tried else size for size in sizes]
    rows = [
        {"batch_size": b, "predicted": plan.memory.predict_bytes(b), "upper": plan.memory.upper_bytes(b)} for b in sizes
    ]
    smallest = min(trial.held_bytes for trial in plan.trials)
    answer(
        {
            "chosen": plan.batch_size,
            "limited_by": plan.limited_by,
            "limit": plan.limit_bytes,
            "at_chosen": {"predicted": plan.predicted_peak_bytes, "measured": plan.measured_peak_bytes},
            "smallest_held": smallest,
            "tried": [trial.batch_size for trial in plan.trials],
            "rows": rows,
        }
    )


def train(name: str, batch_size: int) -> None:
    """Train some steps at a fixed size and print the peak, as JSON."""
    profiler = MemoryProfiler(csv=False)
    trainer_for([profiler], STEPS).fit(Training(WORKLOADS[name], batch_size))
    assert profiler.summary is not None
    peak = profiler.summary.peak_reserved_bytes or profiler.summary.peak_bytes
    answer({"peak": peak})


def compare(names: list[str]) -> dict[str, Any]:
    """Search and train for each of the workloads."""
    results: dict[str, Any] = {}
    for name in names:
        found = in_fresh_process(MODULE, "--search", name)
        for row in found["rows"]:
            row["measured"] = in_fresh_process(MODULE, "--train", name, str(row["batch_size"]))["peak"]
        found["trained_at_chosen"] = in_fresh_process(MODULE, "--train", name, str(found["chosen"]))["peak"]
        results[name] = found
        print(f"{name}: chose {found['chosen']}", file=sys.stderr)
    return results


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "| workload | sizes tried | chosen | limit MiB | peak in training MiB | median error | worst error "
        "| of growth, median | too low | above the bound |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    everything: list[dict[str, float]] = []
    for name, found in results.items():
        rows = found["rows"]
        for row in rows:
            row["error"] = row["predicted"] / row["measured"] - 1
            row["of_growth"] = (row["predicted"] - row["measured"]) / (row["measured"] - found["smallest_held"])
        everything += rows
        lines.append(
            f"| {name} | {', '.join(map(str, found['tried']))} | {found['chosen']} ({found['limited_by']}) "
            f"| {found['limit'] / MIB:,.0f} | {found['trained_at_chosen'] / MIB:,.0f} | {_figures(rows)} |"
        )
    lines.append(f"| all | | | | | {_figures(everything)} |")
    return "\n".join(lines)


def _figures(rows: list[dict[str, float]]) -> str:
    errors = [row["error"] for row in rows]
    median = statistics.median(abs(error) for error in errors)
    worst = max(errors, key=abs)
    of_growth = statistics.median(abs(row["of_growth"]) for row in rows)
    low = sum(error < 0 for error in errors)
    above = sum(row["measured"] > row["upper"] for row in rows)
    return f"{median:.1%} | {worst:+.1%} | {of_growth:.1%} | {low} of {len(rows)} | {above} of {len(rows)}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", metavar="NAME", help="(internal) search one workload in this process")
    parser.add_argument("--train", nargs=2, metavar=("NAME", "SIZE"), help="(internal) train one in this process")
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS), help="these workloads only")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    seed_everything(0, verbose=False)
    if arguments.search:
        search(arguments.search)
    elif arguments.train:
        train(arguments.train[0], int(arguments.train[1]))
    else:
        results = compare(arguments.only)
        report(machine(), table(results), results, arguments.json)


if __name__ == "__main__":
    main()
