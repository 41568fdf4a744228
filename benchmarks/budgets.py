"""Text of very different lengths: batches of a fixed size against batches within a token budget.

    # five searches of each kind with their trainings, in memory control groups; half an hour
    python -m benchmarks.budgets
    # one search of each kind; a few minutes
    python -m benchmarks.budgets --repeats 1
    # also to benchmarks/results
    python -m benchmarks.budgets --write

The transformer of ``benchmarks.search`` trains on 20,000 texts of 8 to 256 tokens, most of them
short, on one thread, and is allowed 300 MiB beyond the memory in use at the start of ``fit``.
Exceeding it is SIGKILL. For each kind of batches

1. a fresh process searches with ``BatchFinder``, and trains for 60 steps with three evaluations and
   a checkpoint after each;
2. a fresh process trains in the same way with the size or budget that was found.

"fixed size" draws texts at random and pads them to the longest. "max_tokens" puts texts of similar
length together, as many as fit into the budget with their padding, and draws these batches at
random. Tokens are those of the texts, without padding, in a second of CPU time of training steps.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import (
    command_line,
    emit,
    in_fresh_process,
    markdown,
    one_line,
    report,
    trainer_for,
)
from benchmarks.networks.record import MIB, TOKENS, Sample, padded
from benchmarks.networks.texts import Transformer
from benchmarks.ways import STEPS, Limit, Progress
from lightning_batchmem import BatchFinder

ROOM_BYTES = 300 * MIB
TEXTS = 20_000
SHORTEST = 8
LONGEST = 256

FIRST_VALUES = {"fixed size": 2, "max_tokens": 512}
"""The two kinds of batches, and the sizes that the project has before the search."""


def text_lengths() -> list[int]:
    """Lengths in tokens: most are short, and one in a hundred is the longest."""
    generator = random.Random(0)
    return [
        min(LONGEST, max(SHORTEST, round(generator.lognormvariate(3.4, 0.9)))) for _ in range(TEXTS)
    ]


class Texts(Dataset[Sample]):
    """Texts of random tokens, each made from its index when it is read."""

    def __init__(self) -> None:
        self.lengths = text_lengths()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(TOKENS, (2, self.lengths[index]), generator=generator)
        return tokens[0], tokens[1]


class TokenBudget:
    """A batch sampler: texts of similar length, as many as ``max_tokens`` allow with padding."""

    def __init__(self, lengths: list[int], max_tokens: int) -> None:
        self.batches: list[list[int]] = [[]]
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            if lengths[index] * (len(self.batches[-1]) + 1) > max_tokens:
                self.batches.append([])
            self.batches[-1].append(index)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample(self.batches, len(self.batches)))


class TextModel(LightningModule):
    """The transformer on texts, with batches of one of the two kinds."""

    def __init__(self, kind: str, value: int) -> None:
        super().__init__()
        self.kind = kind
        self.batch_size = value
        self.network = Transformer()
        self.texts = Texts()
        self.step_seconds: list[float] = []
        self.step_tokens: list[int] = []
        self._start_seconds = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._start_seconds = time.process_time()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.step_seconds.append(time.process_time() - self._start_seconds)
        # The padding of targets is -100.
        self.step_tokens.append(int((batch[1] >= 0).sum()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return functional.cross_entropy(self.network(inputs), targets)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Sample]:
        if self.kind == "fixed size":
            return DataLoader(
                self.texts, batch_size=self.batch_size, shuffle=True, collate_fn=padded
            )
        sampler: Any = TokenBudget(self.texts.lengths, self.batch_size)
        return DataLoader(self.texts, batch_sampler=sampler, collate_fn=padded)

    val_dataloader = train_dataloader


class Speed(Progress):
    """Emits the tokens per second of the training too, without its first step."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, TextModel):
            seconds = sum(pl_module.step_seconds[1:])
            emit(tokens_per_second=sum(pl_module.step_tokens[1:]) / seconds)


def train(kind: str, value: int | None) -> None:
    """Search if there is no ``value``, and train under the limit, on one thread."""
    # Threads that wait for each other take CPU time too.
    torch.set_num_threads(1)
    limit = Limit(ROOM_BYTES)
    finder = None
    if value is None:
        is_budget = kind != "fixed size"
        finder = BatchFinder(budget=is_budget, min_steps_per_epoch=None, objective="memory")
    with tempfile.TemporaryDirectory() as directory:
        callbacks = (limit, finder, Speed(limit, finder))
        trainer = trainer_for(
            [callback for callback in callbacks if callback is not None],
            STEPS,
            default_root_dir=directory,
            enable_checkpointing=True,
            val_check_interval=STEPS // 3,
            # At a large size an epoch has fewer steps.
            check_val_every_n_epoch=None,
            limit_val_batches=2,
        )
        trainer.fit(TextModel(kind, value or FIRST_VALUES[kind]))


def measure(kind: str, repeats: int) -> dict[str, Any]:
    """Search ``repeats`` times, each time with the training after it and one in a new process."""
    runs: dict[str, list[dict[str, Any]]] = {"searches": [], "trainings": []}

    def run(name: str, *arguments: str) -> dict[str, Any]:
        result = in_fresh_process(
            "benchmarks.budgets", "--kind", kind, *arguments, room_bytes=ROOM_BYTES
        )
        result.pop("plan", None)
        runs[name].append(result)
        print(f"{time.strftime('%H:%M:%S')} {kind}: {result}", file=sys.stderr, flush=True)
        return result

    for _ in range(repeats):
        found = run("searches").get("batch_size")
        if found is not None:
            run("trainings", "--value", str(found))
    return runs


def table(by_kind: dict[str, Any]) -> str:
    """The results as Markdown, a row for each kind of batches."""
    rows = []
    for kind, runs in by_kind.items():
        searches = runs["searches"]
        everything = [*searches, *runs["trainings"]]
        found = [run["batch_size"] for run in searches if run.get("batch_size")]
        speeds = [run["tokens_per_second"] for run in everything if run.get("tokens_per_second")]
        seconds = [run["search_seconds"] for run in searches if run.get("search_seconds")]
        rows.append(
            {
                "batches": kind,
                "found": ", ".join(f"{size:,}" for size in found),
                "did not survive": f"{sum(bool(run['error']) for run in everything)} of"
                f" {len(everything)}",
                "tokens/s, median": f"{statistics.median(speeds):,.0f}" if speeds else "",
                "tokens/s, all": ", ".join(f"{speed:,.0f}" for speed in speeds),
                "search, s": f"{statistics.median(seconds):.0f}" if seconds else "",
            }
        )
    errors = {run["error"] for runs in by_kind.values() for part in runs.values() for run in part}
    return markdown(rows, [error for error in errors if error])


def main() -> None:
    parser = command_line(__doc__, writes=True)
    parser.add_argument("--kind", choices=FIRST_VALUES, help="run this process's part only")
    parser.add_argument("--value", type=int, help="train with this size, without a search")
    parser.add_argument("--repeats", type=int, default=5, help="searches of each kind")
    chosen = parser.parse_args()
    if chosen.kind is None:
        by_kind = {kind: measure(kind, chosen.repeats) for kind in FIRST_VALUES}
        report("budgets", table(by_kind), write=chosen.write)
        return
    try:
        train(chosen.kind, chosen.value)
    # Near the limit memory may run out anywhere, with any error.
    except Exception as error:  # noqa: BLE001
        emit(error=one_line(error))


if __name__ == "__main__":
    main()
