"""Modules compiled with ``torch.compile``, and their treatment of another batch size."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def was_compiled() -> bool:
    """Whether ``torch.compile`` has compiled anything in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    # counters: private in torch 2.5 to 2.13
    return utils is not None and utils.counters["frames"]["total"] > 0


def forget_compiled() -> None:
    """Compile every function again at its next call, as in the first step of training.

    Without this the second size would be compiled for dynamic shapes, as another program than that of the training, and
    after a few sizes the compiler would stop (its limit of recompilations).
    """
    if was_compiled():
        torch.compiler.reset()


@contextmanager
def each_size_static() -> Iterator[None]:
    """Compile each size for itself, and let training begin as if nothing had been compiled before it."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    from torch._dynamo import config

    try:
        with config.patch(automatic_dynamic_shapes=False):
            yield
    finally:
        forget_compiled()
