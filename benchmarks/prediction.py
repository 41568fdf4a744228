"""Predicted and measured peak memory at batch sizes that the search did not run.

For each network whose samples have one size: a fresh process searches, and fresh processes train for 20 steps at half
and at nine tenths of the size found (predicted by the final lines) and at that size (predicted by the lines through the
smaller sizes). The error is predicted over measured peak, less one.

    python -m benchmarks.prediction            # all networks, as a Markdown table
    python -m benchmarks.prediction --write    # also to benchmarks/results
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from torch.utils.data import default_collate

from benchmarks.common import command_line, in_fresh_process, markdown, report
from benchmarks.workloads import MIB, WORKLOADS
from lightning_batchmem import Plan

NAMES = [name for name, workload in WORKLOADS.items() if workload.collate is default_collate]
SHARES = (0.5, 0.9)
STEPS = 20


def measure(name: str) -> dict[str, Any]:
    """Search and train in fresh processes: ``predicted`` and ``measured`` have peaks by size, in bytes."""
    room_bytes = WORKLOADS[name].room_bytes
    search = in_fresh_process("benchmarks.ways", name, "BatchFinder", "--steps", "3", room_bytes=room_bytes)
    found: dict[str, Any] = {
        "error": search["error"],
        "found": search.get("batch_size"),
        "predicted": {},
        "measured": {},
    }
    if "plan" in search:
        found["predicted"] = predictions(Plan.from_json(json.dumps(search["plan"])))
    for size in found["predicted"]:
        arguments = (name, str(size), "--steps", str(STEPS), "--profile")
        trained = in_fresh_process("benchmarks.ways", *arguments, room_bytes=room_bytes)
        found["measured"][size] = trained.get("profiled_bytes")
        found["error"] = found["error"] or trained["error"]
    print(f"{name}: {found['error'] or errors(found)}", file=sys.stderr)
    return found


def predictions(plan: Plan) -> dict[int, float | None]:
    """Size -> predicted peak in bytes, at sizes that the search did not run and at the size found."""
    assert plan.memory is not None
    sizes = {round(share * plan.batch_size) for share in SHARES} - {trial.batch_size for trial in plan.trials}
    predicted = {size: plan.memory.predict_bytes(size) for size in sorted(sizes)}
    return {**predicted, plan.batch_size: plan.predicted_peak_bytes}


def errors(found: dict[str, Any]) -> list[float]:
    """The relative errors of the predictions of one search."""
    measured, predicted = found["measured"], found["predicted"]
    return [predicted[size] / measured[size] - 1 for size in predicted if predicted[size] and measured[size]]


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown, one row per network, and a note for each failed process."""
    rows = list[dict[str, Any]]()
    for name, found in results.items():
        peak_bytes = found["measured"].get(found["found"])
        peak = peak_bytes and f"{peak_bytes / MIB:,.0f}"
        rows.append({"network": name, "found": found["found"], "peak MiB": peak, **summary(errors(found))})
    rows.append({"network": "all"} | summary([error for found in results.values() for error in errors(found)]))
    return markdown(rows, [f"{name}: {found['error']}" for name, found in results.items() if found["error"]])


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
    arguments = command_line(__doc__, NAMES, writes=True).parse_args()
    results = {name: measure(name) for name in arguments.only}
    report("prediction", table(results), results, write=arguments.write)


if __name__ == "__main__":
    main()
