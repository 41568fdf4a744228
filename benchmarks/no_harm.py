"""Does BatchFinder harm a project? Its trainings beside those with the project's own batch size.

    # five projects, twenty trainings each; about fifteen minutes on one core
    python -m benchmarks.no_harm
    # one project, two seeds
    python -m benchmarks.no_harm --only LightningCLI --seeds 2
    # trainings also to a file, from which the same command continues
    python -m benchmarks.no_harm --file /tmp/trainings.json
    # the table also to benchmarks/results/no_harm.md
    python -m benchmarks.no_harm --write

Each project (:mod:`benchmarks.no_harm_projects`) is trained by a real Trainer, on one thread and
each time in a fresh process, without a finder (``own``), and with ``BatchFinder()`` (``auto``),
``BatchFinder(objective="recipe")`` and ``BatchFinder(objective="memory")``.

- The metric is that of the last evaluation on held-out data. The *spread* is the largest less the
  smallest one of the own size. A way is *worse* if its mean metric is worse than that of the same
  seeds at the own size by more than the spread. It is *announced* if the plan of each such
  training begins with what the training becomes, and a warning.
- *Worse on seeds* compares the trainings of each seed. This shows a small harm, which the spread
  hides.
- Seconds are CPU seconds of the process and of those that it started, without the imports. Those of
  the whole have the search in them.
- Samples per second are those of the training loop: neither the search nor the evaluations nor the
  first batch count. Other work on the machine only adds time, so the fastest trainings of the same
  seeds are compared. In parentheses are the ratios of the seeds, each of two trainings that ran
  after each other. A way is *slower* below 85 % of the own size.
"""

from __future__ import annotations

import multiprocessing
import re
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import wraps
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.data import extract_batch_size

from benchmarks.common import (
    ROOT,
    command_line,
    machine,
    markdown,
    one_line,
    read_rows,
    silence,
    write_page,
    write_rows,
)
from benchmarks.no_harm_projects import PROJECTS, Run
from lightning_batchmem import BatchFinder
from lightning_batchmem.plan.recipe import SLOWER_SHARE
from tests.helpers.plans import search_notes, training_notes

RESULTS = ROOT / "benchmarks" / "results" / "no_harm.md"

WAYS: dict[str, str | None] = {"own": None, "auto": "auto", "recipe": "recipe", "memory": "memory"}
"""The objective of the finder in each way; none for the own size."""

STEPS_RUN: Counter[str] = Counter()
"""Calls of ``training_step`` in this process; a search restores what objects count."""

_SHOWN_NOTE = 90

Row = dict[str, Any]


def cpu_seconds() -> float:
    """CPU seconds of this process, and of those that it started and that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def count_steps(module_class: type[LightningModule]) -> None:
    """Count the calls of the ``training_step`` of a class in :data:`STEPS_RUN`."""
    original = module_class.training_step

    @wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        STEPS_RUN["training_step"] += 1
        return original(*args, **kwargs)

    # mypy takes a method for a constant.
    module_class.training_step = counted  # type: ignore[method-assign]


class Clock(Callback):
    """CPU seconds of the search, and samples and CPU seconds of the training.

    It comes after a finder.
    """

    def __init__(self) -> None:
        self.search_seconds = 0.0
        self.search_steps = 0
        self.samples = 0
        self.training_seconds = 0.0
        self._start_seconds = 0.0
        self._evaluation_start_seconds = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        count_steps(type(pl_module))
        self._start_seconds = cpu_seconds()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.search_seconds = cpu_seconds() - self._start_seconds
        self.search_steps = STEPS_RUN["training_step"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_seconds = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._start_seconds == 0:
            # The first batch pays for what a process does once.
            self._start_seconds = cpu_seconds()
        else:
            self.samples += extract_batch_size(batch)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluation_start_seconds = cpu_seconds()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.training_seconds -= cpu_seconds() - self._evaluation_start_seconds

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.training_seconds += cpu_seconds() - self._start_seconds


def train(name: str, way: str, seed: int, most_epochs: int) -> Row:
    """Train a project once, in this process."""
    torch.set_num_threads(1)
    silence()
    seed_everything(seed, verbose=False)
    project = PROJECTS[name]
    clock = Clock()
    start_seconds = cpu_seconds()
    with redirect_stdout(StringIO()):
        trainer = project.train(Run(WAYS[way], seed, [clock], most_epochs))
    row = {
        "project": name,
        "way": way,
        "seed": seed,
        "batch_size": project.own_size,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "steps": trainer.global_step,
        "metric": round(float(trainer.callback_metrics[project.metric]), 4),
        "samples_per_s": round(clock.samples / clock.training_seconds, 1),
        "search_seconds": round(clock.search_seconds, 3),
        "seconds": round(cpu_seconds() - start_seconds, 3),
        "search_steps": clock.search_steps,
    }
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BatchFinder) and callback.plan is not None:
            row |= {
                "batch_size": callback.plan.batch_size,
                "warnings": training_notes(callback.plan),
                "first_note": "".join(search_notes(callback.plan)[:1]),
                "first_row": first_row(callback.plan.short_text()),
            }
            if seed == 0:
                row["text"] = callback.plan.short_text()
    return row


def first_row(text: str) -> str:
    """The name of the first row below the first sentence of a printed plan."""
    found = re.search(r"^  (\w+) {2,}", text, re.M)
    return found[1] if found else ""


class Trainings:
    """All trainings, written to a JSON file as they are made, if there is a path."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: list[Row] = read_rows(path)

    def has(self, name: str, way: str, seed: int) -> bool:
        known = [(row["project"], row["way"], row["seed"]) for row in self.rows]
        return (name, way, seed) in known

    def add(self, row: Row) -> None:
        self.rows.append(row)
        write_rows(self._path, self.rows)

    def of(self, name: str, way: str) -> list[Row]:
        """The complete trainings of a project in a way."""
        rows = [row for row in self.rows if (row["project"], row["way"]) == (name, way)]
        return [row for row in rows if "error" not in row]


