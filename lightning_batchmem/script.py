"""A training script in a process of its own, and a search by its ``Trainer.fit``."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn

from lightning_batchmem.factory import VARIABLE
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.search.kept_trials import ended_in_trial

MOST_STARTS = 4
"""A search whose process ends in a trial is started at most this often."""


@dataclass(frozen=True)
class Script:
    """What is run up to its first ``Trainer.fit``.

    Args:
        kind: a file, a module as after ``python -m``, or a function that makes module and data,
            for a search or for the memory test.
        target: the path or the name.
        arguments: the program's own arguments.
        trainer: arguments of the Trainer for a function.
    """

    kind: Literal["script", "module", "function", "memory_test"]
    target: str
    arguments: tuple[str, ...] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_command(cls, words: list[str]) -> Script:
        """The program of a command line: ``train.py ...``, ``-m my_package.train ...``.

        The name of an installed program is a script too.

        Raises:
            ValueError: if there is no such program.
        """
        if words[0] == "-m":
            if len(words) == 1:
                raise ValueError("-m must be followed by the name of a module")
            # Only the program itself should import packages of the project.
            package = words[1].partition(".")[0]
            in_folder = PathFinder.find_spec(package, [os.getcwd()])
            if in_folder is None and find_spec(package) is None:
                raise ValueError(f"there is no module {words[1]!r}")
            return cls("module", words[1], tuple(words[2:]))
        path = words[0]
        if not Path(path).is_file():
            path = shutil.which(path) or ""
            if not path:
                raise ValueError(
                    f"there is no script {words[0]!r} in {Path.cwd()}. Write its path, or for"
                    " `find` MODULE:NAME for a function."
                )
        with Path(path).open("rb") as file:
            first_line = file.readline(200)
        is_installed = path != words[0]
        is_program = is_installed or first_line.startswith(b"#!")
        if (is_program and b"python" not in first_line) or b"\0" in first_line:
            raise ValueError(f"{path} must be a Python script")
        return cls("script", path, tuple(words[1:]))


@contextmanager
def ended_with_children() -> Iterator[None]:
    """Let SIGTERM raise an exception, with which the process of a program and its files end."""

    def end(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def given_options(options: SearchOptions, defaults: SearchOptions) -> dict[str, Any]:
    """The options that differ from the defaults of a command.

    Where there are none, those of the project's own BatchFinder hold.
    """
    before = asdict(defaults)
    return {name: value for name, value in asdict(options).items() if value != before[name]}


def search_by(script: Script, path: Path, options: Mapping[str, Any]) -> None:
    """Start a script, which searches instead of training, until its plan is written.

    A start that ends in a trial is followed by another one, which goes on behind that size.

    Args:
        script: the script or module.
        path: the file of the plan.
        options: arguments of BatchFinder.

    Raises:
        ValueError: if there is no plan in the end.
    """
    texts = [f"{name}={value!r}" for name, value in options.items()]
    setting = ",".join([f"find:plan={path}", *texts, "then=exit"])
    target = ["-m", script.target] if script.kind == "module" else [script.target]
    for start in range(MOST_STARTS):
        with ended_with_children():
            # The command is the user's own program.
            code = subprocess.run(  # noqa: S603
                [sys.executable, *target, *script.arguments],
                env={**os.environ, VARIABLE: setting},
                check=False,
            ).returncode
        if code == 0 and path.exists():
            return
        if code == 0:
            raise ValueError(f"{script.target} ended without a call of Trainer.fit")
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        if not ended_in_trial(path) or start + 1 == MOST_STARTS:
            raise ValueError(f"{script.target} {how}, and there is no plan in {path}")
        sys.stderr.write(f"{script.target} {how} in a trial, and is started again\n")
