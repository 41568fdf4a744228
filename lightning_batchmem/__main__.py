"""The command line: ``find``, ``simulate``, ``compare``, ``check`` and ``draw``.

jsonargparse makes the options of a command from the signature of its function, and their help from
its docstring.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from jsonargparse import ArgumentParser, auto_cli
from lightning.fabric.utilities.warnings import PossibleUserWarning

from lightning_batchmem import check as memory_test
from lightning_batchmem import comparison
from lightning_batchmem._lightning.errors import calls_after_ours, is_our_error
from lightning_batchmem._version import __version__
from lightning_batchmem.find import SearchOnly
from lightning_batchmem.plan.figures import plot_memory_over_steps
from lightning_batchmem.plan.json_fields import check_regular, read_small, to_json
from lightning_batchmem.plan.options import Objective, SearchOptions, advice_on, object_named
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.printing import printable, why_not_printed
from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.columns import read_rows
from lightning_batchmem.profile.run_folder import CSV_NAME, PLAN_NAME
from lightning_batchmem.script import Script, given_options, search_by
from lightning_batchmem.simulated_gpu import command
from lightning_batchmem.simulated_gpu.gpus import CONTEXT_BYTES, names_text
from lightning_batchmem.simulated_gpu.launch import AS_THE_PROGRAM, World

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DESCRIPTION = """Compute a batch size, also for a GPU that you lack, compare settings, test
memory, or draw figures.

Exit code: 0 for a result, 1 for none (check: a part has grown), 2 for an error."""

_CONTEXT = f"{CONTEXT_BYTES // MIB}MiB"

# The name of each file that has a figure, with that of the figure and a function that draws it.
_FIGURES: dict[str, tuple[str, Callable[[Path], Figure]]] = {
    CSV_NAME: ("memory_over_steps", lambda path: plot_memory_over_steps(read_rows(path))),
    PLAN_NAME: ("search", lambda path: Plan.from_json(read_small(path)).plot()),
}


def find(
    program: list[str],
    trainer: dict[str, Any] | None = None,
    out: Path | None = None,
    gpu: str | None = None,
    **options: Any,
) -> int:
    """Compute the batch size, without a training.

    A script runs as it is up to its first Trainer.fit, which searches instead of training. If it
    ends in the search, it is started again, at most four times. Put options before the script.

    Args:
        program: train.py and its arguments, or -m my_package.train and its arguments; or
            MODULE:MAKE, a function without arguments that returns a LightningModule, or (module,
            data); data is a datamodule or training loaders.
        trainer: for MODULE:MAKE, arguments of the Trainer, each as in --trainer.accelerator=gpu.
        out: a file to write the plan to, as JSON; for a script batch_plan.json by default.
        gpu: for MODULE:MAKE, search on a simulated GPU with this name; see simulate.
        **options: arguments of BatchFinder.
    """
    _check_file(out)
    # Both do nothing without a training. What is given here is not an option of the command.
    finder = SearchOnly(verbose=False, search_on_resume=False, **options)
    if not command.is_function(program):
        if trainer is not None or gpu is not None or options["plan"] is not None:
            raise ValueError(
                "a script has its own Trainer, and --out names its plan: leave out --trainer,"
                " --plan and --gpu (simulate searches on other GPUs)"
            )
        given = given_options(finder.options, SearchOptions())
        if options["later"] is not None:
            given["later"] = options["later"]
        search_by(Script.of_command(program), out or Path(PLAN_NAME), given)
        return 0
    (make,) = program
    if gpu is not None:
        if options["plan"] is not None:
            raise ValueError("plan must be null for a simulated GPU")
        script = Script("function", make, trainer=trainer or {})
        return _simulated(script, gpu, _CONTEXT, asdict(finder.options), [AS_THE_PROGRAM], out)
    made_trainer, module, data = comparison.make_trainer(
        comparison.function_named(make), trainer or {}
    )
    plan = finder.search(made_trainer, module, None, data, None)
    _write(str(plan), plan.to_json(), out)
    return 0


def simulate(
    gpus: str,
    program: list[str],
    out: Path | None = None,
    context: str = _CONTEXT,
    devices: str | None = None,
    nodes: int | None = None,
    nccl: str | None = None,
    objective: Objective = "memory",
    min_steps_per_epoch: int | None = None,
    **options: Any,
) -> int:
    """Compute the batch size of a training script on GPUs that you do not have.

    The script runs as it is up to its first Trainer.fit, which searches instead of training.
    Put options before the program. simulate --list prints the GPUs.

    Args:
        gpus: names of GPUs such as RTX-4090, or sizes such as 24GiB, with commas between them.
        program: train.py and its arguments, or -m my_package.train and its arguments.
        out: a file to write the plan to, as JSON; of several GPUs a list of plans.
        context: memory that the CUDA context takes on the GPU.
        devices: GPUs of a node, of which the first one is simulated, such as 8, or 1,2,4,8 for a
            row each; by default as the script has it. A number in the script stays.
        nodes: the number of nodes; likewise.
        nccl: memory that NCCL takes on each of several GPUs; by default a published number.
        objective: as in BatchFinder; by default the largest size that fits.
        min_steps_per_epoch: as in BatchFinder; by default the data set limits the size.
        **options: arguments of BatchFinder.
    """
    _check_file(out)
    worlds = command.worlds_of(devices, nodes, nccl)
    finder = SearchOnly(
        verbose=False,
        search_on_resume=False,
        plan=None,
        objective=objective,
        min_steps_per_epoch=min_steps_per_epoch,
        **options,
    )
    defaults = SearchOptions(objective="memory", min_steps_per_epoch=None)
    options_given = given_options(finder.options, defaults)
    script = Script.of_command(program)
    return _simulated(script, gpus, context, options_given, worlds, out)


def compare(
    make: str,
    variants: str | None = None,
    trainer: dict[str, Any] | None = None,
    out: Path | None = None,
    objective: Objective = "memory",
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
        objective: as in BatchFinder; by default the largest size that fits.
        **options: arguments of BatchFinder.
    """
    _check_file(out)
    function = comparison.function_named(make)
    chosen = None if variants is None else object_named(f"{make.partition(':')[0]}:{variants}")
    # As in find.
    compared = comparison.compare(
        function,
        chosen,
        base=trainer,
        verbose=False,
        search_on_resume=False,
        objective=objective,
        **options,
    )
    _write(str(compared), str(compared), out)
    return 0 if compared.fastest is not None else 1


