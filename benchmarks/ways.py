"""The ways to find a batch size: this package's, and those that others publish. Each in a fresh process of its own.

    python -m benchmarks.ways WORKLOAD WAY CAP      # what :func:`search` returns, as JSON in the last line

None is told the room; this package's reads it from the system, and is given it in bytes on CUDA, where torch 2.5.1 does
not tell.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BatchSizeFinder

from benchmarks.autobatch import autobatch
from benchmarks.caps import Cap, Capped, caps_here, room_bytes
from benchmarks.common import answer, described, trainer_for
from benchmarks.watched import Watched, watched
from benchmarks.workloads import WORKLOADS
from lightning_batchmem import BatchFinder
from lightning_batchmem.devices.select import device_memory_for

STEPS_PER_ATTEMPT = 3
"""What accelerate and toma train at each size: as many steps as Lightning's finder runs by default."""

FIRST_SIZE = 8192 if torch.cuda.is_available() else 512
"""Where accelerate and toma start, who never look above it: 512 is in toma's documentation (accelerate's default of 128
would end below what fits); on CUDA it is the ``max_val`` of Lightning's finder."""

Way = Callable[[str, Cap], tuple[int, dict[str, Any]]]


class SearchEndedError(Exception):
    """The search is over, and training is another process's work."""


class SearchEnd(Callback):
    """Behind a finder, ends the process's work when that is through."""

    def __init__(self, cap: Cap) -> None:
        self._cap = cap

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._cap.stop_watch()
        raise SearchEndedError


def _by_callback(finder: Callback, name: str, cap: Cap) -> int:
    module = watched(name)
    with tempfile.TemporaryDirectory() as directory:  # for the checkpoint that Lightning's finder writes
        try:
            trainer_for([finder, Capped(cap), SearchEnd(cap)], 1, Path(directory)).fit(module)
        except SearchEndedError:
            return module.batch_size
    raise AssertionError("a fit that SearchEnd ends came to its own end")


def _ours(objective: Any) -> Way:
    def way(name: str, cap: Cap) -> tuple[int, dict[str, Any]]:
        memory_limit = cap.room_bytes if cap.kind == "device" else None
        finder = BatchFinder(objective=objective, memory_limit=memory_limit, worst_case=WORKLOADS[name].worst_case)
        size = _by_callback(finder, name, cap)
        assert finder.plan is not None
        return size, {"plan": json.loads(finder.plan.to_json())}

    return way


def _lightning(mode: str) -> Way:
    return lambda name, cap: (_by_callback(BatchSizeFinder(mode=mode, init_val=2), name, cap), {})


def _training_at(name: str, cap: Cap) -> Callable[[int], int]:
    """A function as accelerate and toma document it: it builds everything anew for the size that it is given."""

    def train(batch_size: int) -> int:
        steps = STEPS_PER_ATTEMPT * WORKLOADS[name].optimizers
        trainer_for([Capped(cap)], steps).fit(watched(name, batch_size))
        return batch_size

    return train


def _accelerate(name: str, cap: Cap) -> tuple[int, dict[str, Any]]:
    from accelerate.utils import find_executable_batch_size

    size: int = find_executable_batch_size(_training_at(name, cap), starting_batch_size=FIRST_SIZE)()
    return size, {}


def _toma(name: str, cap: Cap) -> tuple[int, dict[str, Any]]:
    from toma import simple

    size: int = simple.batch(_training_at(name, cap), FIRST_SIZE)
    return size, {}


WAYS: dict[str, Way] = {
    "ours": _ours("memory"),
    "ours-throughput": _ours("throughput"),
    "power": _lightning("power"),
    "binsearch": _lightning("binsearch"),
    "accelerate": _accelerate,
    "toma": _toma,
    "autobatch": autobatch,
}

TITLES = {
    "ours": "BatchFinder",
    "ours-throughput": "BatchFinder throughput",
    "power": "Lightning power",
    "binsearch": "Lightning binsearch",
    "accelerate": "accelerate",
    "toma": "toma",
    "autobatch": "AutoBatch's method",
}


def search(name: str, way: str, kind: str) -> dict[str, Any]:
    """Search in this process.

    Args:
        name: a workload.
        way: one of ``WAYS``.
        kind: the kind of the cap.

    Returns:
        ``batch_size`` (``None`` where none was found, and then ``error`` says why), ``out_of_memory`` (messages),
        ``samples_by_size``, ``search_seconds``, ``device_counters``, and what the way tells besides.
    """
    cap = Cap(kind, room_bytes(name))
    size: int | None = None
    details: dict[str, Any] = {}
    error_text = None
    try:
        size, details = WAYS[way](name, cap)
    except Exception as error:  # noqa: BLE001 - whatever a finder cannot do is a finding
        error_text = described(error)
    if cap.seconds is None:
        cap.stop_watch()
    device_memory = device_memory_for(torch.device("cuda" if kind == "device" else "cpu"))
    assert device_memory is not None
    return {
        "batch_size": size,
        "error": error_text,
        "out_of_memory": Watched.out_of_memory,
        "samples_by_size": dict(Watched.samples_by_size),
        "search_seconds": cap.seconds,
        "device_counters": device_memory.counters(),
        **details,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("cap", choices=caps_here())
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(0, verbose=False)
    answer(search(arguments.workload, arguments.way, arguments.cap))


if __name__ == "__main__":
    main()
