"""The command ``check``: its options, and what it prints."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from lightning_batchmem.check.assertion import SMALLER, check_tolerance, compare_with_reference
from lightning_batchmem.check.measurement import measure
from lightning_batchmem.check.reference import read_reference
from lightning_batchmem.comparison import Make

DESCRIPTION = """\
Compare the memory of a training step with a reference. The step runs on the host at 2 and 8
samples, and live bytes are compared: the same commit gives the same numbers with the same versions.

exit code: 0 if no part grew by more than the tolerance; 1 if one did, with a line for each of them;
2 for wrong usage and for a step that cannot be measured."""


def add_options(parser: ArgumentParser) -> None:
    """Add the options that only this command has."""
    parser.add_argument(
        "--reference", metavar="FILE", type=Path, required=True, help="the file with the reference"
    )
    parser.add_argument(
        "--tolerance",
        metavar="SHARE",
        default=0.01,
        type=_tolerance,
        help="each part may grow by this share, such as 1%% or 0.01; default: 1%%",
    )
    parser.add_argument(
        "--update", action="store_true", help="write the reference instead of comparing with it"
    )


def check_reference(path: Path, *, is_written: bool) -> None:
    """Raise a ValueError unless the reference can be read, or written.

    The measurement takes seconds, so this comes before it.
    """
    if is_written:
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"must be a file in an existing directory, got {str(path)!r}")
    elif not path.is_file():
        raise ValueError(f"must be a file, got {str(path)!r}; --update writes it")
    else:
        read_reference(path)


def run_check(make: Make, base: Mapping[str, Any], options: Namespace) -> int:
    """Write the reference or compare with it, and return the exit code."""
    path = options.reference
    if options.update:
        path.write_text(measure(make, base).memory.to_json(), encoding="utf-8")
        sys.stdout.write(f"{path}\n")
        return 0
    comparison = compare_with_reference(make, path, options.tolerance, base)
    sys.stderr.write("".join(f"{note}\n" for note in comparison.notes))
    lines = comparison.grown
    if comparison.smaller and not lines:
        lines = [*comparison.smaller, SMALLER]
    lines = lines or [f"equal to {path} within {100 * options.tolerance:g} %"]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if comparison.grown else 0


def _tolerance(text: str) -> float:
    """A share, from a text such as ``1%`` or ``0.01``."""
    try:
        # 7 / 100 is 0.07 to Decimal, and 0.07000000000000001 to float.
        share = float(Decimal(text[:-1]) / 100 if text.endswith("%") else Decimal(text))
        check_tolerance(share)
    except (ArithmeticError, ValueError) as error:
        raise ArgumentTypeError(f"must be a share such as 1% or 0.01, got {text!r}") from error
    return share