def check(
    make: str,
    reference: Path = Path("memory.json"),
    tolerance: float = 0.01,
    update: bool = False,
    trainer: dict[str, Any] | None = None,
    gpu: str | None = None,
) -> int:
    """Compare the memory of a training step with a reference, on the CPU or a simulated GPU.

    Args:
        make: MODULE:MAKE, a function without arguments that returns a LightningModule, or (module,
            data); data is a datamodule or training loaders.
        reference: the file with the memory to compare with.
        tolerance: each part may grow by this share.
        update: write the file instead of comparing with it.
        trainer: arguments of the Trainer, each as in --trainer.precision=bf16-mixed.
        gpu: measure on a simulated GPU with this name; see simulate.
    """
    device = command.device_name(gpu)
    if update:
        _check_file(reference)
    else:
        before = memory_test.read_reference(reference, tolerance, device)
    if gpu is not None:
        now, remarks = command.memory_on(gpu, make, trainer or {})
    else:
        now = memory_test.measure(comparison.function_named(make), trainer or {})
        remarks = []
    grown: list[str] = []
    if update:
        _write_file(reference, to_json(now))
        lines = [f"Wrote the memory of this step to {reference}"]
    else:
        grown, smaller = memory_test.compared(before, now, tolerance)
        lines = grown or smaller or [f"equal to {reference} within {100 * tolerance:g} %"]
    _print("\n".join([*remarks, *lines]))
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
    targets = []
    for name, (figure_name, plot) in _FIGURES.items():
        for path in sorted(log_dir.rglob(name.replace(".", "*."))):
            folder = (out or log_dir) / path.parent.relative_to(log_dir)
            number = path.stem.removeprefix(Path(name).stem)
            target = folder / f"{figure_name}{number}.{format}"
            try:
                check_regular(path)
                figure = plot(path)
                folder.mkdir(parents=True, exist_ok=True)
                # A PNG has 1,280 x 960 pixels.
                figure.savefig(target, dpi=200)
                targets.append(printable(str(target)))
            except ImportError:
                # Without matplotlib no figure can be drawn.
                raise
            # A damaged file may raise any error, and the other files are drawn nevertheless.
            except Exception as error:  # noqa: BLE001
                _print_error(f"{path} could not be drawn: {type(error).__name__}: {error}")
    if targets:
        _print("\n".join(targets))
    else:
        _print_error(f"No figure was drawn from {log_dir}; it needs a {' or '.join(_FIGURES)}")
    return 0 if targets else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["check"]:
        # jsonargparse has no switches.
        words = ["--update=true" if word == "--update" else word for word in words]
    try:
        if words[:2] == ["simulate", "--list"]:
            _print(names_text())
            return 0
        exit_code: int = auto_cli(
            [find, simulate, compare, check, draw],
            args=command.with_program_as_list(words),
            parser_class=_Parser,
            prog="python -m lightning_batchmem",
            description=_DESCRIPTION,
            version=__version__,
        )
    except KeyboardInterrupt:
        _print_error("error: interrupted")
        return 130
    # The user's code may raise any error, which needs its traceback. One of this package is a line.
    except Exception as error:  # noqa: BLE001
        if is_our_error(error):
            _print_error(f"error: {error}")
        else:
            # The calls of this package before those of the user's code say nothing.
            traceback.print_exception(error, limit=-calls_after_ours(error) or None)
        return 2
    return exit_code


