"""How well do the fitted lines predict the peak at sizes that were not probed?

For each workload a fresh process searches; then, in a fresh process for each size, 20 steps of real training show the
peak: at half and at nine tenths of the chosen size, which were never run, with the final lines, and at the chosen size,
whose prediction is the one in the plan, from the lines fitted to the *smaller* sizes. A repeat is a search of its own
with trainings of its own.

A model states one bound, the upper one, by which sizes are chosen ("above the upper bound"). What it adds to the lines,
noise and residuals, is by how much a peak may be off in either direction; a peak that far below the line is "below the
margin", and "inside" is neither.

Where samples differ in size the search probes with the largest, and so the training is given nothing but the largest:
any other batch holds less, which says nothing of the line.

    python -m benchmarks.prediction            # all workloads, a Markdown table
    python -m benchmarks.prediction --json F   # the raw figures too
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from torch.utils.data import DataLoader

from benchmarks.common import DEVICE_SHARE, answer, in_fresh_process, machine, report, trainer_for
from benchmarks.workloads import WORKLOADS, RandomSamples, module_for
from lightning_batchmem import BatchFinder, MemoryProfiler
from lightning_batchmem.plan.records import MIB

MODULE = "benchmarks.prediction"
SHARES = (0.5, 0.9)
STEPS = 20
LOOKED_AT = 10_000
"""Samples among which the largest is looked for, as many as BatchFinder looks at."""

HEAD = (
    "| workload | chosen | limit MiB | peak in training at it, MiB | predictions | median error | worst error "
    "| of the growth, median | under-estimates | above the upper bound | below the margin | inside |"
)


def unprobed_sizes(chosen: int, tried: Collection[int]) -> list[int]:
    """The sizes nearest to :data:`SHARES` of ``chosen``, in samples, that were not run; fewer where there are none."""
    sizes: list[int] = []
    for share in SHARES:
        free = [size for size in range(2, chosen) if size not in tried and size not in sizes]
        sizes += [min(free, key=lambda size: abs(size - share * chosen))] if free else []
    return sorted(sizes)


def search(name: str) -> dict[str, Any]:
    """Search in this process; the sizes to train with, and what is predicted for them."""
    workload = WORKLOADS[name]
    limit = DEVICE_SHARE if torch.cuda.is_available() else workload.host_limit
    finder = BatchFinder(memory_limit=limit, worst_case=workload.worst_case)
    trainer_for([finder], 1).fit(module_for(name))
    plan = finder.plan
    assert plan is not None
    assert plan.memory is not None
    tried = [trial.batch_size for trial in plan.trials]
    rows = [
        {
            "batch_size": size,
            "predicted_bytes": plan.memory.predict_bytes(size),
            "upper_bytes": plan.memory.upper_bytes(size),
        }
        for size in unprobed_sizes(plan.batch_size, tried)
    ]
    chosen = {
        "batch_size": plan.batch_size,
        "predicted_bytes": plan.predicted_peak_bytes,
        "upper_bytes": plan.upper_peak_bytes,
    }
    return {
        "chosen": plan.batch_size,
        "limited_by": plan.limited_by,
        "limit_bytes": plan.limit_bytes,
        "probed_peak_bytes": plan.measured_peak_bytes,
        "smallest_held_bytes": min(trial.held_bytes for trial in plan.trials),
        "tried": tried,
        "rows": [*rows, chosen],
    }


def largest_samples(module: LightningModule, batch_size: int) -> DataLoader[Any]:
    """The module's own loader, but every sample is the largest of its data set."""
    loader = module.train_dataloader()
    data = loader.dataset
    largest = max((data[index] for index in range(min(len(data), LOOKED_AT))), key=lambda sample: sample[0].numel())
    repeated = RandomSamples(lambda generator: largest, batch_size * STEPS)
    return DataLoader(repeated, batch_size=batch_size, collate_fn=loader.collate_fn)


def train(name: str, batch_size: int) -> dict[str, Any]:
    """Train some steps at a fixed size in this process; the peak in bytes."""
    profiler = MemoryProfiler(csv=False)
    module = module_for(name, batch_size)
    loader = largest_samples(module, batch_size) if WORKLOADS[name].worst_case else None
    trainer_for([profiler], STEPS).fit(module, train_dataloaders=loader)
    assert profiler.summary is not None
    return {"peak_bytes": profiler.summary.peak_reserved_bytes or profiler.summary.peak_bytes}


