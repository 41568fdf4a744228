"""Callback states of a checkpoint, without loading its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.load import _METADATA_FILENAME  # private in 2.5.0 to 2.6.6


def callback_states(path: Path) -> dict[str, Any]:
    """Load the callback states of a checkpoint file, or of the directory of a sharded checkpoint."""
    # the weights stay on the disk: a checkpoint may be larger than the memory of the machine
    file = path / _METADATA_FILENAME if path.is_dir() else path
    checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    states = checkpoint.get("callbacks") if isinstance(checkpoint, dict) else None
    return states if isinstance(states, dict) else {}
