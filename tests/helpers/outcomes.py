"""Everything that a training leaves, and the comparison of two such outcomes in every bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_batchmem import BatchFinder
from lightning_batchmem.devices.tensors import tensors_in
from tests.helpers.contract_cases import Case


class Recorder(Callback):
    """Writes down each call that a user's callback gets.

    A record has the tensors in the arguments, and the state at that time.
    """

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def note(self, hook: str, trainer: Trainer, module: LightningModule, *arguments: Any) -> None:
        tensors = [
            (tuple(tensor.shape), tensor.double().sum().item()) for tensor in tensors_in(arguments)
        ]
        gradients = sum(parameter.grad is not None for parameter in module.parameters())
        state = (
            trainer.global_step,
            trainer.current_epoch,
            trainer.num_training_batches,
            gradients,
        )
        modes = [one.training for one in module.modules()]
        callback_metrics = dict(trainer.callback_metrics)
        logged_metrics = dict(trainer.logged_metrics)
        self.calls.append((hook, tensors, state, modes, callback_metrics, logged_metrics))


for _hook in [name for name in dir(Callback) if name.startswith("on_")]:
    setattr(Recorder, _hook, lambda self, *arguments, hook=_hook: self.note(hook, *arguments))


def trainer_of(folder: Path, *callbacks: Callback | None, **arguments: Any) -> Trainer:
    """A trainer that logs to ``folder``, after the random numbers start anew."""
    seed_everything(3, verbose=False)
    return Trainer(
        default_root_dir=folder,
        callbacks=[callback for callback in callbacks if callback is not None],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{
            "accelerator": "cpu",
            "logger": CSVLogger(folder, name="log", version=0),
            **arguments,
        },
    )


def left_by(trainer: Trainer, module: Any, recorder: Recorder, folder: Path) -> dict[str, Any]:
    """Everything that a run leaves."""
    files = sorted(folder.rglob("*"))
    return {
        "weights": module.state_dict(),
        "buffers": dict(module.named_buffers()),
        "attributes": (module.history, module.running, getattr(module, "epoch_steps", None)),
        "flags": [m.training for m in module.modules()],
        "gradients": [p.grad for p in module.parameters()],
        "optimizers": [o.state_dict() for o in trainer.optimizers],
        "schedulers": [s.scheduler.state_dict() for s in trainer.lr_scheduler_configs],
        "accumulation": trainer.accumulate_grad_batches,
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1]),
        "progress": trainer.fit_loop.state_dict(),
        "metrics": dict(trainer.callback_metrics),
        "calls": recorder.calls,
        "files": [str(path.relative_to(folder)) for path in files],
        "texts": [path.read_text() for path in files if path.suffix in (".csv", ".yaml")],
    }


def outcome_of(
    folder: Path,
    case: Case,
    size: int,
    finder: BatchFinder | None,
    *callbacks: Callback,
    **trainer_arguments: Any,
) -> dict[str, Any]:
    recorder = Recorder()
    arguments = {
        "max_epochs": 2,
        **trainer_arguments,
        **case.trainer,
        **(case.follows if finder is None else {}),
    }
    trainer = trainer_of(folder, recorder, *case.callbacks(), *callbacks, finder, **arguments)
    module = (case.hard_coded or case.module)(size) if finder is None else case.module(size)
    trainer.fit(module, **case.fit(size))
    return left_by(trainer, module, recorder, folder)


def assert_same(one: Any, other: Any, where: str) -> None:
    """Equality in every bit, through nested containers."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor) and one.is_sparse:
        assert_same(one.to_dense(), other.to_dense(), where)
    elif isinstance(one, Tensor | np.ndarray):
        assert one.dtype == other.dtype, where
        if isinstance(one, np.ndarray):
            assert one.tobytes() == other.tobytes(), where
        else:
            assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}/{index}")
    else:
        assert one == other or (one != one and other != other), f"{where}: {one!r} is not {other!r}"
