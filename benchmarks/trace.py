"""Differences between a training with a finder and the same training with its size hard-coded.

Each way to train (``benchmarks/trace_ways.py``) runs for three epochs in fresh processes; everything in
:data:`COMPARED` is compared bit by bit. "no finder" is the control: the same hard-coded run twice. All finders have 64
samples as their largest size, and meet no memory limit.

    python -m benchmarks.trace            # a Markdown table of what differs
    python -m benchmarks.trace --write    # also to benchmarks/results
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from benchmarks.common import emit, in_fresh_process, one_line, report
from benchmarks.trace_ways import WAYS, Net
from lightning_batchmem import BatchFinder

MODULE = "benchmarks.trace"
CONTROL = "no finder"
FINDERS = ("BatchFinder", "power", "binsearch", CONTROL)
LARGEST, START, EPOCHS = 64, 2, 3
COMPARED = (
    "weights",
    "optimizer",
    "learning rates",
    "random state",
    "order of samples",
    "batches",
    "metrics",
    "progress",
    "train or eval mode",
    "callback state",
    "files",
)
"""Random state: torch, CUDA, numpy and random at the end. Metrics: of the logger and the Trainer. Files:
their names."""


def finder_of(name: str) -> Callback | None:
    """The finder of this name with :data:`LARGEST` as its largest size; ``None`` for the control."""
    if name == CONTROL:
        return None
    if name == "BatchFinder":
        return BatchFinder(max_batch_size=LARGEST)
    has_max = "max_val" in inspect.signature(BatchSizeFinder).parameters  # not in lightning 2.5.0
    bound: dict[str, Any] = {"max_val": LARGEST} if has_max else {"max_trials": 5}
    return BatchSizeFinder(mode=name, init_val=START, **bound)


class Seen(Callback):
    """Records each batch, and the learning rates after it."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []
        self.batches: list[str] = []
        self.learning_rates: list[list[float]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.ids.append(batch[0].tolist())
        self.batches.append(digest(list(batch)))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.learning_rates.append([group["lr"] for one in trainer.optimizers for group in one.param_groups])


def digest(value: Any, hide: str = "") -> str:
    """A hash of nested containers of tensors, arrays and plain values, with ``hide`` removed from all strings."""
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        text = f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(raw).hexdigest()}"
    elif isinstance(value, np.ndarray):
        text = f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    elif isinstance(value, Mapping):
        text = "mapping " + " ".join(f"{digest(key, hide)} {digest(one, hide)}" for key, one in value.items())
    elif isinstance(value, list | tuple):
        text = "sequence " + " ".join(digest(one, hide) for one in value)
    elif isinstance(value, str):
        text = repr(value.replace(hide, "") if hide else value)
    elif value is None or isinstance(value, bool | int | float):
        text = repr(value)
    else:
        raise TypeError(f"value must be made of tensors, arrays and plain values, got {type(value).__name__}")
    return hashlib.sha256(text.encode()).hexdigest()


def run(way_name: str, finder_name: str, batch_size: int) -> dict[str, Any]:
    """Train in this process; the size found (or ``batch_size``) and the digests."""
    seed_everything(3, verbose=False)
    way, finder, seen = WAYS[way_name], finder_of(finder_name), Seen()
    callbacks = way.callbacks()
    module = way.module(batch_size)
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            accelerator="cuda" if torch.cuda.is_available() else "cpu",
            devices=1,
            deterministic=True,
            max_epochs=EPOCHS,
            log_every_n_steps=1,
            default_root_dir=directory,
            logger=CSVLogger(directory, name="log", version=0),
            callbacks=[seen, *callbacks, *([finder] if finder else [])],
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"enable_checkpointing": False, **way.trainer},
        )
        try:
            trainer.fit(module)
        except Exception as error:
            if finder is None:
                raise  # the way itself is broken
            return {"error": one_line(error)}
        found = {key: digest(value, hide=directory) for key, value in state(trainer, module, seen, callbacks).items()}
    if isinstance(finder, BatchFinder):
        assert finder.plan is not None
        batch_size = finder.plan.batch_size
    elif isinstance(finder, BatchSizeFinder):
        assert finder.optimal_batch_size is not None
        batch_size = finder.optimal_batch_size
    return {"error": None, "batch_size": batch_size, "digests": found}


