"""The command line: ``find``, ``compare``, ``check`` and ``draw``.

jsonargparse makes the options of a command from the signature of its function, and their help from
its docstring.
"""

from __future__ import annotations

import inspect
import io
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from jsonargparse import ArgumentParser, auto_cli
from lightning.fabric.utilities.warnings import PossibleUserWarning

from lightning_batchmem import check as memory_test
from lightning_batchmem import comparison
from lightning_batchmem._lightning.packages import is_own_error
from lightning_batchmem.figures import plot_memory_over_steps, plot_search
from lightning_batchmem.find import SearchOnly
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.profile.step_csv import NAME, PLAN_NAME, read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DESCRIPTION = """Compute a batch size, compare settings, test memory, or draw figures.

Exit code: 0 for a result, 1 for none (check: a part has grown), 2 for an error."""

# The name of each file that has a figure, with that of the figure and a function that draws it.
_FIGURES: dict[str, tuple[str, Callable[[Path], Figure | None]]] = {
    NAME: ("memory_over_steps", lambda path: plot_memory_over_steps(read_rows(path))),
    PLAN_NAME: (
        "search",
        lambda path: plot_search(Plan.from_json(path.read_text(encoding="utf-8"))),
    ),
}


def find(
    make: str, trainer: dict[str, Any] | None = None, out: Path | None = None, **options: Any
) -> int:
    """Compute the batch size, without a training.

    Args:
        make: MODULE:MAKE, a function without arguments that returns a LightningModule, or (module,
            data); data is a datamodule or training loaders.
        trainer: arguments of the Trainer, each as in --trainer.accelerator=gpu.
        out: a file to write the plan to, as JSON.
        **options: arguments of BatchFinder.
    """
    _check_file(out)
    # Both do nothing without a training. What is given here is no option of the command.
    finder = SearchOnly(verbose=False, search_on_resume=False, **options)
    made_trainer, module, data = comparison.make_trainer(_function(make), trainer or {})
    plan = finder.search(made_trainer, module, None, data, None)
    _write(str(plan), plan.to_json(), out)
    return 0


def compare(
    make: str,
    variants: str | None = None,
    trainer: dict[str, Any] | None = None,
    out: Path | None = None,
    **options: Any,
) -> int:
    """Compute the batch size under several settings.

    Args:
        make: MODULE:MAKE, a function without arguments that returns a LightningModule, or (module,
            data); data is a datamodule or training loaders.
        variants: the name of a dictionary in the module of make: name -> arguments of the Trainer.
            By default plain and bf16-mixed.
        trainer: arguments of the Trainer for all variants, each as in --trainer.accelerator=gpu.
        out: a file to write the table to, in Markdown.
        **options: arguments of BatchFinder.
    """
    _check_file(out)
    function = _function(make)
    chosen = None if variants is None else _named(f"{make.partition(':')[0]}:{variants}")
    # As in find.
    compared = comparison.compare(
        function, chosen, base=trainer, verbose=False, search_on_resume=False, **options
    )
    _write(str(compared), str(compared), out)
    return 0 if compared.fastest is not None else 1


def check(
    make: str,
    reference: Path = Path("memory.json"),
    tolerance: float = 0.01,
    update: bool = False,
    trainer: dict[str, Any] | None = None,
) -> int:
    """Compare the memory of a training step on the host with a reference.

    Args:
        make: MODULE:MAKE, a function without arguments that returns a LightningModule, or (module,
            data); data is a datamodule or training loaders.
        reference: the file with the memory to compare with.
        tolerance: each part may grow by this share.
        update: write the file instead of comparing with it.
        trainer: arguments of the Trainer, each as in --trainer.precision=bf16-mixed.
    """
    if update:
        _check_file(reference)
        text = memory_test.reference_text(_function(make), trainer or {})
        _write_file(reference, text)
        sys.stdout.write(f"{reference}\n")
        return 0
    grown, smaller = memory_test.differences(_function(make), reference, tolerance, trainer or {})
    lines = grown or smaller or [f"equal to {reference} within {100 * tolerance:g} %"]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if grown else 0


