"""What the source of a program says about trainings besides the one that is searched."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from lightning_batchmem.simulated_gpu.assumptions import is_of_project


def notes_about_other_fits(frame: FrameType | None) -> list[str]:
    """A sentence if the program may call ``Trainer.fit`` more than once.

    Args:
        frame: where it is called now.
    """
    others = "; ".join(dict.fromkeys(_other_calls(frame)))
    return [f"Only the first Trainer.fit is searched: {others}."] if others else []


def _other_calls(frame: FrameType | None) -> Iterator[str]:
    """The other calls of ``fit``, and of each function that has led to it."""
    called = "fit"
    # Other objects than a Trainer have a method with this name too.
    pattern = r".*(?i:trainer).*\.fit"
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if is_of_project(str(path)):
            line = frame.f_lineno
            for node in _nodes_of(path):
                is_here = getattr(node, "lineno", 0) <= line <= getattr(node, "end_lineno", 0)
                if is_here and isinstance(node, ast.For | ast.While):
                    yield f"line {line} of {path.name} calls {called} in a loop"
                if isinstance(node, ast.Call) and not is_here:
                    name = ast.unparse(node.func)
                    if re.fullmatch(pattern, name, re.DOTALL):
                        yield f"line {node.lineno} of {path.name} calls {called} too"
            called = frame.f_code.co_name
            pattern = rf"(self\.)?{re.escape(called)}"
        frame = frame.f_back


def _nodes_of(path: Path) -> list[ast.AST]:
    """What a file is made of; nothing if its code comes from elsewhere, such as a template."""
    try:
        return list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return []
