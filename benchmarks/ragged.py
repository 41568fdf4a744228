"""Trainings on samples of different lengths: which die at the sizes that BatchFinder finds?

Each step of such a training has new shapes, and blocks of ever new sizes fragment the cache of
PyTorch's allocator. So a training may run out of memory although its tensors would fit. A CUDA
build of torch runs on a stub of the CUDA runtime (``tests/cuda_stub``), on which this command
starts itself.

A row is one search with ``objective="memory"``, the training of 300 steps that follows it, and the
same training at 1 / 0.85 of the size with all of the memory: where it dies, the size is at least
0.85 of the largest that trains. The seed of a row draws the lengths, their order and the initial
weights.

    # all rows; half an hour on two cores
    python -m benchmarks.ragged
    # some of its rows
    python -m benchmarks.ragged --only "graphs" --seeds 3
    # with an allocator that does not fragment
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python -m benchmarks.ragged
    # also to benchmarks/results
    python -m benchmarks.ragged --write
    # rows also to a file, from which the same command continues
    python -m benchmarks.ragged --file /tmp/rows.json
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.common import command_line, markdown, read_rows, report, trainer_for, write_rows
from benchmarks.cuda_search import FORK, OUTCOMES, in_fork, start_device, start_on_stub, variant
from lightning_batchmem import BatchFinder, Plan
from lightning_batchmem.devices.out_of_memory import is_out_of_memory

STEPS = 300
SAMPLES = 20_000
FEATURES = 16
WIDTH = 192
LONGEST = 256
NEAR_SHARE = 0.85

Lengths = Callable[[np.random.Generator], "np.ndarray[Any, Any]"]


def lognormal(generator: np.random.Generator, spread: float = 0.7) -> np.ndarray[Any, Any]:
    return np.clip(generator.lognormal(3.5, spread, SAMPLES), 2, LONGEST).astype(int)


def narrow(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    return lognormal(generator, 0.4)


def bimodal(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Most samples are short, and a tenth are long."""
    short = generator.normal(30, 8, SAMPLES)
    long = generator.normal(180, 25, SAMPLES)
    return np.clip(np.where(generator.random(SAMPLES) < 0.1, long, short), 2, LONGEST).astype(int)


class Samples(Dataset[Any]):
    """Samples that follow these lengths."""

    def __init__(self, lengths: np.ndarray[Any, Any]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)


class Sequences(Samples):
    """Sequences of these lengths."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(int(self.lengths[index]), FEATURES), index % 10


class Images(Samples):
    """Images, whose two sides follow these lengths, and their boxes."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        height = 16 + int(self.lengths[index]) // 4
        width = 16 + int(self.lengths[-index]) // 4
        return torch.zeros(3, height, width), torch.zeros(1 + index % 5, 4)


