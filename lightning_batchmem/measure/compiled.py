"""What ``torch.compile`` has made so far, and how it treats another batch size."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def forget_compiled() -> None:
    """Have every compiled function compiled again when it is next called, as it is in the first step of training.

    Without that the second size that a search runs would be compiled for dynamic shapes, as another program than that
    of the training; and after a few sizes the compiler would give up (its limit of recompilations).
    """
    if "torch._dynamo" in sys.modules:  # else nothing has been compiled, and it need not be imported
        torch.compiler.reset()


@contextmanager
def each_size_static() -> Iterator[None]:
    """Let each size be compiled for itself, and training begin as if nothing had been compiled before it."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    from torch._dynamo import config

    try:
        with config.patch(automatic_dynamic_shapes=False):
            yield
    finally:
        forget_compiled()
