"""Programs of ``torch.compile``: each size compiled for itself, and none left for the training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def compiled_frames() -> int:
    """How many functions ``torch.compile`` has compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    # The counters are private in torch 2.5 to 2.13.
    return 0 if utils is None else int(utils.counters["frames"]["total"])


def forget_compiled() -> None:
    """Compile every function again at its next call, as in the first step of training.

    Without this the second size would be compiled for dynamic shapes, as another program than that
    of the training, and after a few sizes the compiler would stop (its limit of recompilations).
    """
    if compiled_frames():
        torch.compiler.reset()


@contextmanager
def each_size_static() -> Iterator[None]:
    """Compile each size for itself, and let training begin as if nothing had been compiled."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    from torch._dynamo import config

    try:
        with config.patch(automatic_dynamic_shapes=False):
            yield
    finally:
        forget_compiled()
