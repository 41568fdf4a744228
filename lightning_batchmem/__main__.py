"""The command line: ``find``, ``compare`` and ``draw``.

``find`` and ``compare`` search without a training, ``draw`` draws the figures of a run.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from lightning_batchmem.batch_finder import BatchFinder
from lightning_batchmem.comparison import compare, make_and_find
from lightning_batchmem.factory import parse_options, parse_value
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.profile.figures import draw, save
from lightning_batchmem.profile.step_csv import NAME, PLAN_NAME, Row, read_rows
from lightning_batchmem.profile.summary import SUMMARY_NAME, Summary

_EXAMPLES = """\
examples:
  python -m lightning_batchmem find my_module:make --limit 20GiB
  python -m lightning_batchmem compare my_module:make --trainer accelerator=gpu
  python -m lightning_batchmem draw lightning_logs/version_0

make is a function without arguments that returns (model, data); data is a datamodule, training
loaders or None."""
_DRAW = f"""\
Draw the figures of a run, finished or not, from the files in LOG_DIR and below:

  {NAME}  of MemoryProfiler: memory over the steps
  {SUMMARY_NAME}   of MemoryProfiler, at its end: what fills the memory
  {PLAN_NAME}       of both callbacks: memory and throughput by batch size
                        (finder.plan.to_json() has the same content)

Files of several runs in one directory are numbered, and so are their figures:
memory_over_steps_1 belongs to memory_per_batch_1.csv."""

_READERS: dict[str, Callable[[Path], list[Row] | Plan | Summary]] = {
    NAME: read_rows,
    PLAN_NAME: lambda path: Plan.from_json(_finite_json(path)),
    SUMMARY_NAME: lambda path: Summary.from_json(_finite_json(path)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code.

    The code is 0 for a result, 1 for none, and 2 for wrong arguments.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lightning_batchmem",
        description="Compute a batch size, compare settings, or draw figures.",
        epilog=f"{_EXAMPLES}\n\nExit code: 0 for a result, 1 for none, 2 for wrong arguments.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    finding = commands.add_parser(
        "find",
        help="compute the batch size, without a training",
        description=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    comparing = commands.add_parser(
        "compare",
        help="compute the batch size under several settings",
        description=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    drawing = commands.add_parser(
        "draw",
        help="draw the figures of a run",
        description=_DRAW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for command in (finding, comparing):
        command.usage = "%(prog)s MODULE:MAKE [--limit VALUE] [...]"
        command.add_argument(
            "make", metavar="MODULE:MAKE", help="the function that returns (model, data)"
        )
        command.add_argument(
            "--trainer",
            metavar="NAME=VALUE",
            action="append",
            default=[],
            help="an argument of the Trainer; repeatable",
        )
        command.add_argument(
            "--out",
            metavar="FILE",
            type=Path,
            help="for the plan as JSON, or the table as Markdown",
        )
        group = command.add_argument_group("search")
        for name, text in _search_options().items():
            flags = [f"--{name.replace('_', '-')}"]
            if name == "memory_limit":
                flags.append("--limit")
            group.add_argument(
                *flags,
                dest=name,
                metavar="VALUE",
                type=parse_value,
                default=argparse.SUPPRESS,
                help=text.replace("%", "%%"),
            )
    finding.set_defaults(variants=None)
    comparing.add_argument(
        "--variants", metavar="NAME", help="a dictionary of variants in the module of make"
    )
    drawing.add_argument(
        "log_dir", metavar="LOG_DIR", type=Path, help="log directory of one or more runs"
    )
    drawing.add_argument(
        "--out", metavar="DIR", type=Path, help="where to write; default: next to each file"
    )
    drawing.add_argument(
        "--format",
        choices=("png", "svg"),
        default="png",
        help="of the figures; default: %(default)s",
    )
    given = list(sys.argv[1:] if arguments is None else arguments)
    # A log directory without a command is drawn, as in version 0.1.
    if given and Path(given[0]).is_dir():
        given = ["draw", *given]
    options = parser.parse_args(given)
    if options.command == "draw":
        if not options.log_dir.is_dir():
            drawing.error(f"LOG_DIR must be a directory, got {str(options.log_dir)!r}")
        return _draw(options.log_dir, options.out or options.log_dir, options.format)
    command = finding if options.command == "find" else comparing
    search = {name: getattr(options, name) for name in _search_options() if hasattr(options, name)}
    try:
        BatchFinder(**search)
    except ValueError as error:
        command.error(str(error))
    make = _named(command, options.make)
    base = parse_options(options.trainer)
    variants = None
    if options.variants:
        module_name = options.make.partition(":")[0]
        variants = _named(command, f"{module_name}:{options.variants}")
    result: Any
    try:
        if command is finding:
            result = make_and_find(make, {}, base, search)
        else:
            result = compare(make, variants, base=base, **search)
    except (ValueError, RuntimeError) as error:
        if not _is_own(error):
            raise
        _print(f"{options.command} failed: {error}", sys.stderr)
        return 1
    sys.stdout.write(f"{result}\n")
    if options.out is not None:
        text = result.to_json() if command is finding else result.to_markdown()
        options.out.write_text(f"{text}\n", encoding="utf-8")
    return 0 if command is finding or result.fastest is not None else 1


def _search_options() -> dict[str, str]:
    """The arguments of BatchFinder that make sense without a training, with their texts.

    The texts come from the docstring of BatchFinder.
    """
    parameters = inspect.signature(BatchFinder).parameters
    names = [name for name in parameters if name not in ("search_on_resume", "verbose")]
    pattern = r"^ {8}(\w+): (.*?)(?=^ {0,8}\S|^$)"
    entries = re.findall(pattern, BatchFinder.__doc__ or "", re.MULTILINE | re.DOTALL)
    # The name ``plan`` is an argument and an attribute. Reversed, the text of the argument counts.
    texts = dict(reversed(entries))
    return {
        name: " ".join(re.sub(r":\w+:`~?|`", "", texts.get(name, "")).split()) for name in names
    }


def _named(command: argparse.ArgumentParser, target: str) -> Any:
    """The object with the name ``module:name``; a wrong name ends with a list of right ones."""
    module_name, _, name = target.partition(":")
    try:
        module = import_module(module_name)
    except (ModuleNotFoundError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and not module_name.startswith(str(error.name)):
            # The module exists, but another one that it imports does not.
            raise
        found = ", ".join(sorted(path.stem for path in Path.cwd().glob("*.py"))) or "none"
        command.error(
            f"MODULE:MAKE must name a module, got {module_name!r}; modules in {Path.cwd()}: {found}"
        )
    if not name or not hasattr(module, name):
        own = [
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__
        ]
        found = ", ".join(own) or "none"
        command.error(
            f"MODULE:MAKE must name a function of {module_name}, got {name!r}; it has: {found}"
        )
    return getattr(module, name)


def _is_own(error: BaseException) -> bool:
    """Whether this package has raised an error, so that its message is enough.

    An error in the user's code needs its traceback.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("lightning_batchmem")


