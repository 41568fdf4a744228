"""Predicted and measured peak memory at batch sizes that the search did not run.

For each network whose samples have one size: a fresh process searches, and fresh processes train for 20 steps at half
and at nine tenths of the size found (predicted by the final lines) and at that size (predicted by the lines through the
smaller sizes). The error is predicted over measured peak, less one.

    python -m benchmarks.prediction            # all networks, as a Markdown table
    python -m benchmarks.prediction --write    # also to benchmarks/results
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import seed_everything
from torch.utils.data import default_collate

from benchmarks.common import emit, in_fresh_process, markdown, report, trainer_for
from benchmarks.ways import Limit
from benchmarks.workloads import MIB, WORKLOADS, module_for
from lightning_batchmem import BatchFinder, MemoryProfiler

NAMES = [name for name, workload in WORKLOADS.items() if workload.collate is default_collate]
SHARES = (0.5, 0.9)
STEPS = 20


def search(name: str) -> None:
    """Search in this process; emit the sizes to train at and their predictions in bytes."""
    finder = BatchFinder(memory_limit=None, min_steps_per_epoch=None)
    trainer_for([Limit(WORKLOADS[name].room_bytes), finder], 1).fit(module_for(name))
    plan = finder.plan
    assert plan is not None
    assert plan.memory is not None
    run = {trial.batch_size for trial in plan.trials}
    sizes = {round(share * plan.batch_size) for share in SHARES} - run
    predicted = {size: plan.memory.predict_bytes(size) for size in sorted(sizes)}
    emit(predicted={**predicted, plan.batch_size: plan.predicted_peak_bytes}, found=plan.batch_size)


def train(name: str, batch_size: int) -> None:
    """Train in this process; emit the peak in bytes."""
    profiler = MemoryProfiler(csv=False)
    limit = Limit(WORKLOADS[name].room_bytes)
    trainer_for([limit, profiler], STEPS * WORKLOADS[name].optimizers).fit(module_for(name, batch_size))
    assert profiler.summary is not None
    emit(profiled_bytes=profiler.summary.peak_reserved_bytes or profiler.summary.peak_bytes)


def measure(name: str) -> dict[str, Any]:
    """Search and train in fresh processes; ``measured`` has the peak by size."""
    room_bytes = WORKLOADS[name].room_bytes
    found = in_fresh_process("benchmarks.prediction", "--search", name, room_bytes=room_bytes)
    found["measured"] = {}
    for size in found.get("predicted", {}):
        trained = in_fresh_process("benchmarks.prediction", "--train", name, size, room_bytes=room_bytes)
        found["measured"][size] = trained.get("profiled_bytes")
        found["error"] = found["error"] or trained["error"]
    print(f"{name}: {found['error'] or errors(found)}", file=sys.stderr)
    return found


def errors(found: dict[str, Any]) -> list[float]:
    """The relative errors of the predictions of one search."""
    measured, predicted = found["measured"], found.get("predicted", {})
    return [predicted[size] / measured[size] - 1 for size in predicted if predicted[size] and measured[size]]


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown, one row per network, and a note for each failed process."""
    rows = list[dict[str, Any]]()
    for name, found in results.items():
        peak_bytes = found["measured"].get(str(found.get("found")))
        row = {"network": name, "found": found.get("found"), "peak MiB": peak_bytes and f"{peak_bytes / MIB:,.0f}"}
        rows.append(row | summary(errors(found)))
    rows.append({"network": "all"} | summary([error for found in results.values() for error in errors(found)]))
    notes = [f"- {name}: {found['error']}" for name, found in results.items() if found["error"]]
    return "\n".join([markdown(rows), *([""] if notes else []), *notes])


def summary(values: Sequence[float]) -> dict[str, str]:
    """The columns about relative errors."""
    if not values:
        return {"predictions": "0"}
    return {
        "predictions": str(len(values)),
        "median error": f"{statistics.median(map(abs, values)):.1%}",
        "worst error": f"{max(values, key=abs):+.1%}",
        "too low": f"{sum(value < 0 for value in values) / len(values):.0%}",
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--train", nargs=2, metavar=("NAME", "SIZE"), help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES, help="these networks only")
    parser.add_argument("--write", action="store_true", help="write to benchmarks/results")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    seed_everything(0, verbose=False)
    if arguments.search:
        search(arguments.search)
    elif arguments.train:
        train(arguments.train[0], int(arguments.train[1]))
    else:
        results = {name: measure(name) for name in arguments.only}
        report("prediction", table(results), results, write=arguments.write)


if __name__ == "__main__":
    main()
