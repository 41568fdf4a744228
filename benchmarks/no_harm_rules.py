"""Which bound on a raised batch size does no harm, on the tasks of benchmarks.no_harm_tasks.

Each task is trained with five seeds at its own size and at the sizes that the rules allow, with
equal epochs, at its unchanged rate and at a scaled one (times the square root of the factor for
Adam and AdamW, times the factor for SGD). A size does harm if the mean held-out loss is worse than
that of the own size by more than the spread (largest less smallest loss of the five seeds at the
own size) and by more than 2 %. A task counts if its mean loss at the own size still falls in the
last fifth of the training, and if ten steps an epoch at the unchanged rate do harm.

The first set chose the rule "at most 1.5x", the simplest that did no harm at the unchanged rate
and raised all sizes. The second set was written after that choice. Harm that is smaller than the
spread is still there: the last columns tell on how many tasks all five seeds end worse than the
same seeds at the own size.

    python -m benchmarks.no_harm_rules                  # both sets, about 40 minutes on one core
    python -m benchmarks.no_harm_rules --set first
    python -m benchmarks.no_harm_rules --write          # also to benchmarks/results
    # trainings also to a file, from which the same command continues
    python -m benchmarks.no_harm_rules --file /tmp/trainings.json
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import (
    ROOT,
    command_line,
    machine,
    markdown,
    read_rows,
    write_page,
    write_rows,
)
from benchmarks.no_harm_tasks import SETS, Task, TaskModule

RESULTS = ROOT / "benchmarks" / "results" / "no_harm_rules.md"
SEEDS = range(5)
LEAST_HARM = 0.02
LATE_SHARE = 0.8

Rule = Callable[[Task], int]


@dataclass(frozen=True)
class Training:
    """One training, with the held-out losses after four fifths of its steps and at its end."""

    task: str
    epochs: int
    size: int
    rate: float
    seed: int
    late_loss: float = math.nan
    loss: float = math.nan

    @property
    def key(self) -> tuple[str, int, int, float, int]:
        return (self.task, self.epochs, self.size, self.rate, self.seed)


@dataclass(frozen=True)
class Comparison:
    """The losses at another size or rate beside those at the own ones."""

    own: Sequence[Training]
    other: Sequence[Training]

    @property
    def own_loss(self) -> float:
        return statistics.mean(training.loss for training in self.own)

    @property
    def spread(self) -> float:
        losses = [training.loss for training in self.own]
        return max(losses) - min(losses)

    @property
    def difference(self) -> float:
        """How much worse the other mean is; infinite where a training ended without a number."""
        loss = statistics.mean(training.loss for training in self.other)
        return loss - self.own_loss if math.isfinite(loss) else math.inf

    @property
    def spreads(self) -> float:
        return self.difference / self.spread

    @property
    def share(self) -> float:
        return self.difference / abs(self.own_loss)

    @property
    def is_worse_with_every_seed(self) -> bool:
        """Whether each seed ends worse than the same seed at the own size."""
        own = {training.seed: training.loss for training in self.own}
        return all(not training.loss <= own[training.seed] for training in self.other)

    @property
    def is_harm(self) -> bool:
        return self.spreads > 1 and self.share > LEAST_HARM


def times(factor: float) -> Rule:
    """The own size times a factor."""
    return lambda task: int(task.batch_size * factor)


def steps(in_epoch: int, in_training: int = 0) -> Rule:
    """The largest size with so many full steps, or the own size where that has fewer."""

    def size(task: Task) -> int:
        samples = task.data().samples
        most = samples // in_epoch
        if in_training:
            most = min(most, samples * task.epochs // in_training)
        return max(task.batch_size, most)

    return size


def smaller(first: Rule, second: Rule) -> Rule:
    return lambda task: min(first(task), second(task))


RULES: dict[str, Rule] = {
    "10 an epoch": steps(10),
    "at most 4x": times(4),
    "at most 2x": times(2),
    "at most 1.5x": times(1.5),
    "at most 1.25x": times(1.25),
    "50/500": steps(50, 500),
    "100/1,000": steps(100, 1_000),
    "200/2,000": steps(200, 2_000),
    "min(4x, 100/1,000)": smaller(times(4), steps(100, 1_000)),
    "min(2x, 100/1,000)": smaller(times(2), steps(100, 1_000)),
    "min(1.5x, 100/1,000)": smaller(times(1.5), steps(100, 1_000)),
    "min(2x, 200/2,000)": smaller(times(2), steps(200, 2_000)),
    "own": times(1),
}


def scaled_rate(task: Task, size: int) -> float:
    factor = size / task.batch_size
    return task.rate * (factor if task.optimizer == "sgd" else factor**0.5)


def train(task: Task, size: int, rate: float, seed: int) -> Training:
    """Train in a plain loop, which is faster than a Trainer for such small networks."""
    module = TaskModule(task, seed)
    module.lr = rate
    optimizer = module.configure_optimizers()
    data = task.data()
    generator = torch.Generator().manual_seed(seed)
    late_step = math.ceil(LATE_SHARE * task.epochs * math.ceil(data.samples / size))
    done = 0
    late_loss = math.nan
    for _ in range(task.epochs):
        order = torch.randperm(data.samples, generator=generator)
        for first in range(0, data.samples, size):
            chosen = order[first : first + size]
            loss = module.training_step(tuple(tensor[chosen] for tensor in data.train))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
            if done == late_step:
                late_loss = module.held_out_loss()
    return Training(task.name, task.epochs, size, rate, seed, late_loss, module.held_out_loss())


class Trainings:
    """The trainings so far, in a file if there is a path."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        found = (Training(**row) for row in read_rows(path))
        self._by_key = {training.key: training for training in found}

    def of(self, task: Task, size: int, rate: float) -> list[Training]:
        """Five seeds; those that are not in the file are trained."""
        wanted = [Training(task.name, task.epochs, size, rate, seed) for seed in SEEDS]
        missing = [training for training in wanted if training.key not in self._by_key]
        for training in missing:
            self._by_key[training.key] = train(task, size, rate, training.seed)
        if missing:
            write_rows(self._path, map(vars, self._by_key.values()))
        return [self._by_key[training.key] for training in wanted]

    def compare(self, task: Task, rule: Rule, *, is_scaled: bool) -> Comparison:
        size = rule(task)
        rate = scaled_rate(task, size) if is_scaled else task.rate
        return Comparison(
            self.of(task, task.batch_size, task.rate),
            self.of(task, size, rate),
        )

    def counts(self, task: Task) -> bool:
        today = self.compare(task, RULES["10 an epoch"], is_scaled=False)
        return is_falling(today.own) and today.is_harm


