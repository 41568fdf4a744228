"""Searches on a simulated CUDA allocator, compared with the largest size that trains: one table.

Run ``python -m benchmarks.simulated_cuda [networks] [gigabytes]``, both separated by commas.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
import warnings
from pathlib import Path

from tests.simulated_cuda.device import SimulatedCuda
from tests.simulated_cuda.networks import NETWORKS
from tests.simulated_cuda.oracle import largest_quiet, largest_trained
from tests.simulated_cuda.search import search
from tests.simulated_cuda.trace import trace_of

RESULT = Path(__file__).parent / "results" / "simulated_cuda.md"
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


def measure(name: str, gigabytes: int, limit: float) -> tuple[str, ...]:
    """One row of the table."""
    trace, capacity_bytes, begin = trace_of(name), gigabytes * 10**9, time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = search(SimulatedCuda(trace, capacity_bytes), memory_limit=limit)
    seconds, size = time.perf_counter() - begin, found.plan.batch_size
    quiet = largest_quiet(trace, int(min(limit, 0.95) * capacity_bytes))
    trained = largest_trained(trace, capacity_bytes)
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
    """Run all searches, print each row, and write the table."""
    warnings.simplefilter("ignore")
    names = sys.argv[1].split(",") if len(sys.argv) > 1 else [network.name for network in NETWORKS]
    capacities = [int(text) for text in sys.argv[2].split(",")] if len(sys.argv) > 2 else [8, 24, 80]
    lines = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    for name in names:
        for gigabytes in capacities:
            for limit in LIMITS:
                lines.append("| " + " | ".join(measure(name, gigabytes, limit)) + " |")
                print(lines[-1], flush=True)
    text = "`p`: probe, `r`: rehearsal, `!`: did not fit. Quiet: trains without an allocator retry at the limit.\n\n"
    RESULT.write_text("# Searches on a simulated CUDA allocator\n\n" + text + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
