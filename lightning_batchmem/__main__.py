"""``python -m lightning_batchmem LOG_DIR``: the figures of a finished run, and what it used."""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.table import Table

from lightning_batchmem._lightning.checkpoint import callback_states
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import mib
from lightning_batchmem.report.figure import NothingToDrawError
from lightning_batchmem.report.figures import save
from lightning_batchmem.report.images import drawings
from lightning_batchmem.report.step_csv import NAME, PLAN_NAME, Row, read_rows
from lightning_batchmem.report.summary import SUMMARY_NAME, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")

_DESCRIPTION = f"""\
Draw the figures of a finished run, or of one that broke off, and print what it
used. In LOG_DIR and in everything below it are looked for:

  {NAME}  of MemoryProfiler: memory over the steps
  {SUMMARY_NAME}   of MemoryProfiler, at its end: what memory is made of
  {PLAN_NAME}       of both callbacks: memory and speed by batch size
                        (finder.plan.to_json() is the same)
  *.ckpt                without a {PLAN_NAME}: BatchFinder's plan in the
                        newest that has one"""

_EPILOG = """\
Where several runs wrote into one directory their files are numbered, and the
figures are alike: memory_over_steps_1 is that of memory_per_batch_1.csv.

The exit code is 0 when a figure was drawn, 1 when none was, and 2 when the
arguments are wrong."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: of the command line; ``None``: those of the process.

    Returns:
        The exit code: 0 when at least one figure was drawn, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lightning_batchmem",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log_dir", metavar="LOG_DIR", type=Path, help="the log directory of a run, or of several")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to write; default: beside what was read")
    parser.add_argument("--format", choices=("png", "svg"), default="png", help="of the figures; default: %(default)s")
    options = parser.parse_args(arguments)
    if not options.log_dir.is_dir():
        parser.error(f"LOG_DIR must be a directory, got {str(options.log_dir)!r}")
    return _report(options.log_dir, options.out or options.log_dir, options.format)


def _report(log_dir: Path, out: Path, ending: str) -> int:
    console = Console()
    problems: list[str] = []
    runs, plans = _runs(log_dir, problems), _plans(log_dir, problems)
    summaries = _read(log_dir, SUMMARY_NAME, Summary.from_json, problems)
    if runs and not summaries:
        problems.append(f"No summary was found in {log_dir}; MemoryProfiler writes {SUMMARY_NAME} at the end of a run.")
    if runs:
        console.print(_table(log_dir, runs))
    drawn = 0
    try:
        for source, name, draw in _figures(runs, plans, summaries):
            try:
                figure = draw()
            except NothingToDrawError as error:
                problems.append(f"No {name} from {source}: {error}.")
                continue
            path = out / source.parent.relative_to(log_dir) / f"{name}.{ending}"
            save(figure, path)
            console.print(str(path), soft_wrap=True, highlight=False, markup=False, emoji=False)
            drawn += 1
    except (ImportError, OSError) as error:  # no matplotlib, or no place to write: the next figure would fail alike
        problems.append(f"{error}.")
    if not drawn:
        problems.append(f"No figure was drawn from {log_dir}.")
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return 0 if drawn else 1


def _figures(
    runs: Mapping[Path, list[Row]], plans: Mapping[Path, Plan], summaries: Mapping[Path, Summary]
) -> Iterator[tuple[Path, str, Callable[[], Figure]]]:
    """What each figure is drawn from, its name with the number of that file, and what draws it."""
    found = [(path, NAME, drawings(rows)) for path, rows in runs.items()]
    found += [(path, PLAN_NAME, drawings(plan=plan)) for path, plan in plans.items()]
    found += [(path, SUMMARY_NAME, drawings(summary=summary)) for path, summary in summaries.items()]
    for path, file_name, drawn in found:
        number = "" if path.suffix == ".ckpt" else path.stem.removeprefix(Path(file_name).stem)
        for name, draw in drawn.items():
            yield path, f"{name}{number}", draw


def _runs(log_dir: Path, problems: list[str]) -> dict[Path, list[Row]]:
    """The rows of each CSV that has some."""
    runs: dict[Path, list[Row]] = {}
    paths = sorted(log_dir.rglob(f"{Path(NAME).stem}*.csv"))
    if not paths:
        problems.append(f"No {NAME} was found in {log_dir}; MemoryProfiler writes it.")
    for path in paths:
        try:
            rows = read_rows(path)
        except (ValueError, OSError) as error:
            problems.append(f"{path} was not read: {error}.")
            continue
        if rows:
            runs[path] = rows
        else:
            problems.append(f"{path} has no complete row yet.")
    return runs


def _plans(log_dir: Path, problems: list[str]) -> dict[Path, Plan]:
    """Every plan that was written to a file of its own, else that of the newest checkpoint that has one."""
    if plans := _read(log_dir, PLAN_NAME, Plan.from_json, problems):
        return plans
    files = [path for path in log_dir.rglob("*.ckpt") if path.is_file()]  # a sharded checkpoint is a directory
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            plan = _plan_in(path)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
            problems.append(f"{path} was not read: {str(error).strip().splitlines()[0]}")
            continue
        if plan is not None:
            return {path: plan}
    problems.append(f"No plan of BatchFinder was found in {log_dir}, neither in a {PLAN_NAME} nor in a checkpoint.")
    return {}


def _read(log_dir: Path, name: str, parse: Callable[[str], T], problems: list[str]) -> dict[Path, T]:
    """What is in each JSON of this name, with and without a number."""
    found: dict[Path, T] = {}
    for path in sorted(log_dir.rglob(f"{Path(name).stem}*.json")):
        try:
            found[path] = parse(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            problems.append(f"{path} was not read: {error}.")
    return found


def _plan_in(path: Path) -> Plan | None:
    """The plan in a checkpoint, of which nothing but plain types is loaded; ``None`` when there is none."""
    plan = callback_states(path).get("BatchFinder", {}).get("plan")
    return None if plan is None else Plan.from_json(json.dumps(plan))


def _table(log_dir: Path, runs: Mapping[Path, list[Row]]) -> Table:
    table = Table(title="What the runs used", title_justify="left")
    table.add_column("file", overflow="fold")
    for heading in ("steps", "highest peak", "at step", "samples/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for path, rows in runs.items():
        highest = max((row for row in rows if row.peak_bytes is not None), key=_peak_bytes, default=None)
        peak, step = ("", "") if highest is None else (mib(_peak_bytes(highest)), f"{highest.step:,}")
        if highest is not None and highest.stage != "train":
            step += f" ({highest.stage})"
        steps = sum(row.stage == "train" for row in rows)
        table.add_row(str(path.relative_to(log_dir)), f"{steps:,}", peak, step, _speed(rows))
    return table


def _peak_bytes(row: Row) -> int:
    return row.peak_bytes or 0


def _speed(rows: Sequence[Row]) -> str:
    """Samples of all training steps over their time: a mean of the steps' speeds, weighted with the time of each."""
    timed = [
        (row.samples_per_second, row.step_seconds)
        for row in rows
        if row.stage == "train" and row.samples_per_second is not None and row.step_seconds
    ]
    total_seconds = sum(seconds for _, seconds in timed)
    return f"{sum(speed * seconds for speed, seconds in timed) / total_seconds:,.1f}" if timed else ""


if __name__ == "__main__":
    sys.exit(main())
