"""What is assumed and read, by lines of the project, and the initialization of a weight.

This file is executed before Lightning is imported, so it imports torch and the standard library
only, and a neighbour that was loaded before.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
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


_CHECKING = ("lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics")
"""Packages that read values to check their arguments, and pick elements to leave out none."""
_SYNC_BATCH_NORM = os.path.join("torch", "nn", "modules", "_functions.py")
"""It leaves out ranks without samples, and there are none."""


class Assumptions:
    """What is assumed about unknown values, with the lines of the project that need them."""

    def __init__(self) -> None:
        # What depends on values, and the line -> the largest amount, its text, and the advice.
        self._largest: dict[tuple[str, str], tuple[int, str, str]] = {}
        # Sentences of the library -> the line in which each was said first.
        self._of_library: dict[str, str] = {}

    @property
    def sentences(self) -> list[str]:
        """One for each line, with the largest amount."""
        return [
            f"{what} ({amount.format(number)}) depends on values that are not computed ({line})."
            f" {advice}"
            for (what, line), (number, amount, advice) in self._largest.items()
        ] + [f"{text} ({line})." for text, line in self._of_library.items()]

    def add(self, what: str, amount: str, number: int, advice: str, tensor: Tensor) -> None:
        """Name the line that is running now, once.

        Args:
            what: what depends on the values of ``tensor``.
            amount: what is assumed of it, with ``{:,}`` for the number.
            number: how many; of several sizes, a sentence has the largest.
            advice: a sentence about what a user can do.
            tensor: the unknown values.
        """
        attributes = tensor.untyped_storage().__dict__
        # A backward pass uses the mask of the forward pass again. What a package checks holds.
        if "_is_named" in attributes or _is_decided():
            return
        attributes["_is_named"] = True
        key = what, project_line()
        self._largest[key] = max((number, amount, advice), self._largest.get(key, (-1, "", "")))

    def add_of_library(self, sentence: bytes) -> None:
        """Add a sentence of the library of the simulated GPU, once, with the line that runs now."""
        # A backward pass has its own thread, and no line.
        if threading.current_thread() is threading.main_thread():
            text = sentence.decode()
            self._of_library.setdefault(f"{text[0].upper()}{text[1:]}", project_line())


def _is_decided() -> bool:
    """Whether a package that only checks something calls torch now, and not the project."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        package = path.partition("-packages" + os.sep)[2].partition(os.sep)[0]
        if package in _CHECKING or path.endswith(_SYNC_BATCH_NORM):
            return True
        if is_of_project(path) or package not in ("", "torch"):
            return False
        frame = frame.f_back
    return False


MOST_READS = 1000
MOST_SECONDS = 20
"""No line of a training reads this many unknown values in one step, in this much CPU time."""


class Reads:
    """Ends the program where a line reads unknown values again and again in one step.

    A loop that ends by a value, such as ``while loss.item() > 0.5``, would never end.

    Args:
        end: is called with a sentence.
    """

    def __init__(self, end: Callable[[str], object]) -> None:
        self._end = end
        # Before the first step, a program may read a whole data set.
        self._is_step = False
        self._of_lines: dict[str, tuple[int, float]] = {}

    def begin_step(self) -> None:
        """Begin to count."""
        self._is_step = True
        self._of_lines.clear()

    def count(self) -> None:
        """Count a read of the line that is running now."""
        if not self._is_step:
            return
        line = project_line()
        now = time.process_time()
        reads, since = self._of_lines.get(line, (0, now))
        self._of_lines[line] = reads + 1, since
        if reads >= MOST_READS and now - since >= MOST_SECONDS:
            self._end(
                f"a line ({line}) has read {reads:,} values that are not computed in one step, in"
                f" {now - since:.0f} s of CPU time. A loop that ends by such a value does not end"
                " on a simulated GPU: give it a largest number of rounds"
            )


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

    Attributes:
        sentences: that it was switched off, or nothing.
    """

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self._compiled: set[str] = set()

    def count(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Count what the operator will compile, and leave it to run as any other one.

        The first one prints that kernels are compiled.
        """
        if not self._compiled:
            sys.stderr.write("cuDNN compiles its attention for each new shape: some seconds each\n")
            sys.stderr.flush()
        shapes = tree_map(_shape, (args, kwargs))
        self._compiled.add(f"{func} {shapes}")
        if len(self._compiled) >= MOST_SHAPES and not self.sentences:
            torch.backends.cuda.enable_cudnn_sdp(False)
            self.sentences.append(
                f"cuDNN's attention was compiled for {MOST_SHAPES} shapes, and all others ran on"
                " PyTorch's own kernels."
            )
        return NotImplemented


def _shape(value: Any) -> Any:
    """What an execution plan depends on: a tensor's type, shape and strides, or the value."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    # A scale and a probability of dropout; seeds and offsets are tensors.
    return value
