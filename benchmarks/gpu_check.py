"""Everything that a CUDA device has to confirm.

The check takes under ten minutes, and needs no network connection.

    # all parts; writes benchmarks/results/<device>/gpu_check.*
    python -m benchmarks.gpu_check
    # these parts; prints the tables only
    python -m benchmarks.gpu_check --only search compile

Parts, each in a process with a time budget:

- tests: ``tests/gpu`` (also: MemoryProfiler never waits for the device) with four configurations of
  the allocator;
- search: a search, training, and the largest size found by bisection, for four networks at two
  limits;
- overhead: time inside the hooks of monitoring callbacks;
- compile: a search and training with ``torch.compile``, without and with CUDA graphs.

What fails or takes too long is a row of its table, and the rest runs anyway. The files are written
again after each part. The JSON file has tracebacks and the output of failed tests, too.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from benchmarks.common import (
    ROOT,
    command_line,
    emit,
    in_fresh_process,
    machine,
    markdown,
    one_line,
    results_file,
    write_results,
)

PARTS = {"tests": 205.0, "search": 160.0, "overhead": 35.0, "compile": 80.0}
"""Part -> its time budget in seconds."""


def run_part(part: str) -> None:
    """Run the cases of a part in this process.

    The rows are sent to the parent process as they are measured.
    """
    rows = []
    for case, measure in getattr(import_module("benchmarks.gpu_parts"), part)():
        emit(running=case)
        try:
            rows.append({**case, **measure()})
        # A case may fail with any error; the error is its result, and the other cases run anyway.
        except Exception as error:  # noqa: BLE001
            rows.append({**case, "error": one_line(error), "log": traceback.format_exc()})
        emit(rows=rows, running={})
    emit(is_complete=True)


def block_to_paste(text: str) -> str:
    """The tables between two lines, for an issue."""
    line = "-" * 80
    return f"{line}\n{text}\n{line}\nPlease paste the block between the two lines into an issue."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 2 without a CUDA device, 1 if something failed."""
    parser = command_line(__doc__, PARTS)
    # With this hidden option a fresh process runs one part itself, and starts no other process.
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA device, and torch finds none.", file=sys.stderr)
        return 2
    if chosen.part:
        emit(head=machine(), path=str(results_file("gpu_check")))
        run_part(chosen.part)
        return 0
    results: dict[str, list[dict[str, Any]]] = {}
    head = "unknown device"
    path = "benchmarks/results/unknown-device/gpu_check.json"
    text = ""
    for part in chosen.only:
        begin = time.monotonic()
        found = in_fresh_process(
            "benchmarks.gpu_check", "--part", part, timeout_seconds=PARTS[part]
        )
        rows = results[part] = found.get("rows", [])
        # A complete process that is only slow to end has measured everything, and is no error.
        if found["error"] and not found.get("is_complete"):
            rows.append({**found.get("running", {}), "error": found["error"]})
        print(f"{part}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        # CUDA starts only in the fresh process, because a device may allow one process at a time.
        head = found.get("head", head)
        path = found.get("path", path)
        tables = (f"## {part}\n\n{markdown(rows, without='log')}" for part, rows in results.items())
        text = "\n\n".join([head, *tables])
        if chosen.only == list(PARTS):
            write_results(ROOT / path, text, results)
    print(block_to_paste(text))
    return int(any("error" in row for rows in results.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
