"""What a search on a simulated GPU costs the host: CPU seconds and memory. Two tables.

Each row is one search of ``python -m lightning_batchmem simulate``, in processes of its own. The
first table has a GPT of 4 to 64 layers on one GPU, so that only the number of operators of a step
grows. The second one has networks that stay as they are on larger and larger GPUs, so that only the
size that is found grows: a GPT with samples of 8 KiB, a ResNet-18 with samples of 588 KiB, which
the loader really makes, and a fine-tuning of 6.7e9 parameters in bfloat16 that is made on the meta
device.

Columns: ``found`` is the batch size of the plan; ``steps`` are the training steps of the search.
``imports s`` is the CPU time until the script has imported torch, Lightning and this package, and
``CPU s`` all later CPU time of its process and of its loader workers. ``ms a step`` is the CPU time
from the first step on, divided by the steps. ``host GiB`` is the highest resident set of one of
these processes.

    # both tables; some twenty minutes on two cores; an environment with a CUDA build of torch
    python -m benchmarks.simulated_cost
    # some of the rows
    python -m benchmarks.simulated_cost --only "gpt-8 24GiB" "gpt-12 8GiB"
    # also to benchmarks/results/cuda-stub, where rows that are left out stay as they are
    python -m benchmarks.simulated_cost --write
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import (
    ROOT,
    command_line,
    emit,
    in_fresh_process,
    machine,
    markdown,
    trainer_for,
    write_page,
)
from benchmarks.networks.images import resnet18
from benchmarks.networks.texts import gpt2, text_loss
from lightning_batchmem.script import Script
from lightning_batchmem.simulated_gpu.gpus import CONTEXT_BYTES, gpu_named
from lightning_batchmem.simulated_gpu.launch import kernels_of, run

KIB_IN_GIB = 2**20
SAMPLES = 10_000_000
"""Samples of a data set: more than any device has room for."""

STEPS = itertools.count(1)
"""Numbers of the training steps of this process. A search restores the module, but not this."""

LAYERS = (4, 8, 16, 32, 64)
REPEATS = 3
LAYERS_ON = "24GiB"
MEMORIES = ("8GiB", "24GiB", "80GiB", "180GiB")


class Sample(NamedTuple):
    """The shape of an input, and whether it is a text, whose target is as long as itself."""

    shape: tuple[int, ...]
    is_text: bool


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples whose bytes are written one by one, as after a decoder."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.sample.is_text:
            tokens = torch.full(self.sample.shape, index % 1000)
            return tokens, tokens
        return torch.ones(self.sample.shape), torch.tensor(index % 1000)


class Adapted(nn.Module):
    """A frozen layer, and two small matrices that are trained (LoRA)."""

    def __init__(self, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + self.up(self.down(x))
        return out


class LlamaBlock(nn.Module):
    """A block of Llama 2 7B without rotations: they need no memory worth counting."""

    def __init__(self, width: int = 4096, hidden: int = 11008) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = Adapted(width, 3 * width)
        self.project = Adapted(width, width)
        self.gate_and_up = Adapted(width, 2 * hidden)
        self.down = Adapted(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            self.qkv(self.norms[0](x)).unflatten(-1, (3, 32, 128)).permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_and_up(self.norms[1](x)).chunk(2, -1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


def llama() -> nn.Module:
    """6.7e9 parameters, of which the small matrices of LoRA are trained."""
    blocks = (LlamaBlock() for _ in range(32))
    head = nn.Linear(4096, 32_000, bias=False)
    parts = (nn.Embedding(32_000, 4096), *blocks, nn.RMSNorm(4096), head, nn.Flatten(0, 1))
    for part in (parts[0], *parts[-3:]):
        part.requires_grad_(False)
    return nn.Sequential(*parts)


class Kind(NamedTuple):
    """A network, a sample, the loss, and the Trainer's precision."""

    module: Callable[[], nn.Module]
    sample: Sample
    loss: Callable[[Tensor, Tensor], Tensor]
    precision: Any = "32-true"


_TEXT = Sample((512,), is_text=True)
KINDS = {
    **{f"gpt-{layers}": Kind(partial(gpt2, layers), _TEXT, text_loss) for layers in (*LAYERS, 12)},
    "resnet18": Kind(resnet18, Sample((3, 224, 224), is_text=False), F.cross_entropy),
    "llama-7b-lora": Kind(llama, _TEXT, text_loss, "bf16-true"),
}

ROWS = {
    **{f"gpt-{layers} {LAYERS_ON}": (f"gpt-{layers}", LAYERS_ON) for layers in LAYERS},
    **{
        f"{kind} {memory}": (kind, memory)
        for kind in ("gpt-12", "resnet18", "llama-7b-lora")
        for memory in MEMORIES
        # 6.7e9 parameters in bfloat16 alone take 12.5 GiB.
        if (kind, memory) != ("llama-7b-lora", "8GiB")
    },
}
"""The name of each row, with its kind of network and its GPU."""


