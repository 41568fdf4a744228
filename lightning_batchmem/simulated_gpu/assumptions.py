"""Who calls an operator: a line of the project that is named, or the initialization of a weight.

This file is executed before Lightning is imported, so it imports torch and the standard library
only, and a neighbour that was loaded before.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_batchmem.simulated_gpu.known import UNREAD_BYTES, is_parameter

_INITIALIZATION = os.path.join("torch", "nn", "init.py")


def is_initialization(tensor: Tensor) -> bool:
    """Whether the host is about to fill a large weight, which nobody reads."""
    if tensor.nbytes <= UNREAD_BYTES or tensor.layout is not torch.strided:
        return False
    attributes = tensor.untyped_storage().__dict__
    if is_parameter(tensor):
        attributes["_is_weight"] = True
    if "_is_weight" in attributes:
        return True
    frame: FrameType | None = sys._getframe(2)
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith(_INITIALIZATION):
            attributes["_is_weight"] = True
            return True
        frame = frame.f_back
    return False


_PLACES = (
    *{sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")},
    str(Path(__file__).resolve().parents[1]),
    "<frozen",
)


class Assumptions:
    """What is assumed about unknown values, with the lines of the project that need them.

    Attributes:
        sentences: one for each line.
    """

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self._named: set[tuple[str | bytes, str]] = set()

    def add(self, what: str, amount: str, tensor: Tensor) -> None:
        """Name the line that is running now, once.

        Args:
            what: what depends on the values of ``tensor``.
            amount: what is assumed of it.
            tensor: the unknown values.
        """
        attributes = tensor.untyped_storage().__dict__
        # A backward pass uses the mask of the forward pass again.
        if "_is_named" in attributes:
            return
        attributes["_is_named"] = True
        line = project_line()
        if (what, line) not in self._named:
            self._named.add((what, line))
            self.sentences.append(
                f"{what} ({amount}) depends on values that are not computed ({line})"
            )

    def add_of_library(self, sentence: bytes) -> None:
        """Add a sentence of the library of the simulated GPU, once, with the line that runs now."""
        # A backward pass has its own thread, and no line.
        is_named = (sentence, "") in self._named
        if threading.current_thread() is threading.main_thread() and not is_named:
            self._named.add((sentence, ""))
            self.sentences.append(f"{sentence.decode()} ({project_line()})")


def project_line() -> str:
    """The innermost line outside of installed packages, as ``file.py:88: its text``."""
    # A backward pass runs in a thread of torch, and the main thread waits for it. A variable for
    # its frame could make a cycle that keeps tensors.
    main = threading.main_thread().ident or 0
    line = _line_from(sys._getframe(1)) or _line_from(sys._current_frames().get(main))
    return line or "unknown line"


def is_of_project(path: str) -> bool:
    """Whether a file is not one of an installed package."""
    is_installed = "site-packages" in path or "dist-packages" in path
    return not is_installed and not path.startswith(_PLACES)


def _line_from(frame: FrameType | None) -> str | None:
    while frame is not None:
        path = frame.f_code.co_filename
        if is_of_project(path):
            text = linecache.getline(path, frame.f_lineno).strip()
            return f"{os.path.basename(path)}:{frame.f_lineno}: {text}"
        frame = frame.f_back
    return None


def running_operator() -> str:
    """The operator of torch that runs now, as ``aten::mm (file.py:88: its text)``."""
    frame: FrameType | None = sys._getframe(1)
    name = "a library"
    while frame is not None:
        # So it is called in values.py.
        function = frame.f_locals.get("func")
        if isinstance(function, torch._ops.OpOverload):
            name = function._schema.name
            break
        frame = frame.f_back
    return f"{name} ({project_line()})"


# A search has up to 24 sizes, and each of them a forward and a backward pass. A shape takes one to
# seven seconds.
MOST_SHAPES = 64

CUDNN_ATTENTION = (
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