def attempt(*arguments: str) -> dict[str, Any]:
    """The answer of a fresh process; where it has none, an ``error`` that says how it ended."""
    try:
        return in_fresh_process(MODULE, *arguments)
    except subprocess.TimeoutExpired as error:
        return {"error": f"no end after {error.timeout:g} s"}
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:]
        return {"error": f"the process ended with {error.returncode}: {''.join(last)}"}


def compare(names: Sequence[str], repeats: int = 1) -> dict[str, Any]:
    """Workload -> its searches, each with a row for each size: what was predicted and what was measured, in bytes."""
    results: dict[str, Any] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            found = attempt("--search", name)
            for row in found.get("rows", []):
                trained = attempt("--train", name, str(row["batch_size"]))
                row["measured_bytes"], row["error"] = trained.get("peak_bytes"), trained.get("error")
            results[name].append(found)
            print(f"{name}: {found.get('chosen') or found['error']}", file=sys.stderr)
    return results


def table(results: dict[str, Any]) -> str:
    """The results as Markdown, a line for each workload; what failed follows as notes."""
    lines, said = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)], []
    everything: list[dict[str, float]] = []
    for name, searches in results.items():
        ended = [found for found in searches if "rows" in found]
        said += [f"- {name}, search: {found['error']}" for found in searches if "rows" not in found]
        predictions = [one for found in ended for one in compared(found)]
        everything += predictions
        chosen = ", ".join(f"{found['chosen']} ({found['limited_by'].replace('_', ' ')})" for found in ended)
        limit = f"{ended[0]['limit_bytes'] / MIB:,.0f}" if ended else "unknown"
        held = [found["rows"][-1]["measured_bytes"] for found in ended]
        peaks = ", ".join("died" if peak is None else f"{peak / MIB:,.0f}" for peak in held)
        lines.append(
            f"| {name} | {chosen or 'none: see below'} | {limit} | {peaks or 'none'} | {figures(predictions)} |"
        )
        for found in ended:
            for row in found["rows"]:
                said += [f"- {name}, training with {row['batch_size']}: {row['error']}"] if row["error"] else []
                said += [f"- {name}, {row['batch_size']}: no prediction"] if row["predicted_bytes"] is None else []
    return "\n".join([*lines, f"| all | | | | {figures(everything)} |", *([""] if said else []), *said])


def compared(found: dict[str, Any]) -> list[dict[str, float]]:
    """For each prediction of a search whose truth is known: its error, and where the truth lies."""
    predictions = []
    for row in found["rows"]:
        predicted, measured, upper = row["predicted_bytes"], row["measured_bytes"], row["upper_bytes"]
        if predicted is None or measured is None:
            continue
        grown = measured - found["smallest_held_bytes"]
        one = {"error": predicted / measured - 1, "above": measured > upper, "below": measured < 2 * predicted - upper}
        predictions.append({**one, **({"of_growth": (predicted - measured) / grown} if grown > 0 else {})})
    return predictions


def figures(predictions: Sequence[dict[str, float]]) -> str:
    """The columns of a line from "predictions" on."""
    if not predictions:
        return "0" + " | none" * 7
    errors = [one["error"] for one in predictions]
    growths = [abs(one["of_growth"]) for one in predictions if "of_growth" in one]
    count, low = len(predictions), sum(error < 0 for error in errors)
    above, below = (int(sum(one[side] for one in predictions)) for side in ("above", "below"))
    of_growth = f"{statistics.median(growths):.1%}" if growths else "none"
    return (
        f"{count} | {statistics.median(map(abs, errors)):.1%} | {max(errors, key=abs):+.1%} | {of_growth} "
        f"| {low / count:.0%} | {above / count:.0%} | {below / count:.0%} | {1 - (above + below) / count:.0%}"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", metavar="NAME", help="(internal) search one workload in this process")
    parser.add_argument("--train", nargs=2, metavar=("NAME", "SIZE"), help="(internal) train one in this process")
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS), choices=WORKLOADS, help="these workloads only")
    parser.add_argument("--repeats", type=int, default=1, help="searches of each, with their own trainings")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    seed_everything(0, verbose=False)
    if arguments.search:
        answer(search(arguments.search))
    elif arguments.train:
        answer(train(arguments.train[0], int(arguments.train[1])))
    else:
        results = compare(arguments.only, arguments.repeats)
        report(machine(), table(results), results, arguments.json)


if __name__ == "__main__":
    main()
