"""Searches on a simulated CUDA allocator, compared with the largest size that trains: one table.

Run ``python -m benchmarks.simulated_cuda`` for the whole table, which is also written to ``benchmarks/results``, or
``--only "ResNet-18 SGD" --gigabytes 8`` for some of its rows.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
import warnings
from pathlib import Path

import torch

from benchmarks.large_networks import NETWORKS
from tests.simulated_cuda.device import SimulatedCuda
from tests.simulated_cuda.search import search
from tests.simulated_cuda.trace import Trace, trace_of

RESULT = Path(__file__).parent / "results" / "simulated_cuda.md"
NAMES = [network.name for network in NETWORKS]
CAPACITIES = [8, 24, 80]
LIMITS = (1.0, 0.9)
HEADER = (
    "network",
    "GB",
    "limit",
    "found",
    "of quiet",
    "of capacity",
    "out of memory",
    "trains",
    "trains, other sizes",
    "steps at size",
    "sizes",
    "tried",
    "s",
)


def trains(trace: Trace, limit_bytes: int, size: int, *, quietly: bool = False, num_steps: int = 200) -> bool:
    """Whether a new process trains; ``quietly``: without an allocator retry after the first step."""
    device = SimulatedCuda(trace, limit_bytes)
    retries = 0
    try:
        for step in range(num_steps):
            device.train_step(size)
            retries = device.num_alloc_retries if step == 0 else retries
            if quietly and device.num_alloc_retries > retries:
                return False
    except torch.OutOfMemoryError:
        return False
    return True


def largest(trace: Trace, limit_bytes: int, *, quietly: bool = False) -> int:
    """The largest size that trains within ``limit_bytes``; ``quietly``: as do 1.5 and 3 % smaller ones."""

    def passes(size: int) -> bool:
        sizes = (max(1, round(share * size)) for share in ((1.0, 0.985, 0.97) if quietly else (1.0,)))
        return all(trains(trace, limit_bytes, each, quietly=quietly) for each in sizes)

    high = 1
    while trains(trace, limit_bytes, high, num_steps=1):
        high *= 2
    low = high // 4 if passes(max(high // 4, 1)) else 0
    while high - low > max(1, low // 500):  # to 0.2 %
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def measure(name: str, gigabytes: int, limit: float) -> tuple[str, ...]:
    """One row of the table."""
    trace, capacity_bytes, begin = trace_of(name), gigabytes * 10**9, time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = search(SimulatedCuda(trace, capacity_bytes), memory_limit=limit)
    seconds, size = time.perf_counter() - begin, found.plan.batch_size
    quiet = largest(trace, int(min(limit, 0.95) * capacity_bytes), quietly=True)
    trained = largest(trace, capacity_bytes)
    tried = (f"{t.batch_size}{t.kind[0]}{'' if t.outcome == 'ok' else '!'}" for t in found.plan.trials)
    return (
        name,
        str(gigabytes),
        str(limit),
        str(size),
        f"{size / max(1, quiet):.3f}",
        f"{size / max(1, trained):.3f}",
        str(found.num_ooms),
        "yes" if found.trains else "no",
        "yes" if found.trains_with_varied_sizes else "no",
        str(found.steps_at_size),
        str(found.sizes),
        " ".join(tried),
        f"{seconds:.0f}",
    )


def main() -> None:
    """Print each row; write the table where it is complete."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="networks")
    parser.add_argument("--gigabytes", nargs="+", type=int, default=CAPACITIES, help="capacities of the device")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    print("\n".join(lines))
    for name in chosen.only:
        for gigabytes in chosen.gigabytes:
            for limit in LIMITS:
                lines.append("| " + " | ".join(measure(name, gigabytes, limit)) + " |")
                print(lines[-1], flush=True)
    if (chosen.only, chosen.gigabytes) == (NAMES, CAPACITIES):
        text = (
            "`p`: probe, `r`: rehearsal, `!`: did not fit. Quiet: trains without an allocator retry at the limit.\n\n"
        )
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text("# Searches on a simulated CUDA allocator\n\n" + text + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
