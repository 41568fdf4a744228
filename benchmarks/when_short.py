"""What do mixed precision, activation checkpointing and accumulation do to the lines of memory and time?

The batch size of one small transformer is searched for under one limit: plain, in bfloat16 mixed precision, with its
layers checkpointed, with both, and with gradient accumulation to a target. Each search is a process of its own, the
ways take turns, and the table has the median of each figure over the rounds, with the range of the size. On the host
one thread computes, so that other work on the machine disturbs the times less.

    python -m benchmarks.when_short            # a Markdown table
    python -m benchmarks.when_short --json F   # the raw figures too
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.common import DEVICE_SHARE, answer, in_fresh_process, machine, report
from benchmarks.workloads import WORKLOADS, Training, Workload
from lightning_batchmem import BatchFinder
from lightning_batchmem.devices.select import device_memory_for
from lightning_batchmem.plan.records import MIB

MODULE = "benchmarks.when_short"
HOST_LIMIT = "700MiB"
TARGET = 128
"""Samples of an optimizer step with accumulation, and the size for which the lines of every way are asked."""


class Encoder(nn.Module):
    """Six encoder layers over 64 tokens that predict a token at each place.

    Args:
        checkpointed: keep only the input of each layer for backward, and compute the rest again there.
        width: of a token's vector.
        tokens: how many different ones there are.
    """

    def __init__(self, checkpointed: bool, width: int = 64, tokens: int = 512) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True) for _ in range(6)
        )
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        scores: Tensor = self.head(x)
        return scores.transpose(1, 2)


@dataclass(frozen=True)
class Way:
    """One way to train the same network.

    Args:
        precision: of the Trainer.
        checkpointed: whether the layers are checkpointed.
        target_batch_size: samples of an optimizer step; ``None``: a batch is a step.
    """

    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    checkpointed: bool = False
    target_batch_size: int | None = None


WAYS = {
    "plain": Way(),
    "mixed precision (bf16-mixed)": Way(precision="bf16-mixed"),
    "activation checkpointing": Way(checkpointed=True),
    "both": Way(precision="bf16-mixed", checkpointed=True),
    f"accumulation to {TARGET}": Way(target_batch_size=TARGET),
}


def kept_bytes_per_sample(way: Way, samples: int = 8) -> float:
    """Bytes for each sample that autograd keeps from forward for backward, counted by storage, parameters left out."""
    module = Training(Workload(lambda: Encoder(way.checkpointed), WORKLOADS["transformer"].sample, HOST_LIMIT))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, Tensor] = {}  # the tensors themselves, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    batch = torch.randint(512, (2, samples, 64)).unbind()
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=way.precision == "bf16-mixed"),
    ):
        loss = module.training_step(batch, 0)
    kept_bytes = sum(kept[address].untyped_storage().nbytes() for address in kept.keys() - parameters)
    del loss  # until here it keeps the graph
    return kept_bytes / samples


def search(name: str) -> None:
    """Search in this process, and print what the plan says, as JSON."""
    way = WAYS[name]
    module = Training(Workload(lambda: Encoder(way.checkpointed), WORKLOADS["transformer"].sample, HOST_LIMIT))
    finder = BatchFinder(
        memory_limit=DEVICE_SHARE if torch.cuda.is_available() else HOST_LIMIT,
        target_batch_size=way.target_batch_size,
    )
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        precision=way.precision,
        max_steps=1,
        callbacks=[finder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    device_memory = device_memory_for(trainer.strategy.root_device)
    assert device_memory is not None
    before_bytes = device_memory.current().allocated_bytes
    trainer.fit(module)
    plan = finder.plan
    assert plan is not None
    assert plan.memory is not None
    assert plan.time is not None
    phase = plan.memory.phase_at(plan.batch_size)
    line = plan.memory.lines[phase]
    largest = max((trial for trial in plan.trials if trial.outcome == "ok"), key=lambda trial: trial.batch_size)
    assert largest.step_seconds is not None
    answer(
        {
            "before_bytes": before_bytes,
            "phase": phase,
            "fixed_bytes": line.intercept,
            "bytes_per_sample": line.slope,
            "fixed_seconds": plan.time.line.intercept,
            "seconds_per_sample": plan.time.line.slope,
            "samples_per_second": largest.batch_size / largest.step_seconds,
            "batch_size": plan.batch_size,
            "batches": plan.accumulate_grad_batches,
            "limited_by": plan.limited_by,
            "limit_bytes": plan.limit_bytes,
            "kept_bytes_per_sample": kept_bytes_per_sample(way),
            "tried": [trial.batch_size for trial in plan.trials],
            "target_bytes": plan.memory.predict_bytes(TARGET),
        }
    )


def compare(names: list[str], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Search in fresh processes, the ways in turn."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            results[name].append(in_fresh_process(MODULE, "--search", name))
            print(f"{name}: {results[name][-1]['batch_size']}", file=sys.stderr)
    return results


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """The results as Markdown."""
    lines = [
        "| way | before the run MiB | fixed MiB | MiB a sample | of it kept for backward | fixed ms | ms a sample "
        f"| samples/s at the largest | chosen size | samples a step | {TARGET} samples at once, MiB by the line |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():

        def median(key: str, unit: float = 1.0, runs: list[dict[str, Any]] = runs) -> float:
            return statistics.median(float(run[key]) for run in runs) / unit

        sizes = sorted(run["batch_size"] for run in runs)
        steps = sorted({run["batch_size"] * run["batches"] for run in runs})
        lines.append(
            f"| {name} | {median('before_bytes', MIB):,.0f} | {median('fixed_bytes', MIB):,.0f} "
            f"| {median('bytes_per_sample', MIB):.2f} | {median('kept_bytes_per_sample', MIB):.2f} "
            f"| {median('fixed_seconds', 1e-3):.0f} | {median('seconds_per_sample', 1e-3):.1f} "
            f"| {median('samples_per_second'):.0f} | {median('batch_size'):.0f} ({sizes[0]} to {sizes[-1]}) "
            f"| {' to '.join(map(str, dict.fromkeys((steps[0], steps[-1]))))} | {median('target_bytes', MIB):,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", metavar="WAY", choices=list(WAYS), help="(internal) search one in this process")
    parser.add_argument("--only", nargs="*", choices=list(WAYS), default=list(WAYS), help="these ways only")
    parser.add_argument("--rounds", type=int, default=3, help="searches of each way; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    if arguments.search:
        search(arguments.search)
    else:
        results = compare(arguments.only, arguments.rounds)
        limit = results[arguments.only[0]][0]["limit_bytes"] / MIB
        head = f"{machine()}; limit {limit:,.0f} MiB, {arguments.rounds} searches of each"
        report(head, table(results), results, arguments.json)


if __name__ == "__main__":
    main()
