"""Programs of ``torch.compile``: each size compiled for itself, and none left for the training."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def compiled_frames() -> int:
    """A number that grows with each function that ``torch.compile`` compiles in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    # The counters are private in torch 2.5 to 2.14. With fullgraph=True only graphs are counted.
    counters: dict[str, Counter[str]] = utils.counters
    # A Counter takes four times as long to return 0 by itself, and this runs in every step.
    return counters["frames"].get("total", 0) + counters["stats"].get("unique_graphs", 0)


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
    each_static: AbstractContextManager[object] = nullcontext()
    if "torch._dynamo" in sys.modules:
        from torch._dynamo import config

        each_static = config.patch(automatic_dynamic_shapes=False)
    try:
        with each_static:
            yield
    finally:
        forget_compiled()