def run_installed() -> int:
    """Run the command line as a program, and return its exit code."""
    # The interpreter does this for ``python -m``, so that modules of a project are found.
    sys.path.insert(0, "")
    # Lightning's own notes are about a training, or about its code.
    for package in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(package).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    warnings.filterwarnings("ignore", module=r"(lightning|pytorch_lightning)\.")
    try:
        return main()
    finally:
        _flush_output()


def _simulated(
    program: Script,
    gpus: str,
    context: str,
    options: Mapping[str, Any],
    worlds: Sequence[World],
    out: Path | None,
) -> int:
    """Search on simulated GPUs, print what was found, and return the exit code."""
    findings = command.simulate(program, gpus, context, options, worlds, _print)
    for error in findings.errors:
        _print_error(f"error: {error}")
    if findings.text:
        _write(findings.text, findings.json, out if findings.json else None)
    return findings.exit_code


class _Parser(ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        advice = "--help describes the arguments."
        if message.startswith('Parser key "trainer"'):
            advice = "Write one argument at a time, as in --trainer.accelerator=gpu."
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            # argparse has no public list of the options.
            advice = advice_on(unknown.partition("=")[0], list(self._option_string_actions))
        _print_error(f"error: {message.rstrip('.')}. {advice}")
        sys.exit(2)


def _check_file(out: Path | None) -> None:
    """Raise a ValueError unless the file can be written: a search may take long."""
    if out is not None and (
        out.is_dir()
        or not out.parent.is_dir()
        or not os.access(out if out.exists() else out.parent, os.W_OK)
    ):
        raise ValueError(f"{out} must be a file in an existing directory that can be written")


def _write(text: str, content: str, out: Path | None) -> None:
    """Print the text, and write the content to a file."""
    if out is not None:
        _write_file(out, content)
    _print(text)


def _write_file(path: Path, content: str) -> None:
    try:
        path.write_text(f"{content}\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error


def _print(text: str) -> None:
    if reason := why_not_printed(text):
        raise ValueError(f"standard output cannot be written: {reason}")


def _print_error(text: str) -> None:
    """Print the text in one line, also where an error or a file name has several."""
    # Standard error may be closed, and the exit code says that there is an error.
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(printable(" ".join(text.split())) + "\n")


def _flush_output() -> None:
    """Write what the code of the project has printed, or drop it where nobody reads it."""
    try:
        sys.stdout.flush()
    # Without a console there is no stream.
    except AttributeError:
        return
    except OSError:
        # The interpreter would try again at its end, and return the exit code of an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(run_installed())
