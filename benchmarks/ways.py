"""One search, the training after it, or a training at a given size.

Everything runs in this process and under the limit.

    python -m benchmarks.ways "U-Net" BatchFinder    # search, then train
    python -m benchmarks.ways "U-Net" 96             # train at this size

``benchmarks.search`` runs this in a fresh process. No way to search is given the limit: each finds
it out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder

from benchmarks.caps import cap
from benchmarks.common import command_line, emit, one_line, trainer_for
from benchmarks.networks import group, host_training
from lightning_batchmem import BatchFinder, Plan

NETWORKS = group("host", "host, held out")
STEPS = 60

STEPS_PER_ATTEMPT = 3
"""Steps at each size in the functions given to accelerate and toma.

Lightning's finder runs as many by default.
"""

FIRST_SIZE = 8192 if torch.cuda.is_available() else 512
"""First size of accelerate and toma, which never look above it.

512 is in toma's documentation (accelerate's default of 128 is below what fits). On CUDA it is the
``max_val`` of Lightning's finder.
"""


class Limit(Callback):
    """Sets the limit as the first ``fit`` starts; emits what was found since."""

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self._start_seconds = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self._start_seconds:
            cap(self._room_bytes)
            self._start_seconds = time.perf_counter()

    def found(self, batch_size: int) -> None:
        search_seconds = time.perf_counter() - self._start_seconds
        emit(batch_size=batch_size, search_seconds=round(search_seconds, 3))


class Progress(Callback):
    """Emits the size that a finder found, and each training step."""

    def __init__(self, limit: Limit, finder: Callback | None = None) -> None:
        self._limit = limit
        self._finder = finder
        self._steps: int | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Counting starts here, because the finder comes first and runs its steps in this hook.
        self._steps = 0
        if self._finder is not None:
            # mypy does not see that the module is a HostTraining, whose batch size is an int.
            self._limit.found(pl_module.batch_size)  # type: ignore[arg-type]
        if isinstance(self._finder, BatchFinder) and self._finder.plan is not None:
            emit_peaks(self._finder.plan)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self._steps is not None:
            self._steps += 1
            emit(steps=self._steps)


def emit_peaks(plan: Plan) -> None:
    """Emit the sizes that were tried, and for each phase its peaks at these sizes.

    Peaks are beyond the bytes of tensors before the first step. The size that was found is the
    last.
    """
    start_bytes = plan.trials[0].memory.start_bytes
    trials = [trial for trial in plan.trials if trial.outcome == "ok" and trial.memory.is_exact]
    peaks = {
        phase: [trial.memory.phase_peak_bytes[phase] - start_bytes for trial in trials]
        for phase in trials[-1].memory.phase_peak_bytes
    }
    emit(start_bytes=start_bytes, sizes=[trial.batch_size for trial in trials], peaks=peaks)


def _accelerate(attempt: Callable[[int], int]) -> Any:
    from accelerate.utils import find_executable_batch_size

    return find_executable_batch_size(attempt, starting_batch_size=FIRST_SIZE)()


def _toma(attempt: Callable[[int], int]) -> Any:
    from toma import simple

    return simple.batch(attempt, FIRST_SIZE)


CALLBACKS: dict[str, Callable[[], Callback]] = {
    "BatchFinder": lambda: BatchFinder(
        memory_limit=None, min_steps_per_epoch=None, objective="memory"
    ),
    "Lightning power": lambda: BatchSizeFinder(mode="power", init_val=2),
    "Lightning binsearch": lambda: BatchSizeFinder(mode="binsearch", init_val=2),
}
FUNCTIONS = {"accelerate": _accelerate, "toma": _toma}
WAYS = [*CALLBACKS, *FUNCTIONS]


def run(name: str, way: str, steps: int, limit: Limit) -> None:
    """Search if ``way`` is no size, and train for ``steps`` steps.

    The training has three evaluations, and a checkpoint after each.
    """
    network = NETWORKS[name]

    # The documentation of accelerate and toma also builds everything anew for each size.
    def attempt(batch_size: int) -> int:
        trainer_for([limit], STEPS_PER_ATTEMPT * network.optimizers).fit(
            host_training(network, batch_size)
        )
        return batch_size

    finder = CALLBACKS[way]() if way in CALLBACKS else None
    batch_size = int(way) if way.isdecimal() else 2
    if way in FUNCTIONS:
        batch_size = FUNCTIONS[way](attempt)
        limit.found(batch_size)
    with tempfile.TemporaryDirectory() as directory:
        callbacks = (limit, finder, Progress(limit, finder))
        trainer = trainer_for(
            [callback for callback in callbacks if callback is not None],
            steps * network.optimizers,
            default_root_dir=directory,
            enable_checkpointing=True,
            val_check_interval=steps // 3,
            limit_val_batches=2,
        )
        trainer.fit(host_training(network, batch_size))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("way", help=f"one of {', '.join(WAYS)}, or a batch size")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="of the training; default: %(default)s"
    )
    chosen = parser.parse_args()
    limit = Limit(NETWORKS[chosen.network].room_bytes)
    try:
        run(chosen.network, chosen.way, chosen.steps, limit)
    # Near the limit memory may run out anywhere, with any error.
    except Exception as error:  # noqa: BLE001
        emit(error=one_line(error))


if __name__ == "__main__":
    main()
