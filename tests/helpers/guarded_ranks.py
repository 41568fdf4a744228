"""A rank of test_oom_guard_ranks.py, on which steps run out of memory.

It writes the results to a file.
"""

from __future__ import annotations

import json
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_batchmem import OomGuard
from tests.helpers.guarded import SIZES, Failing, loader, trained

# Without an answer of the other rank for so long, a training ends with an error.
TIMEOUT = timedelta(seconds=60)

# Under accumulation of two, the batches with odd numbers exchange gradients.
FORWARD = {0: "start", 3: "forward", 7: "middle", 8: "start", 9: "middle", 11: "forward"}
BOTH = {3: "forward", 8: "backward", 9: "start", 10: "backward"}


class OnRank(Failing):
    """Fails on some ranks only, and has buffers that DDP exchanges."""

    def __init__(self, fails: Any, case: dict[str, Any]) -> None:
        super().__init__(fails)
        self.case = case
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        if not case.get("ddp", {}).get("find_unused_parameters"):
            del self.unused

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += len(batch[0])
        if self.case.get("gathers"):
            self.all_gather(batch[0].mean())
        return super().training_step(batch, batch_idx)

    def arrive_at(self, place: str) -> None:
        if self.global_rank in self.case["ranks"]:
            super().arrive_at(place)

    def log_values(self, loss: Tensor, errors: Tensor) -> None:
        self.log("one", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.arrive_at("middle")
        self.log("other", 2 * loss, sync_dist=True)
        self.log("own", 3 * loss, on_epoch=True)


class Logged(Callback):
    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.values.append({key: float(one) for key, one in trainer.callback_metrics.items()})


def run_case(rank: int, case: dict[str, Any], *, guarded: bool) -> dict[str, Any]:
    guard = OomGuard() if guarded else None
    logged = Logged()
    options = {
        "strategy": DDPStrategy(timeout=TIMEOUT, **case.get("ddp", {})),
        "devices": 2,
        "use_distributed_sampler": False,
        "accumulate_grad_batches": case.get("accumulate", 1),
        "max_steps": -1,
        "max_epochs": 2,
    }
    made: dict[str, Any] = {}

    def make() -> OnRank:
        made["module"] = OnRank(case["fails"] if guarded else {}, case)
        return made["module"]

    loaders = loader(seed=rank, sizes=case.get("sizes", SIZES))
    error = ""
    notes: list[str] = []
    try:
        trained(make, guard, logged, loaders=loaders, **options)
    # The other rank may end with any error of gloo.
    except Exception as caught:  # noqa: BLE001
        error = f"{type(caught).__name__}: {caught}"
        notes = getattr(caught, "__notes__", [])
    module = made["module"]
    return {
        "weights": [parameter.tolist() for parameter in module.parameters()],
        "logged": logged.values,
        "samples": module.samples,
        "oom_splits": guard.oom_splits if guard is not None else 0,
        "error": error,
        "notes": notes,
    }


def run_cases(rank: int, directory: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Run each case with enough memory and with errors; the last one may end with an error."""
    warnings.simplefilter("ignore")
    found = {}
    for name, case in cases.items():
        wholes = [] if case.get("ends") else [run_case(rank, case, guarded=False)]
        found[name] = [*wholes, run_case(rank, case, guarded=True)]
        (directory / f"{rank}.json").write_text(json.dumps(found))
    # After an error, the process group cannot be left together.
    os._exit(0)
