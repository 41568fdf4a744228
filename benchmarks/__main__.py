"""Side by side with other tools, on this machine: search, prediction, overhead and trace.

    python -m benchmarks                                # everything; writes benchmarks/results/DEVICE/DATE.json and .md
    python -m benchmarks --parts search --only GAN      # one workload: adds to what the day's file has already
    python -m benchmarks --quick                        # one search and one training each, no oracle

Every process is fresh, and what it measured is written at once: the same command again goes on where an interrupted
one was. The package under test is a wheel, built from this tree. Peers come with ``pip install -c constraints.txt
".[peers]"``; what cannot be imported is written as that. On CUDA the same command runs the same comparison under a
share of the device's memory, with two models at their real sizes too (GPT-2 asks for ``transformers``).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import prediction, results, search, search_table, trace, wheel
from benchmarks.caps import caps_here
from benchmarks.common import PACKAGE_VARIABLE, ROOT, device_folder, environment, machine
from benchmarks.oracle import AGREEING
from benchmarks.survive import STEPS
from benchmarks.ways import FIRST_SIZE, STEPS_PER_ATTEMPT, TITLES, WAYS
from benchmarks.workloads import WORKLOADS

PARTS = ("search", "prediction", "overhead", "trace")
NAMED = ("lightning", "torch", "accelerate", "toma")

HOW = f"""\
Each search is in a fresh process, the ways taking turns; medians, and the range where values differ. "1 of 3" after a
figure: so many searches had one, the others found no size. The oracle is the largest size at which {STEPS} training
steps survive in {AGREEING} of {AGREEING} fresh processes under the same cap. "samples run / size" counts every sample
that `training_step` was given, aborted steps too, over the size found; with AutoBatch's method, that its forward passes
were given. Of a search that was killed nothing more is known.

- accelerate's `find_executable_batch_size` and toma's `simple.batch` start at {FIRST_SIZE} (as in toma's documentation;
  accelerate's default is 128), never look above it, and train {STEPS_PER_ATTEMPT} steps of a new module at each size.
- Lightning's `BatchSizeFinder` has `init_val=2` and its defaults.
- AutoBatch's method is stated anew in `benchmarks/autobatch.py`; the original returns 16 on a CPU.
- `ragged` has samples of different lengths: BatchFinder is told `worst_case="longest"`, the others have no such
  argument.
- `GAN` steps two optimizers by hand."""

CAP_HEADINGS = {
    "rlimit": "Search under RLIMIT_DATA: going over raises",
    "cgroup": "Search in a memory control group: going over is SIGKILL",
    "device": "Search under a share of the device's memory",
}


def _overhead() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "overhead.json"
        command = [sys.executable, "-P", "-m", "benchmarks.overhead", "--json", str(path)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment())
        return {"table": done.stdout.strip(), **json.loads(path.read_text())}


def _head() -> str:
    versions = []
    for name in NAMED:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    return f"{machine()}; {', '.join(versions)}"


def written(found: dict[str, Any]) -> str:
    """The results of a day as Markdown."""
    lines = ["# Side by side", ""]
    for run in found["runs"]:
        package = f"lightning-batchmem {run['version']} ({run['wheel']}, commit {run['commit']})"
        lines.append(
            f"- {run['begin']}: {package}; {run['machine']}; `python -m benchmarks {run['arguments']}`".rstrip()
        )
    for kind, record in found["search"].items():
        lines += ["", f"## {CAP_HEADINGS[kind]}"]
        if record and "unavailable" not in record:
            lines += ["", search_table.summary(record, TITLES)]
        lines += ["", search_table.table(record, TITLES)]
    if found["search"]:
        lines += ["", HOW]
    if "prediction" in found:
        lines += ["", "## Prediction", "", prediction.table(found["prediction"])]
    if "overhead" in found:
        lines += ["", "## Overhead of monitoring", "", found["overhead"]["table"]]
    if "trace" in found:
        lines += ["", "## Trace", "", trace.table(found["trace"])]
    return "\n".join(lines) + "\n"


def run(arguments: argparse.Namespace, path: Path, package: dict[str, str]) -> None:
    """Measure what was asked for, writing as it goes."""
    found = results.load(path)

    def save() -> None:
        results.save(path, found)
        path.with_suffix(".md").write_text(written(found))

    begin = datetime.datetime.now().isoformat(timespec="minutes")
    told = {key: value for key, value in package.items() if key != "package"}
    found["runs"].append({"begin": begin, "machine": _head(), "arguments": " ".join(sys.argv[1:]), **told})
    if arguments.redo:
        results.forget(found, arguments.only, arguments.ways, arguments.cap)
    repeats = 1 if arguments.quick else arguments.repeats
    if "search" in arguments.breakdown:
        trainings = 1 if arguments.quick else arguments.trainings
        extent = search.Extent(repeats, trainings, arguments.timeout, has_oracle=not arguments.quick)
        for kind in arguments.cap:
            record = found["search"].setdefault(kind, {})
            search.compare(record, arguments.only, arguments.ways, kind, extent, save)
    if "prediction" in arguments.breakdown:
        for name in arguments.only:  # one by one, for what is written if the next is interrupted
            if len(found.get("prediction", {}).get(name, [])) >= repeats and not arguments.redo:
                continue
            found["prediction"] = results.merge(
                found.get("prediction", {}), prediction.compare([name], repeats=repeats)
            )
            save()
    if "overhead" in arguments.breakdown and ("overhead" not in found or arguments.redo):
        found["overhead"] = _overhead()
        save()
    if "trace" in arguments.breakdown and ("trace" not in found or arguments.redo):
        found["trace"] = trace.compare()
        save()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="default: all")
    parser.add_argument("--only", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), help="these workloads")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="these ways to search")
    parser.add_argument("--cap", nargs="+", default=list(caps_here()), choices=caps_here(), help="default: all")
    parser.add_argument("--repeats", type=int, default=3, help="searches in each way; default: %(default)s")
    parser.add_argument("--trainings", type=int, default=3, help="at each size that was found; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="one search, one training, no oracle: to see that it runs")
    parser.add_argument(
        "--redo", action="store_true", help="measure anew what the day's file has already (not trainings and oracles)"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each process; longer is a failure")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="default: %(default)s")
    arguments = parser.parse_args()
    path = arguments.results / device_folder() / f"{datetime.date.today().isoformat()}.json"
    with tempfile.TemporaryDirectory() as directory:
        package = wheel.install(Path(directory))
        os.environ[PACKAGE_VARIABLE] = package["package"]
        run(arguments, path, package)
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
