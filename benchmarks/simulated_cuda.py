"""Searches on a simulated CUDA allocator, compared with the largest size that trains: one table.

Kinds of trials: `p`: probe, `r`: rehearsal, `!`: did not fit. Quiet: trains without an allocator
retry at the limit. Died: trainings of 200 steps at the size that ran out of memory; real: each 20th
batch is smaller, always of the same size; random: each fifth batch has another smaller size.

    # the whole table; minutes
    python -m benchmarks.simulated_cuda
    # some of its rows
    python -m benchmarks.simulated_cuda --only "ResNet-18 SGD" --gigabytes 8
    # six networks of other kinds
    python -m benchmarks.simulated_cuda --held-out
    # six networks that no rule of the search was changed with
    python -m benchmarks.simulated_cuda --unseen
    # also to benchmarks/results
    python -m benchmarks.simulated_cuda --write
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Hashable
from typing import Any

import torch

from benchmarks.common import command_line, markdown, report
from benchmarks.held_out_networks import HELD_OUT_NETWORKS
from benchmarks.large_networks import NETWORKS
from benchmarks.search import largest_that
from benchmarks.unseen_networks import UNSEEN_NETWORKS
from tests.helpers.simulated_cuda.device import SimulatedCuda
from tests.helpers.simulated_cuda.search import SEEDS, search
from tests.helpers.simulated_cuda.trace import Trace, trace_of

LIMITS = (1.0, 0.9)


def trains(trace: Trace, limit_bytes: int, size: int, *, quietly: bool) -> bool:
    """Whether a new process trains at this size.

    With ``quietly`` the allocator must not retry after the first step.
    """
    device = SimulatedCuda(trace, limit_bytes)
    retries = 0
    layouts = set[Hashable]()
    try:
        for step in range(200):
            device.train_step(size)
            retries = device.num_alloc_retries if step == 0 else retries
            if quietly and device.num_alloc_retries > retries:
                return False
            layout = device.layout()
            # From an earlier layout on, equal steps do what they did before.
            if layout in layouts:
                return True
            layouts.add(layout)
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
    trace = trace_of(name, gigabytes)
    capacity_bytes = gigabytes * 10**9
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = search(SimulatedCuda(trace, capacity_bytes), memory_limit=limit)
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
        "died real": f"{found.real_deaths} of {len(SEEDS)}",
        "died random": f"{found.random_deaths} of {len(SEEDS)}",
        "of quiet": f"{size / max(1, quiet):.3f}",
        "quiet": quiet,
        "of capacity": f"{size / max(1, largest(trace, capacity_bytes, size)):.3f}",
        "out of memory": found.num_ooms,
        "trains": "yes" if found.trains else "no",
        "trains, other sizes": "yes" if found.trains_with_varied_sizes else "no",
        "steps at size": found.steps_at_size,
        "sizes": found.sizes,
        "tried": " ".join(tried),
        "s": f"{found.seconds:.0f}",
    }


def summary(rows: list[dict[str, Any]]) -> str:
    """What all searches together say, in one line."""
    trainings = len(rows) * len(SEEDS)
    died = {
        kind: sum(int(row[f"died {kind}"].split()[0]) for row in rows) / trainings
        for kind in ("real", "random")
    }
    shares = [row["found"] / max(1, row["quiet"]) for row in rows]
    near = sum(
        share >= 0.93 or row["found"] >= row["quiet"] - 1
        for share, row in zip(shares, rows, strict=True)
    )
    errors = [row["out of memory"] for row in rows]
    return (
        f"{len(rows)} searches: died real {died['real']:.1%}, died random {died['random']:.1%};"
        f" at least 0.93 of quiet or one sample below {near / len(rows):.0%},"
        f" smallest of quiet {min(shares):.3f}; most out-of-memory errors {max(errors)},"
        f" none {errors.count(0) / len(rows):.0%}"
    )


def main() -> None:
    names = [network.name for network in NETWORKS]
    held_out = [network.name for network in HELD_OUT_NETWORKS]
    unseen = [network.name for network in UNSEEN_NETWORKS]
    parser = command_line(__doc__, [*names, *held_out, *unseen], writes=True)
    parser.set_defaults(only=names)
    parser.add_argument(
        "--held-out",
        action="store_const",
        dest="only",
        const=held_out,
        help="six networks of other kinds",
    )
    parser.add_argument(
        "--unseen",
        action="store_const",
        dest="only",
        const=unseen,
        help="six networks that no rule of the search was changed with",
    )
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
    report("simulated_cuda", markdown(rows, [summary(rows)]), rows, write=chosen.write)


if __name__ == "__main__":
    main()