class Graphs(Samples):
    """Graphs of as many nodes as these lengths, with four edges to a node."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        nodes = int(self.lengths[index])
        return torch.zeros(nodes, FEATURES), torch.zeros(2, 4 * nodes, dtype=torch.long)


class BucketedBatches(Sampler[list[int]]):
    """Batches of samples that are about equally long, in a random order."""

    def __init__(self, lengths: np.ndarray[Any, Any], batch_size: int) -> None:
        self.lengths = lengths
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.lengths) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        noise = torch.rand(len(self.lengths)).numpy()
        # The shortest ones are left out.
        order = np.argsort(8 * noise - self.lengths)
        for number in torch.randperm(len(self)).tolist():
            begin = number * self.batch_size
            yield order[begin : begin + self.batch_size].tolist()


def padded(samples: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    values, targets = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(values), batch_first=True), torch.tensor(targets)


def lists(samples: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(zip(*samples, strict=True))


def joined(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    nodes, edges = zip(*samples, strict=True)
    return torch.cat(nodes), torch.cat(edges, dim=1)


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        layers: list[nn.Module] = []
        width = FEATURES
        for _ in range(4):
            layers += [nn.Linear(width, WIDTH), nn.GELU(), nn.Dropout(0.1)]
            width = WIDTH
        super().__init__(*layers)


class Transformer(nn.Sequential):
    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        super().__init__(nn.Linear(FEATURES, WIDTH), nn.TransformerEncoder(layer, 2))


class Speech(nn.Module):
    """Convolutions that halve the length, and a layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(FEATURES, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.convolutions(x.transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.layer(hidden)
        return out


class Ragged(LightningModule):
    """A network, trained on samples of these lengths."""

    def __init__(self, kind: Kind, lengths: np.ndarray[Any, Any], batch_size: int) -> None:
        super().__init__()
        self.kind = kind
        self.lengths = lengths
        self.batch_size = batch_size
        self.body = kind.body()
        self.head = nn.Linear(kind.width, 10)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        data = self.kind.data(self.lengths)
        if self.kind.is_bucketed:
            batches = BucketedBatches(self.lengths, self.batch_size)
            return DataLoader(data, batch_sampler=batches, collate_fn=self.kind.collate)
        return DataLoader(
            data, self.batch_size, shuffle=True, drop_last=True, collate_fn=self.kind.collate
        )

    def training_step(self, batch: tuple[Any, Any], _: int) -> Tensor:
        return self.kind.loss(self, batch)


def classified(module: Ragged, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, targets = batch
    return F.cross_entropy(module.head(module.body(x).mean(1)), targets)


def padded_in_step(module: Ragged, batch: tuple[Any, Any]) -> Tensor:
    values, targets = batch
    x = nn.utils.rnn.pad_sequence(list(values), batch_first=True)
    return classified(module, (x, torch.tensor(targets, device=x.device)))


def detected(module: Ragged, batch: tuple[Any, Any]) -> Tensor:
    """Images are padded to the largest height and width, as detectors do."""
    images, boxes = batch
    height = max(image.shape[1] for image in images)
    width = max(image.shape[2] for image in images)
    x = torch.stack(
        [F.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in images]
    )
    hidden = module.body(x).mean((2, 3))
    loss: Tensor = module.head(hidden).square().mean() + torch.cat(boxes).sum()
    return loss


def passed_messages(module: Ragged, batch: tuple[Tensor, Tensor]) -> Tensor:
    nodes, edges = batch
    hidden = module.body(nodes)
    for _ in range(2):
        messages = F.gelu(hidden[edges[0]])
        hidden = hidden + torch.zeros_like(hidden).index_add(0, edges[1], messages)
    out: Tensor = module.head(hidden).square().mean()
    return out


def detector() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()
    )


@dataclass(frozen=True)
class Kind:
    """A kind of ragged training."""

    lengths: Lengths
    body: Callable[[], nn.Module] = Mlp
    collate: Callable[..., Any] = padded
    loss: Callable[..., Tensor] = classified
    data: Callable[..., Dataset[Any]] = Sequences
    is_bucketed: bool = False
    width: int = WIDTH


KINDS = {
    "lognormal, mlp": Kind(lognormal),
    "lognormal, padded in the step": Kind(lognormal, Transformer, lists, padded_in_step),
    "narrow lognormal, transformer": Kind(narrow, Transformer),
    "bucketed, transformer": Kind(lognormal, Transformer, is_bucketed=True),
    "bimodal, speech": Kind(bimodal, Speech),
    "bimodal, padded in the step": Kind(bimodal, Mlp, lists, padded_in_step),
    "graphs": Kind(lognormal, Mlp, joined, passed_messages, Graphs),
    "detection": Kind(lognormal, detector, lists, detected, Images, width=64),
}
MORE_GIBIBYTES = (2.0, 4.0)
MORE_KINDS = ("lognormal, mlp", "bimodal, speech", "detection")


def module_of(name: str, seed: int, batch_size: int) -> Ragged:
    kind = KINDS[name]
    seed_everything(seed, verbose=False)
    return Ragged(kind, kind.lengths(np.random.default_rng(seed)), batch_size)


def fit(module: Ragged, *callbacks: BatchFinder) -> str:
    """Train; how the training ends."""
    trainer = trainer_for(callbacks, STEPS, accelerator="gpu", max_epochs=-1)
    try:
        trainer.fit(module)
    # Out of memory has many types, and each is a result.
    except Exception as error:
        if trainer.global_step == 0 or not is_out_of_memory(error):
            raise
        return f"dies in step {trainer.global_step}"
    return "ok"


def tried(plan: Plan) -> str:
    return " ".join(
        f"{trial.batch_size}{trial.kind[0]}{OUTCOMES.get(trial.outcome, '?')}"
        for trial in plan.trials
    )


def search(name: str, gibibytes: float, seed: int) -> dict[str, Any]:
    """A row: what the search finds, and how the training ends."""
    start_device(int(gibibytes * 2**30))
    finder = BatchFinder(objective="memory", min_steps_per_epoch=None)
    module = module_of(name, seed, 2)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        training = fit(module, finder)
    plan = finder.plan
    assert plan is not None
    return {
        "kind": name,
        "GiB": gibibytes,
        "seed": seed,
        "size": plan.batch_size,
        "verified": plan.verified,
        "training": training,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "search steps": sum(trial.full_steps for trial in plan.trials),
        "tried": tried(plan),
    }


def ends(name: str, gibibytes: float, seed: int, size: int) -> str:
    """How a training at this size ends, with the whole memory of the device."""
    start_device(int(gibibytes * 2**30))
    try:
        return fit(module_of(name, seed, size))
    except torch.OutOfMemoryError:
        return "dies in step 0"


def row_of(cell: tuple[str, float, int]) -> dict[str, Any]:
    row: dict[str, Any] = in_fork(search, *cell)
    larger = int(np.ceil(row["size"] / NEAR_SHARE))
    row["at 1 / 0.85"] = in_fork(ends, *cell, larger)
    print(row, file=sys.stderr, flush=True)
    return row


def columns(group: list[dict[str, Any]]) -> dict[str, Any]:
    sizes = [row["size"] for row in group]
    return {
        "kind": group[0]["kind"],
        "GiB": group[0]["GiB"],
        "trainings": len(group),
        "die": sum(row["training"] != "ok" for row in group),
        "sizes": f"{min(sizes)} to {max(sizes)}",
        "die at 1 / 0.85": sum(row["at 1 / 0.85"] != "ok" for row in group),
        "search steps": round(float(np.mean([row["search steps"] for row in group]))),
    }


def main() -> None:
    parser = command_line(__doc__, KINDS, writes=True, continues=True)
    parser.add_argument("--seeds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    chosen = parser.parse_args()
    start_on_stub(None, "benchmarks.ragged")
    # Kernels do nothing here, so threads would only wait for each other.
    torch.set_num_threads(1)
    cells = [(name, 1.0, seed) for name in chosen.only for seed in range(chosen.seeds)]
    cells += [
        (name, gibibytes, seed)
        for name in chosen.only
        if name in MORE_KINDS
        for gibibytes in MORE_GIBIBYTES
        for seed in range(min(2, chosen.seeds))
    ]
    file_name = f"ragged{variant('32-true', None)}"
    rows = {(row["kind"], row["GiB"], row["seed"]): row for row in read_rows(chosen.file)}
    with ProcessPoolExecutor(chosen.processes, mp_context=FORK) as pool:
        missing = [cell for cell in cells if cell not in rows]
        for row in pool.map(row_of, missing):
            rows[row["kind"], row["GiB"], row["seed"]] = row
            write_rows(chosen.file, rows.values())
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault(cell[:2], []).append(rows[cell])
    table = [columns(group) for group in groups.values()]
    notes = [
        f"{sum(row['die'] for row in table)} of {len(cells)} trainings die",
        f"{sum(row['die at 1 / 0.85'] for row in table)} of {len(cells)} die at 1 / 0.85 of the"
        " size",
    ]
    report(file_name, markdown(table, notes), write=chosen.write)


if __name__ == "__main__":
    main()
