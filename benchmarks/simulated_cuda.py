"""Searches on a simulated CUDA allocator, compared with the largest size that trains: one table.

Kinds of trials: `p`: probe, `r`: rehearsal, `!`: did not fit. Quiet: trains without an allocator
retry at the limit.

    # the whole table; minutes
    python -m benchmarks.simulated_cuda
    # some of its rows
    python -m benchmarks.simulated_cuda --only "ResNet-18 SGD" --gigabytes 8
    # also to benchmarks/results
    python -m benchmarks.simulated_cuda --write
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from typing import Any

import torch

from benchmarks.common import command_line, markdown, report
from benchmarks.large_networks import NETWORKS
from benchmarks.search import largest_that
from tests.helpers.simulated_cuda.device import SimulatedCuda
from tests.helpers.simulated_cuda.search import search
from tests.helpers.simulated_cuda.trace import Trace, trace_of

LIMITS = (1.0, 0.9)


def trains(trace: Trace, limit_bytes: int, size: int, *, quietly: bool) -> bool:
    """Whether a new process trains at this size.

    With ``quietly`` the allocator must not retry after the first step.
    """
    device = SimulatedCuda(trace, limit_bytes)
    retries = 0
    try:
        for step in range(200):
            device.train_step(size)
            retries = device.num_alloc_retries if step == 0 else retries
            if quietly and device.num_alloc_retries > retries:
                return False
    except torch.OutOfMemoryError:
        return False
    return True


def largest(trace: Trace, limit_bytes: int, start: int, *, quietly: bool = False) -> int:
    """The largest size that trains within ``limit_bytes``.

    With ``quietly`` it trains without an allocator retry, as do 1.5 and 3 % smaller sizes.
    """

    def passes(size: int) -> bool:
        shares = (1.0, 0.985, 0.97) if quietly else (1.0,)
        sizes = (max(1, round(share * size)) for share in shares)
        return all(trains(trace, limit_bytes, each, quietly=quietly) for each in sizes)

    return largest_that(passes, start, growth=1.1, resolution=0.002)


def measure(name: str, gigabytes: int, limit: float) -> dict[str, Any]:
    trace = trace_of(name)
    capacity_bytes = gigabytes * 10**9
    begin = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = search(SimulatedCuda(trace, capacity_bytes), memory_limit=limit)
    seconds = time.perf_counter() - begin
    size = found.plan.batch_size
    quiet = largest(trace, int(min(limit, 0.95) * capacity_bytes), size, quietly=True)
    tried = (
        f"{t.batch_size}{t.kind[0]}{'' if t.outcome == 'ok' else '!'}" for t in found.plan.trials
    )
    return {
        "network": name,
        "GB": gigabytes,
        "limit": limit,
        "found": size,
        "of quiet": f"{size / max(1, quiet):.3f}",
        "of capacity": f"{size / max(1, largest(trace, capacity_bytes, size)):.3f}",
        "out of memory": found.num_ooms,
        "trains": "yes" if found.trains else "no",
        "trains, other sizes": "yes" if found.trains_with_varied_sizes else "no",
        "steps at size": found.steps_at_size,
        "sizes": found.sizes,
        "tried": " ".join(tried),
        "s": f"{seconds:.0f}",
    }


def main() -> None:
    parser = command_line(__doc__, [network.name for network in NETWORKS], writes=True)
    parser.add_argument(
        "--gigabytes", nargs="+", type=int, default=[8, 24, 80], help="capacities of the device"
    )
    chosen = parser.parse_args()
    rows = list[dict[str, Any]]()
    for name in chosen.only:
        for gigabytes in chosen.gigabytes:
            for limit in LIMITS:
                rows.append(measure(name, gigabytes, limit))
                print(rows[-1], file=sys.stderr, flush=True)
    report("simulated_cuda", markdown(rows), rows, write=chosen.write)


if __name__ == "__main__":
    main()