def missing(
    trainings: Trainings, names: Sequence[str], seeds: int
) -> Iterator[tuple[str, str, int]]:
    """What is still to be trained; the ways alternate, so other work disturbs all of them."""
    for seed in range(seeds):
        for name in names:
            for way in WAYS:
                if not trainings.has(name, way, seed):
                    yield name, way, seed


def measure(trainings: Trainings, names: Sequence[str], seeds: int, most_epochs: int) -> None:
    """Train what is missing, each training in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    # The server imports everything once, and each process begins as a copy of it.
    context.set_forkserver_preload(["benchmarks.no_harm_projects"])
    todo = list(missing(trainings, names, seeds))
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        for name, way, seed in todo:
            try:
                row = processes.submit(train, name, way, seed, most_epochs).result()
            # A project that ends with an error is a result, too.
            except Exception as error:  # noqa: BLE001
                row = {"project": name, "way": way, "seed": seed, "error": one_line(error)}
            trainings.add(row)
            shown = {key: value for key, value in row.items() if key != "text"}
            print(f"{time.strftime('%H:%M:%S')} {shown}", file=sys.stderr, flush=True)


def _seeds(rows: Sequence[Row]) -> set[int]:
    return {row["seed"] for row in rows}


def spread(rows: Sequence[Row]) -> float:
    metrics = [row["metric"] for row in rows]
    return float(max(metrics) - min(metrics))


def worse_by(own: Sequence[Row], other: Sequence[Row], *, is_loss: bool) -> float:
    """By how many spreads of the own size the mean metric is worse; below 0 where it is better.

    The means are those of the seeds of both.
    """
    both = _seeds(own) & _seeds(other)
    means = [
        statistics.fmean(row["metric"] for row in rows if row["seed"] in both)
        for rows in (own, other)
    ]
    difference = means[1] - means[0] if is_loss else means[0] - means[1]
    # A metric that is the same with all seeds has no spread.
    return float(difference / max(spread(own), 1e-4))


def seeds_worse(own: Sequence[Row], other: Sequence[Row], *, is_loss: bool) -> int:
    """The trainings whose metric is worse than that of the same seed with the own size.

    A small harm on every seed is hidden by the spread, but not here.
    """
    metrics = {row["seed"]: row["metric"] for row in own}
    sign = 1 if is_loss else -1
    return sum(
        sign * (row["metric"] - metrics[row["seed"]]) > 0 for row in other if row["seed"] in metrics
    )


def speed_ratios(own: Sequence[Row], other: Sequence[Row]) -> list[float]:
    """Samples per second of the training, as a share of those of the own size, for each seed."""
    own_speeds = {row["seed"]: row["samples_per_s"] for row in own}
    return [
        row["samples_per_s"] / own_speeds[row["seed"]] for row in other if row["seed"] in own_speeds
    ]


def relative_speed(own: Sequence[Row], other: Sequence[Row]) -> float:
    """The samples per second of the fastest training, as a share of that of the own size.

    Only the seeds of both count, because the fastest of more trainings is faster.
    """
    both = _seeds(own) & _seeds(other)
    fastest = [
        max(row["samples_per_s"] for row in rows if row["seed"] in both) for rows in (own, other)
    ]
    return float(fastest[1] / fastest[0])


def says_what_changes(row: Mapping[str, Any]) -> bool:
    """Whether the first row of the printed plan says what the training becomes."""
    return bool(row["first_row"] == "training")


def is_announced(row: Mapping[str, Any]) -> bool:
    """Whether the printed plan begins with what the training becomes, and with a warning."""
    return says_what_changes(row) and bool(row["warnings"])


def first_note(row: Mapping[str, Any]) -> str:
    """The first sentence below the size: a warning, or a note."""
    if row["warnings"]:
        return f"warning: {row['warnings'][0]}"
    return f"note: {row['first_note']}" if row["first_note"] else "none"


def ranged(values: Sequence[float], form: str) -> str:
    """The least and the most, or one number if they are the same."""
    shown = dict.fromkeys(form.format(value) for value in (min(values), max(values)))
    return " to ".join(shown)


def table_row(name: str, way: str, own: Sequence[Row], rows: Sequence[Row]) -> dict[str, str]:
    is_loss = PROJECTS[name].is_loss
    sizes = Counter(f"{row['batch_size']} x {row['accumulate_grad_batches']}" for row in rows)
    training = statistics.median(row["seconds"] - row["search_seconds"] for row in own)
    mean = statistics.fmean(row["metric"] for row in rows)
    cells = {
        "project": name,
        "way": way,
        "size x accumulation": ", ".join(sizes),
        "steps": ranged([row["steps"] for row in rows], "{:,}"),
        "metric": f"{PROJECTS[name].metric} {mean:.3f} ({spread(rows):.3f})",
    }
    if way == "own":
        return cells | {"CPU s": f"{statistics.median(row['seconds'] for row in rows):.1f}"}
    search = statistics.median(row["search_seconds"] for row in rows)
    ratios = ranged(speed_ratios(own, rows), "{:.2f}")
    note = first_note(rows[0])
    return cells | {
        "worse by spreads": f"{worse_by(own, rows, is_loss=is_loss):+.1f}",
        "worse on seeds": f"{seeds_worse(own, rows, is_loss=is_loss)} of {len(rows)}",
        "samples/s": f"{relative_speed(own, rows):.2f} ({ratios})",
        "CPU s": f"{statistics.median(row['seconds'] for row in rows):.1f}",
        "search CPU s": f"{search:.1f}, {search / training:.0%} of the own training",
        "search steps": ranged([row["search_steps"] for row in rows], "{:,}"),
        "first row says it": f"{sum(map(says_what_changes, rows))} of {len(rows)}",
        "first warning": note if len(note) <= _SHOWN_NOTE else f"{note[:_SHOWN_NOTE]}...",
    }


def summary(trainings: Trainings, names: Sequence[str]) -> list[str]:
    """A sentence for each way, and one for each training that ended with an error."""
    lines = []
    for way in list(WAYS)[1:]:
        compared = [(name, trainings.of(name, "own"), trainings.of(name, way)) for name in names]
        compared = [(name, own, rows) for name, own, rows in compared if own and rows]
        if not compared:
            continue
        worse = [
            (name, rows)
            for name, own, rows in compared
            if worse_by(own, rows, is_loss=PROJECTS[name].is_loss) > 1
        ]
        unsaid = [name for name, rows in worse if not all(map(is_announced, rows))]
        slower = [
            name for name, own, rows in compared if relative_speed(own, rows) < 1 - SLOWER_SHARE
        ]
        equal = [_equal_metrics(own, rows) for _, own, rows in compared]
        kept = min(row["steps"] / own[0]["steps"] for _, own, rows in compared for row in rows)
        line = f"{way}: worse in {_counted([name for name, _ in worse], len(compared))}"
        line += (
            f", of these not announced {len(unsaid)}; slower in {_counted(slower, len(compared))}"
        )
        seeds = [
            seeds_worse(own, rows, is_loss=PROJECTS[name].is_loss) for name, own, rows in compared
        ]
        line += f"; at least {kept:.0%} of the optimizer steps of the own size"
        total = sum(len(rows) for _, _, rows in compared)
        lines.append(
            f"{line}; the metric worse in {sum(seeds)}, equal in {sum(equal)} of {total} trainings"
        )
    lines += [
        f"{row['project']}, {row['way']}, seed {row['seed']}: {row['error']}"
        for row in trainings.rows
        if "error" in row
    ]
    return lines


def _equal_metrics(own: Sequence[Row], other: Sequence[Row]) -> int:
    """The trainings whose metric is that of the same seed with the own size."""
    metrics = {row["seed"]: row["metric"] for row in own}
    return sum(row["metric"] == metrics.get(row["seed"]) for row in other)


def _counted(names: Sequence[str], total: int) -> str:
    which = f" ({', '.join(names)})" if names else ""
    return f"{len(names)} of {total}{which}"


def table(trainings: Trainings, names: Sequence[str]) -> str:
    rows = []
    for name in names:
        own = trainings.of(name, "own")
        for way in WAYS:
            found = trainings.of(name, way)
            if own and found:
                rows.append(table_row(name, way, own, found))
    return markdown(rows, summary(trainings, names))


def main() -> None:
    parser = command_line(__doc__, PROJECTS, writes=True, continues=True)
    parser.add_argument("--seeds", type=int, default=5, help="in each way; default: %(default)s")
    parser.add_argument(
        "--most-epochs", type=int, default=1000, help="fewer than a project has, for a test"
    )
    arguments = parser.parse_args()
    # The processes that train use one thread as well, and the table names this number.
    torch.set_num_threads(1)
    trainings = Trainings(arguments.file)
    measure(trainings, arguments.only, arguments.seeds, arguments.most_epochs)
    text = f"{machine()}\n\n{table(trainings, arguments.only)}"
    print(text)
    if arguments.write:
        write_page(RESULTS, text)


if __name__ == "__main__":
    main()