def is_falling(own: Iterable[Training]) -> bool:
    return sum(training.loss - training.late_loss for training in own) < 0


def task_row(trainings: Trainings, task: Task) -> dict[str, str]:
    """The own loss, and for each size the differences at the unchanged and at the scaled rate."""
    own = trainings.compare(task, RULES["own"], is_scaled=False)
    late_loss = statistics.mean(training.late_loss for training in own.own)
    row = {
        "task (own size, samples, epochs, steps)": (
            f"{task.name} ({task.batch_size}, {task.data().samples:,}, {task.epochs},"
            f" {task.steps:,})"
        ),
        "rate": f"{task.rate:g}{' best' if task.has_best_rate else ''}",
        "after 80 %": f"{late_loss:.4g}",
        "own loss": f"{own.own_loss:.4g}",
        "spread": f"{own.spread:.2g} ({own.spread / own.own_loss:.1%})",
    }
    columns = {"x1.25": times(1.25), "x1.5": times(1.5), "x2": times(2), "x4": times(4)}
    columns |= {name: RULES[name] for name in RULES if name[0].isdigit()}
    for name, rule in columns.items():
        cells = [cell(trainings.compare(task, rule, is_scaled=scaled)) for scaled in (False, True)]
        text = " / ".join(cells)
        if not name.startswith("x"):
            text = f"{rule(task)}: {text}"
        row[name] = "own" if rule(task) == task.batch_size else text
    row["counts"] = "yes" if trainings.counts(task) else "no"
    return row


def cell(comparison: Comparison) -> str:
    text = f"{comparison.spreads:+.1f} ({comparison.share:+.0%})"
    return f"**{text}**" if comparison.is_harm else text


def rule_row(trainings: Trainings, name: str, tasks: Sequence[Task]) -> dict[str, str]:
    """On how many of the tasks a rule does harm, and how large its sizes are."""
    rule = RULES[name]
    row = {"rule": name}
    for column, is_scaled in {"unchanged rate": False, "scaled rate": True}.items():
        found = [trainings.compare(task, rule, is_scaled=is_scaled) for task in tasks]
        harmed = sum(comparison.is_harm for comparison in found)
        worst = max(comparison.spreads for comparison in found)
        mean = statistics.mean(comparison.spreads for comparison in found)
        share = max(comparison.share for comparison in found)
        middle = statistics.median(comparison.share for comparison in found)
        worse = sum(comparison.is_worse_with_every_seed for comparison in found)
        row[f"{column}: harmed of counted"] = f"{harmed} of {len(tasks)}"
        row[f"{column}: worst"] = f"{worst:+.1f} spreads, {share:+.1%}"
        row[f"{column}: mean, median"] = f"{mean:+.2f} spreads, {middle:+.1%}"
        row[f"{column}: worse with every seed"] = f"{worse} of {len(tasks)}"
    factors = [rule(task) / task.batch_size for task in tasks]
    raised = sum(factor > 1 for factor in factors)
    row["factors allowed"] = f"{min(factors):.3g}..{max(factors):.3g}, raised on {raised}"
    return row


def counted(trainings: Trainings, name: str) -> list[Task]:
    return [task for task in SETS[name] if trainings.counts(task)]


def rule_table(trainings: Trainings, tasks: Sequence[Task]) -> str:
    return markdown([rule_row(trainings, rule, tasks) for rule in RULES])


def tables(trainings: Trainings, name: str) -> str:
    per_task = markdown([task_row(trainings, task) for task in SETS[name]])
    return f"## The {name} set\n\n{per_task}\n\n{rule_table(trainings, counted(trainings, name))}"


def table_of_all(trainings: Trainings, names: Iterable[str]) -> str:
    tasks = [task for name in names for task in counted(trainings, name)]
    return f"## All sets together\n\n{rule_table(trainings, tasks)}"


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__, writes=True, continues=True)
    parser.add_argument("--set", choices=list(SETS), help="only this set (default: all)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    trainings = Trainings(chosen.file)
    names = [chosen.set] if chosen.set else list(SETS)
    parts = [machine(), *(tables(trainings, name) for name in names)]
    if len(names) > 1:
        parts.append(table_of_all(trainings, names))
    text = "\n\n".join(parts)
    print(text)
    if chosen.write:
        write_page(RESULTS, text)


if __name__ == "__main__":
    main()