class Training(LightningModule):
    """A training of one of the networks."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.batch_size = 1
        self.kind = kind
        self.network: nn.Module | None = None

    def configure_model(self) -> None:
        if self.network is None:
            with torch.device("meta"):
                network = self.kind.module()
            self.network = network.to_empty(device=self.trainer.strategy.root_device)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(self.kind.sample), self.batch_size)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.network is not None
        step = next(STEPS)
        if step == 1:
            emit(first_step_seconds=time.process_time())
        emit(steps=step)
        return self.kind.loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained)


def train(kind: Kind) -> None:
    """The script of a user: makes a module and a Trainer, and calls ``fit``."""
    emit(import_seconds=time.process_time())
    trainer = trainer_for([], -1, max_epochs=1, accelerator="gpu", precision=kind.precision)
    trainer.fit(Training(kind))


def simulate(kind: str, memory: str) -> None:
    """Search in a new process, and emit what it took."""
    gpu = gpu_named(memory)
    program = Script("module", "benchmarks.simulated_cost", ("--train", kind))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    outcome = run(program, gpu, CONTEXT_BYTES, {})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    plan = outcome.plan
    if plan is None:
        emit(reason=outcome.error or outcome.nothing_fits)
        return
    emit(
        found=plan.batch_size,
        limited_by=plan.limited_by,
        cpu_seconds=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        # The highest of all children. This process has no other one.
        host_gib=after.ru_maxrss / KIB_IN_GIB,
    )


def row_of(name: str) -> dict[str, Any]:
    """One row; where rows differ by little CPU time, the run with the least of several."""
    repeats = REPEATS if ROWS[name][0] in _LAYER_KINDS else 1
    return min(
        (measured(name) for _ in range(repeats)), key=lambda row: float(row.get("CPU s", "inf"))
    )


def measured(name: str) -> dict[str, Any]:
    """A search in processes of its own."""
    kind, memory = ROWS[name]
    found = in_fresh_process("benchmarks.simulated_cost", "--simulate", kind, memory)
    row: dict[str, Any] = {"network": kind, "GPU": memory}
    if "found" not in found:
        return {**row, "found": found.get("reason") or found["error"]}
    return {
        **row,
        "found": found["found"],
        "limited by": found["limited_by"],
        "steps": found["steps"],
        "imports s": round(found["import_seconds"], 1),
        "CPU s": round(found["cpu_seconds"] - found["import_seconds"], 1),
        "ms a step": round(
            1e3 * (found["cpu_seconds"] - found["first_step_seconds"]) / found["steps"]
        ),
        "host GiB": round(found["host_gib"], 2),
    }


def growth(
    rows: Sequence[Mapping[str, Any]], sizes: Sequence[float], key: str, unit: str
) -> list[str]:
    """What each further unit of the size takes, between neighbouring rows of one network."""
    return [
        f"{key}, from {size:g} to {larger:g} {unit}:"
        f" {(row[key] - before[key]) / (larger - size):.3g} for each"
        for (size, before), (larger, row) in pairwise(zip(sizes, rows, strict=True))
        if key in before and key in row
    ]


def text_of(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Both tables."""
    by_layers = [row for name, row in results.items() if name.split()[0] in _LAYER_KINDS]
    by_size = [row for name, row in results.items() if name.split()[0] not in _LAYER_KINDS]
    parts = []
    if by_layers:
        layers = [int(row["network"].removeprefix("gpt-")) for row in by_layers]
        notes = [
            f"the run with the least CPU time of {REPEATS}",
            *growth(by_layers, layers, "ms a step", "layers"),
        ]
        parts += [f"## By layers, on {LAYERS_ON}", markdown(by_layers, notes)]
    if by_size:
        images = [row for row in by_size if row["network"] == "resnet18" and "CPU s" in row]
        thousands = [row["found"] / 1000 for row in images]
        notes = [
            f"resnet18: {note}"
            for key in ("CPU s", "host GiB")
            for note in growth(images, thousands, key, "thousand samples")
        ]
        parts += ["## By the size that is found", markdown(by_size, notes)]
    return "\n\n".join(parts)


_LAYER_KINDS = {f"gpt-{layers}" for layers in LAYERS}


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        train(KINDS[sys.argv[2]])
        return
    if sys.argv[1:2] == ["--simulate"]:
        simulate(*sys.argv[2:])
        return
    parser = command_line(__doc__, ROWS, writes=True)
    chosen = parser.parse_args()
    # The library is compiled before a row is measured.
    kernels_of(gpu_named(LAYERS_ON))
    path = ROOT / "benchmarks" / "results" / "cuda-stub" / "simulated_cost.json"
    found = {}
    for name in chosen.only:
        found[name] = row_of(name)
        print(found[name], file=sys.stderr, flush=True)
    known = json.loads(path.read_text()) if chosen.write and path.exists() else {}
    results = {name: {**known, **found}[name] for name in ROWS if name in {**known, **found}}
    text = f"{machine()}\n\n{text_of(results)}"
    print(text)
    if chosen.write:
        write_page(path.with_suffix(".md"), text)
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
