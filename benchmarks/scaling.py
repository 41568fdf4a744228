"""How does the cost of a search grow with the number of ranks?

A search with 1, 2 and 4 processes of DDP (gloo, one thread each), three times in fresh processes; then the collective
that its exchanges rest on, by itself, with up to 16. The largest size is given, so that no search ends for want of
memory and all of them do the same work. Where there are fewer cores than processes, compare what is counted and what
the exchanges take: the steps share the cores.

    python -m benchmarks.scaling            # two Markdown tables
    python -m benchmarks.scaling --json F   # the raw figures too
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed
from torch.multiprocessing.spawn import start_processes

from benchmarks.common import answer, in_fresh_process, machine, report
from benchmarks.workloads import WORKLOADS, Training
from lightning_batchmem import BatchFinder
from lightning_batchmem.measure.ranks import Ranks

MODULE = "benchmarks.scaling"
WORKLOAD = "convolution"
LARGEST = 64
"""Samples of the largest size on each rank; small enough for any machine, and the end of every search."""

ALONE = 200
"""How often the collective is run by itself."""


class TimedFinder(BatchFinder):
    """A finder that notes what its search takes on this rank, and what of it the exchanges take."""

    def __init__(self) -> None:
        super().__init__(max_batch_size=LARGEST)
        self.search_seconds = 0.0
        self.collectives = 0
        self.exchange_seconds: list[float] = []
        self.sent_bytes: list[int] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch(trainer)
        trainer.strategy.barrier()  # a rank that started late is no cost of the search
        collectives, begin = collectives_so_far(), time.perf_counter()
        super().on_fit_start(trainer, pl_module)
        self.search_seconds = time.perf_counter() - begin
        self.collectives = collectives_so_far() - collectives

    def _watch(self, trainer: Trainer) -> None:
        """Time every exchange, and weigh what it hands to the strategy; this process does nothing else afterwards."""
        exchange, all_gather = Ranks.exchange, trainer.strategy.all_gather

        def timed(ranks: Ranks, *numbers: float) -> list[list[float]]:
            begin = time.perf_counter()
            rows = exchange(ranks, *numbers)
            self.exchange_seconds.append(time.perf_counter() - begin)
            return rows

        def weighed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.sent_bytes.append(tensor.nbytes)
            return all_gather(tensor, *args, **kwargs)

        Ranks.exchange = timed  # type: ignore[method-assign, assignment]
        trainer.strategy.all_gather = weighed  # type: ignore[method-assign]


def collectives_so_far() -> int:
    """How many collectives the process group has begun, DDP's own in C++ among them; 0 without a group."""
    if not distributed.is_initialized():
        return 0
    # torch has no public counter; with gloo in 2.13 each collective is one more
    group = distributed.distributed_c10d._get_default_group()
    count: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return count


def search(ranks: int) -> None:
    """Search in this process and in those that Lightning starts with the same arguments; rank zero answers."""
    torch.set_num_threads(1)
    finder = TimedFinder()
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto",
        max_steps=1,
        callbacks=[finder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Training(WORKLOADS[WORKLOAD])
    trainer.fit(module)
    assert finder.plan is not None
    sent_bytes = list(finder.sent_bytes)
    # a row is a rank, a column an exchange: whoever comes to it last waits for nobody
    seconds = torch.tensor(finder.exchange_seconds, dtype=torch.float64)
    seconds = trainer.strategy.all_gather(seconds) if ranks > 1 else torch.zeros(1, len(seconds))
    if trainer.is_global_zero:
        answer(
            {
                "sizes": [trial.batch_size for trial in finder.plan.trials],
                "search_seconds": finder.search_seconds,
                "waiting_seconds": seconds.sum(1).max().item(),
                "exchanging_seconds": seconds.min(0).values.sum().item(),
                "exchanges": len(sent_bytes),
                "sent_bytes": sent_bytes,
                "collectives": finder.collectives,
                "parameters": sum(parameter.numel() for parameter in module.parameters()),
            }
        )


def gather_alone(rank: int, processes: int, directory: str) -> None:
    """Run nothing but the collective of an exchange, with as many numbers."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=processes)
    row = torch.zeros(22, dtype=torch.float64)
    rows = [torch.empty_like(row) for _ in range(processes)]
    took = []
    for _ in range(ALONE):
        begin = time.perf_counter()
        distributed.all_gather(rows, row)
        took.append(time.perf_counter() - begin)
    if rank == 0:
        worst = statistics.quantiles(took, n=100)[-1]
        answer({"median_seconds": statistics.median(took), "p99_seconds": worst, "bytes": row.nbytes})
    distributed.destroy_process_group()


def alone(processes: int) -> None:
    """Fork the processes, so that 16 of them do not import torch 16 times."""
    with tempfile.TemporaryDirectory() as directory:
        start_processes(gather_alone, (processes, directory), processes, start_method="fork")  # type: ignore[no-untyped-call]


def compare(ranks: list[int], processes: list[int], repeats: int) -> dict[str, Any]:
    """Every measurement in a fresh process."""
    results: dict[str, Any] = {"search": {}, "alone": {}, "cores": os.cpu_count()}
    for count in ranks:
        results["search"][count] = [in_fresh_process(MODULE, "--search", str(count)) for _ in range(repeats)]
        print(f"{count} ranks: {[one['search_seconds'] for one in results['search'][count]]} s", file=sys.stderr)
    for count in processes:
        results["alone"][count] = [in_fresh_process(MODULE, "--alone", str(count)) for _ in range(repeats)]
    return results


def table(results: dict[str, Any]) -> str:
    """The medians as Markdown."""
    lines = [
        "| ranks | sizes run | search s | in exchanges s | without waiting ms | exchanges | bytes a rank sends in one "
        "| collectives in all |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for ranks, runs in results["search"].items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key not in _LISTS}
        sizes = " or ".join(sorted({", ".join(map(str, run["sizes"])) for run in runs}))
        sent = sorted({str(sent) for run in runs for sent in run["sent_bytes"]})
        lines.append(
            f"| {ranks} | {sizes} | {middle['search_seconds']:.2f} | {middle['waiting_seconds']:.2f} "
            f"| {middle['exchanging_seconds'] * 1e3:.1f} | {_range(runs, 'exchanges')} | {', '.join(sent) or '-'} "
            f"| {_range(runs, 'collectives')} |"
        )
    lines += ["", "| processes | one gather alone, median ms | 99th percentile ms |", "|---|---|---|"]
    for processes, runs in results["alone"].items():
        middle, worst = (statistics.median(run[key] for run in runs) for key in ("median_seconds", "p99_seconds"))
        lines.append(f"| {processes} | {middle * 1e3:.2f} | {worst * 1e3:.2f} |")
    return "\n".join(lines)


_LISTS = ("sizes", "sent_bytes")


def _range(runs: list[dict[str, Any]], key: str) -> str:
    found = sorted({run[key] for run in runs})
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", type=int, metavar="RANKS", help="(internal) search with so many processes")
    parser.add_argument("--alone", type=int, metavar="PROCESSES", help="(internal) the collective by itself")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4], help="searches with so many processes")
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8, 16], help="of the collective by itself")
    parser.add_argument("--repeats", type=int, default=3, help="of each, in fresh processes")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.search:
        seed_everything(0, verbose=False)
        search(arguments.search)
    elif arguments.alone:
        alone(arguments.alone)
    else:
        results = compare(arguments.ranks, arguments.processes, arguments.repeats)
        report(f"{machine()}, {os.cpu_count()} cores", table(results), results, arguments.json)


if __name__ == "__main__":
    main()