def state(trainer: Trainer, module: Net, seen: Seen, callbacks: Sequence[Callback]) -> dict[str, Any]:
    """The values to compare, at the end of training."""
    directory = Path(trainer.default_root_dir)
    numpy_state: Any = np.random.get_state(legacy=False)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "weights": [dict(module.named_parameters()), dict(module.named_buffers())],
        "optimizer": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "learning rates": seen.learning_rates,
        "random state": [torch.get_rng_state(), cuda, numpy_state, list(random.getstate())],
        "order of samples": seen.ids,
        "batches": seen.batches,
        "metrics": [(directory / "log/version_0/metrics.csv").read_text(), dict(trainer.callback_metrics)],
        "progress": [trainer.global_step, trainer.current_epoch, trainer.fit_loop.state_dict()],
        "train or eval mode": [part.training for part in module.modules()],
        "callback state": [callback.state_dict() for callback in callbacks],
        "files": sorted(str(path.relative_to(directory)) for path in directory.rglob("*")),
    }


def differing(searched: dict[str, str], hard_coded: dict[str, str]) -> list[str]:
    """The names of the differences, in the order of :data:`COMPARED`."""
    return [name for name in COMPARED if searched[name] != hard_coded[name]]


def compare(names: Sequence[str] = tuple(WAYS), finders: Sequence[str] = FINDERS) -> dict[str, Any]:
    """Way -> finder -> its size and the differences from a run with that size, or its error."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names, pool.map(lambda name: compare_way(name, finders), names), strict=True))


def compare_way(name: str, finders: Sequence[str]) -> dict[str, Any]:
    """Compare one way: each finder and the hard-coded run of each size found, in fresh processes."""
    results: dict[str, Any] = {}
    hard_coded: dict[int, dict[str, str]] = {}
    for finder in finders:
        found = in_fresh_process(MODULE, "--run", name, finder, str(LARGEST if finder == CONTROL else START))
        if found["error"] is None:
            size = found["batch_size"]
            if size not in hard_coded:
                hard_coded[size] = in_fresh_process(MODULE, "--run", name, CONTROL, str(size))["digests"]
            found["differs"] = differing(found.pop("digests"), hard_coded[size])
        results[finder] = found
        print(f"{name}, {finder}: {cell(found)}", file=sys.stderr)
    return results


def cell(found: dict[str, Any]) -> str:
    """The result of one finder in a few words."""
    if found["error"] is not None:
        return "error"
    return ", ".join(found["differs"]) or "identical"


def table(results: dict[str, Any]) -> str:
    """The results as Markdown: the differences of each finder, then the errors as notes."""
    finders = list(dict.fromkeys(finder for by_finder in results.values() for finder in by_finder))
    lines = ["| way to train | " + " | ".join(finders) + " |", "|" + "---|" * (len(finders) + 1)]
    errors = []
    for name, by_finder in results.items():
        lines.append(f"| {name} | " + " | ".join(cell(by_finder[finder]) for finder in finders) + " |")
        errors += [f"- {name}, {finder}: {found['error']}" for finder, found in by_finder.items() if found["error"]]
    counts = [sum(cell(found[finder]) == "identical" for found in results.values()) for finder in finders]
    lines.append("| all | " + " | ".join(f"{count} of {len(results)} identical" for count in counts) + " |")
    return "\n".join([*lines, *([""] if errors else []), *errors])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs=3, metavar=("WAY", "FINDER", "SIZE"), help="(internal) train in this process")
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=WAYS, metavar="WAY", help="these ways only")
    parser.add_argument("--write", action="store_true", help="write to benchmarks/results")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.run:
        name, finder, size = arguments.run
        emit(**run(name, finder, int(size)))
    else:
        results = compare(arguments.only)
        head = f"Sizes bounded by {LARGEST}, {EPOCHS} epochs"
        report("trace", f"{head}\n\n{table(results)}", results, write=arguments.write)


if __name__ == "__main__":
    main()