def _draw(log_dir: Path, out: Path, extension: str) -> int:
    drawn = 0
    found = [
        (path, name) for name in _READERS for path in sorted(log_dir.rglob(name.replace(".", "*.")))
    ]
    for path, name in filter(lambda one: one[0].is_file(), found):
        directory = out / path.parent.relative_to(log_dir)
        number = path.stem.removeprefix(Path(name).stem)
        try:
            figures = draw(_READERS[name](path))
            if not figures:
                _print(f"{path} has nothing to draw", sys.stderr)
            for figure_name, figure in figures.items():
                target = directory / f"{figure_name}{number}.{extension}"
                save(figure, target)
                drawn += 1
                _print(f"{target}", sys.stdout)
        except ImportError as error:
            # Without matplotlib no figure can be drawn.
            _print(f"{error}", sys.stderr)
            return 1
        # A damaged file may raise any error, and the other files are drawn nevertheless.
        except Exception as error:  # noqa: BLE001
            _print(f"{path} could not be drawn: {type(error).__name__}: {error}", sys.stderr)
    if not drawn:
        _print(
            f"No figure was drawn from {log_dir}; it needs a {' or '.join(_READERS)}", sys.stderr
        )
    return 0 if drawn else 1


def _finite_json(path: Path) -> str:
    """The JSON in a file, whose numbers must be finite.

    NaN and numbers such as ``1e999``, which Python reads as infinite, are a ``ValueError``.
    """
    return json.dumps(json.loads(path.read_text(encoding="utf-8")), allow_nan=False)


def _print(text: str, stream: TextIO) -> None:
    """Print a line; a name that the terminal cannot show is escaped."""
    encoding = stream.encoding or "utf-8"
    line = " ".join(text.splitlines())
    stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")


if __name__ == "__main__":
    sys.exit(main())
