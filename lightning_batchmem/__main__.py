"""The command line: ``find``, ``compare``, ``check`` and ``draw``.

``find`` and ``compare`` search without a training, ``check`` compares memory with a reference, and
``draw`` draws the figures of a run.
"""

from __future__ import annotations

import inspect
import io
import sys
import textwrap
import traceback
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import Trainer

from lightning_batchmem.batch_finder import BatchFinder
from lightning_batchmem.check.command import (
    DESCRIPTION,
    add_options,
    check_reference,
    run_check,
)
from lightning_batchmem.comparison import check_variants, compare, make_trainer
from lightning_batchmem.factory import parse_options, parse_value
from lightning_batchmem.find import find_batch_size
from lightning_batchmem.plan.json_fields import finite_json
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.profile.figures import draw, save
from lightning_batchmem.profile.step_csv import NAME, PLAN_NAME, Row, read_rows

_COMMANDS = ("find", "compare", "check", "draw")
_EXAMPLES = """\
examples:
  python -m lightning_batchmem find my_module:make --limit 20GiB
  python -m lightning_batchmem compare my_module:make --trainer accelerator=gpu
  python -m lightning_batchmem check my_module:make --reference memory.json --tolerance 1%
  python -m lightning_batchmem draw lightning_logs/version_0

make is a function without arguments that returns (model, data); data is a datamodule, training
loaders or None."""
_DRAW = f"""\
Draw the figures of a run, finished or not, from the files in LOG_DIR and below:

  {NAME}  of MemoryProfiler: memory over the steps
  {PLAN_NAME}       of both callbacks: memory and throughput by batch size
                        (finder.plan.to_json() has the same content)

Files of several runs in one directory are numbered, and so are their figures:
memory_over_steps_1 belongs to memory_per_batch_1.csv."""

