"""Who calls an operator: a line of the project that is named, or the initialization of a weight.

This file is executed before Lightning is imported, so it imports torch and the standard library
only, and neighbours that were loaded before.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from lightning_batchmem.simulated_gpu.known import UNREAD_BYTES, Uniform, is_parameter, state_of

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
    *{sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")},
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
        self._named: set[tuple[str, str]] = set()

    def add(self, what: str, amount: str, tensor: Tensor) -> None:
        """Name the line that is running now, once.

        Args:
            what: what depends on the values of ``tensor``.
            amount: what is assumed of it.
            tensor: the unknown values.
        """
        state = state_of(tensor)
        # A backward pass uses the mask of the forward pass again.
        if isinstance(state, Uniform) and not state.is_named_now():
            return
        line = project_line()
        if (what, line) not in self._named:
            self._named.add((what, line))
            self.sentences.append(
                f"{what} ({amount}) depends on values that are not computed ({line})"
            )


def project_line() -> str:
    """The innermost line outside of installed packages, as ``file.py:88: its text``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (line := _line_of(frame)) is not None:
            return line
        frame = frame.f_back
    # A backward pass runs in a thread of torch, and the main thread waits for it.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if (line := _line_of(frame)) is not None:
            return line
        frame = frame.f_back
    return "unknown line"


def _line_of(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    if path.startswith(_PLACES) or "site-packages" in path or "dist-packages" in path:
        return None
    text = linecache.getline(path, frame.f_lineno).strip()
    return f"{os.path.basename(path)}:{frame.f_lineno}: {text}"