def draw(
    log_dir: Path,
    out: Path | None = None,
    format: Literal["png", "svg"] = "png",  # noqa: A002
) -> int:
    """Draw the figures of a run, finished or not, from the files in a log directory and below.

    Figures of a file with a number get this number too.

    Args:
        log_dir: the log directory of one or more runs.
        out: where to write. By default next to each file.
        format: the format of the figures.
    """
    if not log_dir.is_dir():
        raise ValueError(f"log_dir must be a directory, got {str(log_dir)!r}")
    num_figures = 0
    for name, (figure_name, plot) in _FIGURES.items():
        for path in sorted(log_dir.rglob(name.replace(".", "*."))):
            folder = (out or log_dir) / path.parent.relative_to(log_dir)
            number = path.stem.removeprefix(Path(name).stem)
            target = folder / f"{figure_name}{number}.{format}"
            try:
                figure = plot(path)
                if figure is None:
                    _print_error(f"{path} has nothing to draw")
                    continue
                folder.mkdir(parents=True, exist_ok=True)
                # A PNG has 1,280 x 960 pixels.
                figure.savefig(target, dpi=200)
                sys.stdout.write(f"{target}\n")
                num_figures += 1
            except ImportError:
                # Without matplotlib no figure can be drawn.
                raise
            # A damaged file may raise any error, and the other files are drawn nevertheless.
            except Exception as error:  # noqa: BLE001
                _print_error(f"{path} could not be drawn: {type(error).__name__}: {error}")
    if num_figures == 0:
        _print_error(f"No figure was drawn from {log_dir}; it needs a {' or '.join(_FIGURES)}")
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code."""
    try:
        exit_code: int = auto_cli(
            [find, compare, check, draw],
            args=None if arguments is None else list(arguments),
            parser_class=_Parser,
            prog="python -m lightning_batchmem",
            description=_DESCRIPTION,
        )
    # The user's code may raise any error, which needs its traceback. One of this package is a line.
    except Exception as error:  # noqa: BLE001
        if is_own_error(error):
            _print_error(f"error: {error}")
        else:
            traceback.print_exc()
        return 2
    return exit_code


def run_installed() -> int:
    """Run the command line as a program, and return its exit code."""
    # The interpreter does this for ``python -m``, so that modules of a project are found.
    sys.path.insert(0, "")
    # A name that the terminal cannot show is escaped, as it is in standard error.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    # Lightning's own notes are about a training, or about its code.
    for package in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(package).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    warnings.filterwarnings("ignore", module=r"(lightning|pytorch_lightning)\.")
    return main()


class _Parser(ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        _print_error(f"error: {message}")
        sys.exit(2)


def _function(target: str) -> Callable[[], Any]:
    """The function ``make`` with the name ``module:name``."""
    make = _named(target)
    if not callable(make):
        raise ValueError(f"make must be a function, got {type(make).__name__} {target}")
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ValueError(f"make must be a function without arguments: {error}") from error
    function: Callable[[], Any] = make
    return function


def _named(target: str) -> Any:
    """The object with the name ``module:name``; a wrong name ends with a list of right ones."""
    module_name, _, name = target.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise ValueError(f"a name must be MODULE:NAME, got {target!r}")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that it imports may be missing.
        if not module_name.startswith(str(error.name)):
            raise
        modules = ", ".join(sorted(path.stem for path in Path.cwd().glob("*.py"))) or "none"
        raise ValueError(
            f"{target} must name a module, got {module_name!r}; modules in {Path.cwd()}: {modules}"
        ) from error
    if not hasattr(module, name):
        names = [key for key, value in vars(module).items() if not key.startswith("_")]
        raise ValueError(
            f"{target} must name an object of {module_name}, got {name!r}; it has:"
            f" {', '.join(names)}"
        )
    return getattr(module, name)


def _check_file(out: Path | None) -> None:
    """Raise a ValueError unless the file can be written: a search may take long."""
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ValueError(f"{out} must be a file in an existing directory")


def _write(text: str, content: str, out: Path | None) -> None:
    """Print the text, and write the content to a file."""
    sys.stdout.write(f"{text}\n")
    if out is not None:
        _write_file(out, content)


def _write_file(path: Path, content: str) -> None:
    try:
        path.write_text(f"{content}\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error


def _print_error(text: str) -> None:
    """Print the text in one line, also where an error or a file name has several."""
    sys.stderr.write(" ".join(text.split()) + "\n")


if __name__ == "__main__":
    sys.exit(run_installed())