_READERS: dict[str, Callable[[Path], list[Row] | Plan]] = {
    NAME: read_rows,
    PLAN_NAME: lambda path: Plan.from_json(finite_json(path)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code.

    The code is 0 for a result, 1 for none, and 2 for wrong arguments. For ``check`` it is 0 where
    nothing grew, 1 where something did, and 2 where that is unknown.
    """
    # A name that the terminal cannot show is escaped, as it is in standard error.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    # A log directory without a command is drawn, as in version 0.1.
    if words and words[0] not in ("", *_COMMANDS) and Path(words[0]).is_dir():
        words.insert(0, "draw")
    options = _parser().parse_args(words)
    try:
        exit_code: int = options.run(options.parser, options)
    # The user's code may raise any error.
    except Exception as error:
        # An error in the user's code needs its traceback, one of this package only its message.
        origin = traceback.extract_tb(error.__traceback__)[-1].filename
        is_own = Path(origin).is_relative_to(Path(__file__).parent)
        if is_own and isinstance(error, ValueError | RuntimeError):
            _print_error(f"{options.command} failed: {error}")
        elif options.command == "check":
            # Python would exit with 1, which means that memory has grown.
            traceback.print_exc()
        else:
            raise
        return 2 if options.command == "check" else 1
    except SystemExit as error:
        if options.command == "check" and error.code != 2:
            # The user's code ends the program, and its code could mean that memory has grown.
            raise SystemExit(2) from error
        raise
    return exit_code


def run_installed() -> int:
    """Run the command line as the program ``lightning-batchmem``, and return its exit code."""
    # The interpreter does this for ``python -m``, so that modules of a project are found.
    sys.path.insert(0, "")
    return main()


class _Parser(ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.splitlines())}\n")


def _parser() -> ArgumentParser:
    parser = _Parser(
        prog="python -m lightning_batchmem",
        description="Compute a batch size, compare settings, test memory, or draw figures.",
        epilog=f"{_EXAMPLES}\n\nExit code: 0 for a result, 1 for none, 2 for wrong arguments.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    search: dict[str, Any] = {
        "parents": [_search_parser()],
        "usage": "%(prog)s MODULE:MAKE [--limit VALUE] [...]",
        "description": _EXAMPLES,
        "formatter_class": RawDescriptionHelpFormatter,
    }
    finding = commands.add_parser(
        "find", help="compute the batch size, without a training", **search
    )
    finding.set_defaults(run=_find, parser=finding)
    comparing = commands.add_parser(
        "compare", help="compute the batch size under several settings", **search
    )
    comparing.add_argument(
        "--variants", metavar="NAME", help="a dictionary of variants in the module of make"
    )
    comparing.set_defaults(run=_compare, parser=comparing)
    checking = commands.add_parser(
        "check",
        help="compare the memory of a training step with a reference",
        parents=[_make_parser()],
        description=DESCRIPTION,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add_options(checking)
    checking.set_defaults(run=_check, parser=checking)
    drawing = commands.add_parser(
        "draw",
        help="draw the figures of a run",
        description=_DRAW,
        formatter_class=RawDescriptionHelpFormatter,
    )
    drawing.add_argument(
        "log_dir", metavar="LOG_DIR", type=Path, help="log directory of one or more runs"
    )
    drawing.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="where to write; default: next to each file",
    )
    drawing.add_argument(
        "--format",
        choices=("png", "svg"),
        default="png",
        help="of the figures; default: %(default)s",
    )
    drawing.set_defaults(run=_draw, parser=drawing)
    return parser


def _make_parser() -> _Parser:
    """The arguments of every command that makes a model."""
    parser = _Parser(add_help=False)
    parser.add_argument(
        "make", metavar="MODULE:MAKE", help="the function that returns (model, data)"
    )
    parser.add_argument(
        "--trainer",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an argument of the Trainer; repeatable",
    )
    return parser


def _search_parser() -> ArgumentParser:
    """The arguments that ``find`` and ``compare`` have in common."""
    parser = ArgumentParser(add_help=False, parents=[_make_parser()])
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="for the plan as JSON, or the table as Markdown",
    )
    group = parser.add_argument_group("search")
    texts = _argument_texts(BatchFinder)
    for name in inspect.signature(BatchFinder).parameters:
        # These arguments change nothing without a training.
        if name in ("search_on_resume", "verbose"):
            continue
        flags = [f"--{name.replace('_', '-')}"]
        if name == "memory_limit":
            flags.append("--limit")
        group.add_argument(
            *flags,
            dest=name,
            metavar="VALUE",
            type=parse_value,
            default=SUPPRESS,
            help=texts.get(name, "").replace("%", "%%"),
        )
    return parser


def _argument_texts(documented: type) -> dict[str, str]:
    """The text of each argument, from the section ``Args`` of a docstring."""
    section = (inspect.getdoc(documented) or "").partition("Args:\n")[2].partition("\n\n")[0]
    # The lines of a text after its first one are indented further.
    entries = textwrap.dedent(section).replace("\n    ", " ").replace("`", "").splitlines()
    return dict(entry.split(": ", 1) for entry in entries)


def _find(parser: ArgumentParser, options: Namespace) -> int:
    base, search = _checked_arguments(parser, options)
    trainer, model, data = make_trainer(_make(parser, options.make), base)
    plan = find_batch_size(trainer, model, train_dataloaders=data, **search)
    sys.stdout.write(f"{plan}\n")
    if options.out is not None:
        options.out.write_text(f"{plan.to_json()}\n", encoding="utf-8")
    return 0


def _compare(parser: ArgumentParser, options: Namespace) -> int:
    base, search = _checked_arguments(parser, options)
    make = _make(parser, options.make)
    variants = None
    if options.variants is not None:
        module_name = options.make.partition(":")[0]
        variants = _named(parser, f"{module_name}:{options.variants}")
        try:
            check_variants(variants)
        except ValueError as error:
            parser.error(str(error))
    comparison = compare(make, variants, base=base, **search)
    sys.stdout.write(f"{comparison}\n")
    if options.out is not None:
        options.out.write_text(f"{comparison.to_markdown()}\n", encoding="utf-8")
    return 0 if comparison.fastest is not None else 1


def _check(parser: ArgumentParser, options: Namespace) -> int:
    try:
        check_reference(options.reference, is_written=options.update)
    except ValueError as error:
        parser.error(f"--reference {error}")
    base = _trainer_arguments(parser, options)
    return run_check(_make(parser, options.make), base, options)


def _checked_arguments(
    parser: ArgumentParser, options: Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the Trainer, and those of BatchFinder."""
    names = inspect.signature(BatchFinder).parameters
    search = {name: value for name, value in vars(options).items() if name in names}
    out = options.out
    # The search may take long, so its result must not be lost.
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        parser.error(f"--out must be a file in an existing directory, got {str(out)!r}")
    try:
        BatchFinder(**search)
    except ValueError as error:
        parser.error(str(error))
    return _trainer_arguments(parser, options), search


def _trainer_arguments(parser: ArgumentParser, options: Namespace) -> dict[str, Any]:
    """The arguments of the Trainer."""
    try:
        base = parse_options(options.trainer)
    except ValueError as error:
        parser.error(str(error))
    known_names = [*inspect.signature(Trainer).parameters, "compile"]
    for name in base:
        if name not in known_names:
            parser.error(f"--trainer must be an argument of the Trainer, got {name!r}")
    return base


def _make(parser: ArgumentParser, target: str) -> Any:
    """The function with the name ``module:name`` that makes model and data."""
    make = _named(parser, target)
    if not callable(make):
        parser.error(f"MODULE:MAKE must name a function, got {type(make).__name__} {target!r}")
    return make


def _named(parser: ArgumentParser, target: str) -> Any:
    """The object with the name ``module:name``; a wrong name ends with a list of right ones."""
    module_name, _, name = target.partition(":")
    is_absolute = bool(module_name) and not module_name.startswith(".")
    try:
        # The name of a relative module is no module's name, and neither is an empty one.
        module = import_module(module_name if is_absolute else "")
    except (ModuleNotFoundError, ValueError) as error:
        # The module exists, but its code has the error, or a module that it imports is missing.
        if is_absolute and not module_name.startswith(str(getattr(error, "name", None))):
            raise
        modules = ", ".join(sorted(path.stem for path in Path.cwd().glob("*.py"))) or "none"
        parser.error(
            f"MODULE:MAKE must name a module, got {module_name!r}; modules in {Path.cwd()}:"
            f" {modules}"
        )
    if not hasattr(module, name):
        names = [
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__
        ]
        parser.error(
            f"MODULE:MAKE must name a function of {module_name}, got {name!r}; it has:"
            f" {', '.join(names) or 'none'}"
        )
    return getattr(module, name)


def _draw(parser: ArgumentParser, options: Namespace) -> int:
    log_dir = options.log_dir
    if not log_dir.is_dir():
        parser.error(f"LOG_DIR must be a directory, got {str(log_dir)!r}")
    files = [
        (path, name)
        for name in _READERS
        for path in sorted(log_dir.rglob(name.replace(".", "*.")))
        if path.is_file()
    ]
    number_of_figures = 0
    for path, name in files:
        folder = (options.out or log_dir) / path.parent.relative_to(log_dir)
        file_number = path.stem.removeprefix(Path(name).stem)
        try:
            figures = draw(_READERS[name](path))
            if not figures:
                _print_error(f"{path} has nothing to draw")
            for figure_name, figure in figures.items():
                target = folder / f"{figure_name}{file_number}.{options.format}"
                save(figure, target)
                sys.stdout.write(f"{target}\n")
                number_of_figures += 1
        except ImportError as error:
            # Without matplotlib no figure can be drawn.
            _print_error(str(error))
            return 1
        # A damaged file may raise any error, and the other files are drawn nevertheless.
        except Exception as error:  # noqa: BLE001
            _print_error(f"{path} could not be drawn: {type(error).__name__}: {error}")
    if number_of_figures == 0:
        _print_error(f"No figure was drawn from {log_dir}; it needs a {' or '.join(_READERS)}")
        return 1
    return 0


def _print_error(text: str) -> None:
    """Print the text in one line, also where an error or a file name has several."""
    sys.stderr.write(" ".join(text.splitlines()) + "\n")


if __name__ == "__main__":
    sys.exit(main())
