"""Look into a checkpoint before Lightning loads it. Read in lightning 2.5.0 and 2.6.6."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.load import _METADATA_FILENAME  # private in 2.5.0 to 2.6.6
from lightning.pytorch import Trainer


def callback_states(path: Path) -> dict[str, Any]:
    """The states of the callbacks in a checkpoint, of which nothing but plain types is loaded.

    Args:
        path: a file, or the directory of a sharded checkpoint.

    Raises:
        OSError: when it cannot be read.
        pickle.UnpicklingError: when it has more than plain types in it.
        RuntimeError: when it is no checkpoint.
    """
    # the weights stay on the disk: a checkpoint may be larger than the memory of the machine
    file = path / _METADATA_FILENAME if path.is_dir() else path
    checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    states = checkpoint.get("callbacks") if isinstance(checkpoint, dict) else None
    return states if isinstance(states, dict) else {}


def restored_after_setup(trainer: Trainer) -> Path | None:
    """The checkpoint that this run resumes from, where its callbacks are restored only after ``on_fit_start``.

    ``Trainer._run`` alone knows its path by then: ``trainer.ckpt_path`` is set when the checkpoint is loaded.
    """
    if not trainer.strategy.restore_checkpoint_after_setup:
        return None
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "_run" and frame.f_locals.get("self") is trainer):
        frame = frame.f_back
    path = None if frame is None else frame.f_locals.get("ckpt_path")
    return None if path is None or "://" in str(path) else Path(path)
