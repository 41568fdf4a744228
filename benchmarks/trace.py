"""Differences between a training with a finder and the same training with its size hard-coded.

Each way to train runs for two epochs, with a finder and then with the size that it found. Weights,
optimizers, schedules, random states, metrics, the calls of a callback, files and more are compared
bit by bit, as in ``tests/test_contract.py``. "no finder" is the control: the same hard-coded run
twice. All finders have 8 samples as their largest size, and meet no memory limit.

    python -m benchmarks.trace            # a Markdown table of what differs
    python -m benchmarks.trace --write    # also to benchmarks/results
"""

from __future__ import annotations

import inspect
import io
import sys
import tempfile
from contextlib import redirect_stdout
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import BatchSizeFinder
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import command_line, markdown, one_line, report
from lightning_batchmem import BatchFinder
from tests.helpers.contract_cases import CASES, SIZE, Case, Net, Noisy
from tests.helpers.outcomes import assert_same, outcome_of

START = 2
FINDERS = ("BatchFinder", "power", "binsearch", "no finder")


class Calm(Net):
    """The network of the contract without anything random, unless arguments add it."""

    def __init__(self, batch_size: int, layer: Any = nn.ReLU, **data: Any) -> None:
        super().__init__(batch_size)
        self.layers = nn.Sequential(nn.Linear(6, 16), layer(), nn.Linear(16, 3))
        self.data = deepcopy(data)

    def train_dataloader(self) -> DataLoader[Any]:
        samples = TensorDataset(Noisy().x, Noisy().y)
        return DataLoader(**{"dataset": samples, "batch_size": self.batch_size, **self.data})

    val_dataloader = train_dataloader


WAYS = {
    "SGD with momentum, nothing random": Case(Calm),
    "BatchNorm": Case(partial(Calm, layer=partial(nn.BatchNorm1d, 16))),
    "dropout": Case(partial(Calm, layer=nn.Dropout)),
    "shuffled data": Case(partial(Calm, shuffle=True)),
    "augmentation (torch, numpy, random)": Case(partial(Calm, dataset=Noisy())),
    "OneCycleLR over estimated_stepping_batches": CASES["onecycle_from_a_larger_start"],
    "ReduceLROnPlateau": CASES["reduce_on_plateau"],
    "gradient accumulation": CASES["accumulation_and_clipping"],
    "bf16-mixed": CASES["bf16_mixed"],
    "validation within the epoch, no sanity check": CASES["validation_within_epoch"],
    "manual optimization, two optimizers": CASES["manual_two_optimizers"],
    "averaged weights": CASES["weights_averaged_stochastically"],
}
"""From the sixth on with BatchNorm, dropout, shuffled and augmented data."""


def finder_of(name: str) -> Any:
    """The finder of this name; ``None`` for the control."""
    if name == "BatchFinder":
        return BatchFinder(max_batch_size=SIZE, objective="memory")
    # The finder of lightning 2.5.0 has no ``max_val``.
    has_max = "max_val" in inspect.signature(BatchSizeFinder).parameters
    bound: dict[str, Any] = {"max_val": SIZE} if has_max else {"max_trials": 2}
    return None if name == "no finder" else BatchSizeFinder(mode=name, init_val=START, **bound)


def compare(name: str, finder_name: str) -> dict[str, Any]:
    """The size found, and the differences from a run with that size; or the error of the finder."""
    finder = finder_of(finder_name)
    size = SIZE
    start = START if finder else SIZE
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        try:
            searched = outcome_of(Path(folder, "searched"), WAYS[name], start, finder)
        # A finder may fail with any error, and so may a way to train that is broken itself.
        except Exception as error:  # noqa: BLE001
            return {"error": one_line(error)}
        if finder_name == "BatchFinder":
            size = finder.plan.batch_size
        elif finder is not None:
            size = finder.optimal_batch_size
        hard_coded = outcome_of(Path(folder, "hard_coded"), WAYS[name], size, None)
    differs = []
    for key, value in searched.items():
        try:
            assert_same(value, hard_coded[key], "")
        except AssertionError:
            differs.append(key)
    return {"batch_size": size, "differs": differs}


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The results as Markdown: the differences of each finder, or its error."""
    rows = []
    counts = dict.fromkeys(FINDERS, 0)
    for name, by_finder in results.items():
        row = {"way to train": name}
        for finder, found in by_finder.items():
            row[finder] = found.get("error") or ", ".join(found["differs"]) or "identical"
            counts[finder] += row[finder] == "identical"
        rows.append(row)
    total = {"way to train": "all"} | {
        name: f"{count} of {len(results)} identical" for name, count in counts.items()
    }
    return markdown([*rows, total])


def main() -> None:
    arguments = command_line(__doc__, WAYS, writes=True).parse_args()
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for name in arguments.only:
        results[name] = {finder: compare(name, finder) for finder in FINDERS}
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    report(
        "trace",
        f"Sizes bounded by {SIZE}, 2 epochs\n\n{table(results)}",
        write=arguments.write,
    )


if __name__ == "__main__":
    main()
