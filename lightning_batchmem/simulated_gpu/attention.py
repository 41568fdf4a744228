"""The attention of cuDNN, which compiles its kernels for each new shape, for a bounded time.

This file is executed before Lightning is imported, so it imports torch and the standard library
only.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# A search has up to 24 sizes, and each of them a forward and a backward pass. A shape takes one to
# seven seconds.
MOST_SHAPES = 64

OPERATORS = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    "_cudnn_attention_forward",
    "_cudnn_attention_backward",
)


class CudnnAttention:
    """Counts the shapes of cuDNN's attention, and switches it off after :data:`MOST_SHAPES`.

    Args:
        sentences: a list to which is added that it was switched off.
    """

    def __init__(self, sentences: list[str]) -> None:
        self._sentences = sentences
        self._compiled: set[str] = set()
        self._is_off = False

    def count(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Count what the operator will compile, and leave it to run as any other one.

        The first one prints that kernels are compiled.
        """
        if not self._compiled:
            sys.stderr.write("cuDNN compiles its attention for each new shape: some seconds each\n")
            sys.stderr.flush()
        shapes = tree_map(_shape, (args, kwargs))
        self._compiled.add(f"{func} {shapes}")
        has_room = len(self._compiled) < MOST_SHAPES
        if not has_room and not self._is_off:
            self._is_off = True
            torch.backends.cuda.enable_cudnn_sdp(False)
            self._sentences.append(
                f"cuDNN's attention was compiled for {MOST_SHAPES} shapes, and all others ran on"
                " PyTorch's own kernels"
            )
        return NotImplemented


def _shape(value: Any) -> Any:
    """What an execution plan depends on: a tensor's type, shape and strides, or the value."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    # A scale and a probability of dropout; seeds and offsets are tensors.
    return value
