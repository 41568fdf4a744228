"""Everything that a CUDA device has to confirm.

The check takes under ten minutes, and needs no network connection.

    # all parts; writes benchmarks/results/<device>/gpu_check.md
    python -m benchmarks.gpu_check
    # these parts; prints the tables only
    python -m benchmarks.gpu_check --only search compile

Parts, each in a process with a time budget; what a part leaves of it is added to the next one:

- overhead: time inside the hooks of monitoring callbacks;
- compile: a search and training with ``torch.compile``, without and with CUDA graphs;
- tests: ``tests/gpu`` (also: MemoryProfiler never waits for the device) with four configurations of
  the allocator;
- search: a search, training, and the largest size found by bisection, for four networks at two
  limits.

What fails is a row of its table with an error, and the rest runs anyway. A case that cannot end in
time is a row with a note, which says why. The file is written again after each part. It has
tracebacks and the output of failed tests, too.

On a machine without a device, start it with ``tests/cuda_stub/run``, whose README has the command.
Rows that measure a speed then only show that they run.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
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
    write_page,
)

PARTS = {"overhead": 40.0, "compile": 110.0, "tests": 245.0, "search": 155.0}
"""Part -> its time budget in seconds; cheap parts come first."""

RESERVE_SECONDS = 5.0
"""A case should end so long before its part is cut off. Cases with less time do not start."""

OVER = "not run: the time of this part is over"


def run_part(part: str, end: float) -> None:
    """Run the cases of a part in this process, which is killed at a time (``time.time``).

    The rows are sent to the parent process as they are measured.
    """
    end -= RESERVE_SECONDS
    rows = []
    cases = list(getattr(import_module("benchmarks.gpu_parts"), part)())
    for number, (case, measure) in enumerate(cases):
        emit(running=case, waiting=[other for other, _ in cases[number + 1 :]])
        if end - time.time() < RESERVE_SECONDS:
            rows.append({**case, "note": OVER})
        else:
            rows.append({**case, **measured(measure, end)})
        emit(rows=rows, running={})
    emit(is_complete=True)


def measured(measure: Callable[[float], dict[str, Any]], end: float) -> dict[str, Any]:
    try:
        return measure(end)
    # A case may fail with any error; the error is its result, and the other cases run anyway.
    except Exception as error:  # noqa: BLE001
        return {"error": one_line(error), "log": traceback.format_exc()}


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a part, from what its process has sent until its end."""
    rows: list[dict[str, Any]] = found.get("rows", [])
    # A complete process that is only slow to end has measured everything, and is no error.
    if found["error"] and not found.get("is_complete"):
        rows.append({**found.get("running", {}), "error": found["error"]})
        rows += [{**case, "note": OVER} for case in found.get("waiting", [])]
    return rows


def logs_of(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The tracebacks and the outputs of what failed."""
    logs = [(part, row["log"]) for part, rows in results.items() for row in rows if "log" in row]
    return [f"## {part}: what failed\n\n```text\n{log}\n```" for part, log in logs]


def block_to_paste(text: str) -> str:
    """The tables between two lines, for an issue."""
    line = "-" * 80
    return f"{line}\n{text}\n{line}\nPlease paste the block between the two lines into an issue."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 2 without a CUDA device, 1 if something failed."""
    parser = command_line(__doc__, PARTS)
    # With these hidden options a fresh process runs one part itself, and starts no other part.
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA device, and torch finds none.", file=sys.stderr)
        return 2
    if chosen.part:
        emit(head=machine(), path=str(results_file("gpu_check")))
        run_part(chosen.part, chosen.end)
        return 0
    results: dict[str, list[dict[str, Any]]] = {}
    head = ""
    path = "benchmarks/results/unknown-device/gpu_check.md"
    text = ""
    end = time.time()
    for part in (part for part in PARTS if part in chosen.only):
        begin = time.time()
        end += PARTS[part]
        found = in_fresh_process(
            "benchmarks.gpu_check",
            "--part",
            part,
            "--end",
            str(end),
            timeout_seconds=round(end - begin),
        )
        results[part] = rows_of(found)
        print(f"{part}: {time.time() - begin:.0f} s", file=sys.stderr, flush=True)
        # CUDA starts only in the fresh process, because a device may allow one process at a time.
        # The file that is written below changes the work tree, so that the first head is kept.
        head = head or found.get("head", "")
        path = found.get("path", path)
        tables = (f"## {part}\n\n{markdown(rows, without='log')}" for part, rows in results.items())
        text = "\n\n".join([head or "unknown device", *tables])
        if set(chosen.only) == set(PARTS):
            write_page(ROOT / path, "\n\n".join([text, *logs_of(results)]))
    print(block_to_paste(text))
    return int(any("error" in row for rows in results.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
