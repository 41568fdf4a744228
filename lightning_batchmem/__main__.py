"""``python -m lightning_batchmem LOG_DIR``: draw the figures of a finished run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.report.figures import draw, save
from lightning_batchmem.report.step_csv import NAME, PLAN_NAME, Row, read_rows
from lightning_batchmem.report.tables import SUMMARY_NAME, Summary

_DESCRIPTION = f"""\
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
    """Run the command line, and return its exit code: 0 when a figure was drawn, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_batchmem",
        description=_DESCRIPTION,
        epilog="Exit code: 0 when a figure was drawn, 1 when none was, 2 for wrong arguments.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log_dir", metavar="LOG_DIR", type=Path, help="log directory of one or more runs")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to write; default: next to each file")
    parser.add_argument("--format", choices=("png", "svg"), default="png", help="of the figures; default: %(default)s")
    options = parser.parse_args(arguments)
    log_dir: Path = options.log_dir
    if not log_dir.is_dir():
        parser.error(f"LOG_DIR must be a directory, got {str(log_dir)!r}")
    drawn = 0
    for path, name in _files(log_dir):
        directory = (options.out or log_dir) / path.parent.relative_to(log_dir)
        number = path.stem.removeprefix(Path(name).stem)
        try:
            figures = draw(_READERS[name](path))
            if not figures:
                _print(f"{path} has nothing to draw", sys.stderr)
            for figure_name, figure in figures.items():
                target = directory / f"{figure_name}{number}.{options.format}"
                save(figure, target)
                drawn += 1
                _print(f"{target}", sys.stdout)
        except ImportError as error:  # no matplotlib: no figure can be drawn
            _print(f"{error}", sys.stderr)
            return 1
        except Exception as error:  # noqa: BLE001 - a damaged file may fail anywhere; the other files are drawn
            _print(f"{path} could not be drawn: {type(error).__name__}: {error}", sys.stderr)
    if not drawn:
        _print(f"No figure was drawn from {log_dir}; it needs a {' or '.join(_READERS)}", sys.stderr)
    return 0 if drawn else 1


def _files(log_dir: Path) -> Iterator[tuple[Path, str]]:
    """Paths of the files to read, and their names without a number."""
    for name in _READERS:
        stem, suffix = Path(name).stem, Path(name).suffix
        yield from ((path, name) for path in sorted(log_dir.rglob(f"{stem}*{suffix}")) if path.is_file())


def _finite_json(path: Path) -> str:
    """The JSON in a file; NaN and numbers such as ``1e999``, which Python reads as infinite, are a ``ValueError``."""
    return json.dumps(json.loads(path.read_text(encoding="utf-8")), allow_nan=False)


def _print(text: str, stream: TextIO) -> None:
    """Print a line; a name that the terminal cannot show is escaped."""
    encoding = stream.encoding or "utf-8"
    line = " ".join(text.splitlines())
    stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")


if __name__ == "__main__":
    sys.exit(main())
