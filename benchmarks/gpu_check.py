"""Everything that a CUDA device has to confirm, in under ten minutes and without a network connection.

    python -m benchmarks.gpu_check                        # all parts; writes benchmarks/results/<device>/gpu_check.*
    python -m benchmarks.gpu_check --only simulator sync  # these parts; prints the tables only

Parts, each in a process with a time budget:

- tests: ``tests/gpu`` with four configurations of the allocator, each in a process;
- search: a search, training, and the largest size found by bisection, for four networks at two limits;
- simulator: peaks of ResNet-18 on the device and in ``tests/simulated_cuda``;
- overhead: time inside the hooks of monitoring callbacks;
- sync: whether MemoryProfiler waits for the device;
- compile: a search and training with ``torch.compile``, without and with CUDA graphs.

What fails or takes too long is a row of its table, and the rest runs anyway. The files are written again after each
part. The JSON file has tracebacks and the output of failed tests, too.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, emit, in_fresh_process, machine, markdown, one_line, results_file, write_results

PARTS = {"tests": 205.0, "search": 160.0, "simulator": 40.0, "overhead": 35.0, "sync": 30.0, "compile": 80.0}
"""Part -> its time budget in seconds."""


def run_part(part: str) -> None:
    """Run the cases of a part in this process, and send the rows to the parent process as they are measured."""
    rows = []
    for case, measure in getattr(import_module("benchmarks.gpu_parts"), part)():
        emit(running=case)
        try:
            rows.append({**case, **measure()})
        except Exception as error:  # noqa: BLE001 - the other cases run anyway
            rows.append({**case, "error": one_line(error), "log": traceback.format_exc()})
        emit(rows=rows, running={})
    emit(is_complete=True)


def part_in_process(part: str) -> dict[str, Any]:
    """Run a part in a new process: its ``rows``, and ``head`` and ``path`` of the files."""
    begin = time.monotonic()
    found = in_fresh_process("benchmarks.gpu_check", "--part", part, timeout_seconds=PARTS[part])
    rows = found.setdefault("rows", [])
    if found["error"] and not found.get("is_complete"):  # a process that is slow to end has measured everything
        rows.append({**found.get("running", {}), "error": found["error"]})
    print(f"{part}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return found


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """One Markdown table for each part, without logs."""
    short = {part: [{key: row[key] for key in row if key != "log"} for row in rows] for part, rows in results.items()}
    return "\n\n".join(f"## {part}\n\n{markdown(rows)}" for part, rows in short.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 2 without a CUDA device, 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts, without writing files")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)  # in this process
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA device, and torch finds none.", file=sys.stderr)
        return 2
    if chosen.part:
        warnings.filterwarnings("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        emit(head=machine(), path=str(results_file("gpu_check")))
        run_part(chosen.part)
        return 0
    results: dict[str, list[dict[str, Any]]] = {}
    known: dict[str, Any] = {
        "head": "unknown device",
        "path": ROOT / "benchmarks/results/unknown-device/gpu_check.json",
    }
    for part in chosen.only or PARTS:
        known |= part_in_process(part)  # only there CUDA starts: a device may allow one process at a time
        results[part] = known["rows"]
        if chosen.only is None:
            write_results(Path(known["path"]), f"{known['head']}\n\n{table(results)}", results)
    print(f"{known['head']}\n\n{table(results)}")
    return int(any("error" in row for rows in results.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
