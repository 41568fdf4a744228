"""Does a step on a simulated GPU need the memory of a step with real values? One table.

Each project of ``simulated_projects`` makes one step on the host, where values are real and
``LiveStorages`` counts the live bytes, and one on the stub of the CUDA runtime, where a dispatch
mode gives the values that the program reads, and the allocator counts the requested bytes. Both are
the second of two steps. The command starts itself on the stub for the second half.
``in kernels`` is how much of the simulated peak ``LiveStorages`` does not see: buffers that kernels
of CUDA request for themselves, as a real device does.

A row is right if the peaks are within 5 %, or if the simulated one is higher and a line of the
project is named as an assumption.

    # the whole table; about a minute on one core; an environment with a CUDA build of torch
    python -m benchmarks.simulated_values
    # some of its rows
    python -m benchmarks.simulated_values --only graphs ctc
    # without values: which of the projects does this table judge?
    SIMULATED_VALUES_BARE=1 python -m benchmarks.simulated_values
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import traceback
from typing import Any

import torch

from benchmarks.common import ROOT, command_line, markdown, one_line, report
from benchmarks.simulated_projects import PROJECTS, SIZES, Project
from lightning_batchmem.devices.peaks import LiveStorages
from lightning_batchmem.simulated_gpu.values import Values

MIB = 2**20
TOLERANCE = 0.05
ON_STUB = "SIMULATED_VALUES_ON_STUB"
"""Environment variable of the process that runs on the stub."""
BARE = "SIMULATED_VALUES_BARE"
"""Environment variable with which no values are given there."""


def live_peak_bytes(made: Project, device_type: str) -> int:
    """The live bytes at the peak of the second of two steps."""
    live = LiveStorages(device_type=device_type)
    with live:
        made.step()
        live.reset_peak()
        made.step()
    return live.peak().allocated_bytes


def real_peak_bytes(name: str, size: int) -> dict[str, Any]:
    """The live bytes at the peak of the second step on the host."""
    torch.manual_seed(0)
    made = PROJECTS[name](size, torch.device("cpu"))
    start = time.process_time()
    peak_bytes = live_peak_bytes(made, "cpu")
    return {"bytes": peak_bytes, "seconds": time.process_time() - start}


def simulated_peak_bytes(name: str, size: int) -> dict[str, Any]:
    """The requested bytes at the peak of the second step on the stub, and what is assumed."""
    torch.manual_seed(0)
    gc.collect()
    before = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
    values = Values()
    if not os.environ.get(BARE):
        values.enter()
    start = time.process_time()
    try:
        made = PROJECTS[name](size, torch.device("cuda"))
        made.step()
        torch.cuda.reset_peak_memory_stats()
        made.step()
        peak_bytes = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        live_bytes = live_peak_bytes(made, "cuda")
    # A project that ends with an error is a row of the table.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return {"error": one_line(error)}
    finally:
        values.exit()
    return {
        "bytes": peak_bytes,
        "live bytes": live_bytes,
        "seconds": time.process_time() - start,
        "assumptions": values.assumptions,
    }


def run_on_stub(names: list[str]) -> dict[str, Any]:
    """Run this command on the stub, and return the peaks that it prints."""
    variables = {
        **os.environ,
        ON_STUB: "1",
        "CUDA_STUB_GIB": "64",
        # Workspaces of products are no part of the question.
        "CUBLAS_WORKSPACE_CONFIG": ":0:0",
        "CUBLASLT_WORKSPACE_SIZE": "0",
    }
    launcher = str(ROOT / "tests" / "cuda_stub" / "run")
    command = [launcher, sys.executable, "-m", "benchmarks.simulated_values", "--only", *names]
    output = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def is_right(row: dict[str, Any]) -> bool:
    """Whether the peaks are equal, or the simulated one is higher and says why."""
    if row["simulated MiB"] is None:
        return False
    difference = row["simulated MiB"] / row["real MiB"] - 1
    is_named = bool(row["assumed"])
    return abs(difference) <= TOLERANCE or (difference > 0 and is_named)


def main() -> None:
    parser = command_line(__doc__, PROJECTS, writes=True)
    chosen = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    cells = [(name, size) for name in chosen.only for size in SIZES[name]]
    if os.environ.get(ON_STUB):
        results = {f"{name} {size}": simulated_peak_bytes(name, size) for name, size in cells}
        print(json.dumps(results))
        return
    simulated = run_on_stub(chosen.only)
    rows = []
    for name, size in cells:
        real = real_peak_bytes(name, size)
        found = simulated[f"{name} {size}"]
        row: dict[str, Any] = {
            "project": name,
            "size": size,
            "real MiB": round(real["bytes"] / MIB, 1),
            "simulated MiB": round(found["bytes"] / MIB, 1) if "bytes" in found else None,
        }
        if "bytes" in found:
            row["difference %"] = f"{100 * (found['bytes'] / real['bytes'] - 1):+.1f}"
            in_kernels = found["bytes"] - found["live bytes"]
            row["in kernels MiB"] = round(in_kernels / MIB, 1)
        row["assumed"] = found.get("error") or "; ".join(found["assumptions"])
        row["CPU s"] = f"{real['seconds']:.1f}, {found.get('seconds', 0):.1f}"
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    right = {
        name: all(is_right(row) for row in rows if row["project"] == name) for name in chosen.only
    }
    wrong = [name for name, is_good in right.items() if not is_good]
    notes = [
        f"{sum(right.values())} of {len(right)} projects are right at both sizes;"
        f" the others: {', '.join(wrong) or 'none'}",
        "CPU s: of two steps, real, and of four, simulated",
    ]
    report("simulated_values", markdown(rows, notes), write=chosen.write)


if __name__ == "__main__":
    main()
