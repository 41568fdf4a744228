"""One search, the training after it, or a training at a given size, in this process and under the limit.

    python -m benchmarks.ways "U-Net" BatchFinder    # search, then train
    python -m benchmarks.ways "U-Net" 96             # train at this size

``benchmarks.search`` runs this in a fresh process. No way to search is given the limit: each finds it out.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BatchSizeFinder

from benchmarks.caps import cap
from benchmarks.common import emit, one_line, trainer_for
from benchmarks.workloads import SAMPLES_RUN, WORKLOADS, Training, module_for
from lightning_batchmem import BatchFinder

STEPS = 60
"""Training steps, after a search too."""

STEPS_PER_ATTEMPT = 3
"""Steps at each size in the functions given to accelerate and toma: as many as Lightning's finder runs by default."""

FIRST_SIZE = 8192 if torch.cuda.is_available() else 512
"""First size of accelerate and toma, which never look above it: 512 is in toma's documentation (accelerate's default of
128 is below what fits); on CUDA it is the ``max_val`` of Lightning's finder."""


class Limit(Callback):
    """Sets the limit as the first ``fit`` starts."""

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self.start_seconds: float | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.start_seconds is None:
            cap(self._room_bytes)
            self.start_seconds = time.perf_counter()


class Progress(Callback):
    """Emits the size that a finder found, and each training step."""

    def __init__(self, limit: Limit, finder: Callback | None = None) -> None:
        self._limit = limit
        self._finder = finder
        self._steps = 0
        self._is_training = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_training = True  # the finder comes first, and runs its steps in this hook
        if self._finder is not None:
            assert isinstance(pl_module, Training)
            _emit_found(pl_module.batch_size, self._limit)
        if isinstance(self._finder, BatchFinder) and self._finder.plan is not None:
            emit(plan=json.loads(self._finder.plan.to_json()))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self._is_training:
            self._steps += 1
            emit(steps=self._steps)


def train(name: str, batch_size: int, limit: Limit, finder: Callback | None = None, steps: int = STEPS) -> None:
    """Train for ``steps`` steps with three evaluations, and a checkpoint after each."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = trainer_for(
            [limit, *([finder] if finder else []), Progress(limit, finder)],
            steps * WORKLOADS[name].optimizers,
            default_root_dir=directory,
            enable_checkpointing=True,
            val_check_interval=steps // 3,
            limit_val_batches=2,
        )
        trainer.fit(module_for(name, batch_size))


def _by_callback(make: Callable[[], Callback]) -> Callable[[str, Limit], None]:
    return lambda name, limit: train(name, 2, limit, make())


def _by_function(search: Callable[[Callable[[int], int]], int]) -> Callable[[str, Limit], None]:
    def search_and_train(name: str, limit: Limit) -> None:
        def attempt(batch_size: int) -> int:  # as their documentation shows: everything is built anew for each size
            trainer_for([limit], STEPS_PER_ATTEMPT * WORKLOADS[name].optimizers).fit(module_for(name, batch_size))
            return batch_size

        batch_size = search(attempt)
        _emit_found(batch_size, limit)
        train(name, batch_size, limit)

    return search_and_train


def _emit_found(batch_size: int, limit: Limit) -> None:
    assert limit.start_seconds is not None
    emit(
        batch_size=batch_size,
        search_seconds=time.perf_counter() - limit.start_seconds,
        samples_run=sum(SAMPLES_RUN.values()),
        out_of_memory_errors=torch.cuda.memory_stats()["num_ooms"] if torch.cuda.is_available() else None,
    )


def _accelerate(attempt: Callable[[int], int]) -> int:
    from accelerate.utils import find_executable_batch_size

    size: int = find_executable_batch_size(attempt, starting_batch_size=FIRST_SIZE)()
    return size


def _toma(attempt: Callable[[int], int]) -> int:
    from toma import simple

    size: int = simple.batch(attempt, FIRST_SIZE)
    return size


WAYS = {
    "BatchFinder": _by_callback(lambda: BatchFinder(memory_limit=None, min_steps_per_epoch=None)),
    "Lightning power": _by_callback(lambda: BatchSizeFinder(mode="power", init_val=2)),
    "Lightning binsearch": _by_callback(lambda: BatchSizeFinder(mode="binsearch", init_val=2)),
    "accelerate": _by_function(_accelerate),
    "toma": _by_function(_toma),
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("way", help=f"one of {', '.join(WAYS)}, or a batch size")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a training at a given size; default: %(default)s")
    arguments = parser.parse_args()
    name, way = arguments.workload, arguments.way
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(0, verbose=False)
    limit = Limit(WORKLOADS[name].room_bytes)
    try:
        if way.isdecimal():
            train(name, int(way), limit, steps=arguments.steps)
        else:
            WAYS[way](name, limit)
    except Exception as error:  # noqa: BLE001 - near the limit memory may run out anywhere, with any error
        emit(error=one_line(error))


if __name__ == "__main__":
    main()
