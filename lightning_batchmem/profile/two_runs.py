"""Two runs side by side: their differences, and figures with both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from lightning_batchmem.plan.json_fields import finite_json
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB
from lightning_batchmem.plan.throughput import measured_speeds
from lightning_batchmem.profile.figure_style import BLUE, ORANGE, new_figure, with_legend
from lightning_batchmem.profile.figures import BREAKDOWN_PARTS, highest_of_steps, steps_per_point
from lightning_batchmem.profile.step_csv import NAME, PLAN_NAME, Row, read_rows
from lightning_batchmem.profile.summary import SUMMARY_NAME, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = (BLUE, ORANGE)


@dataclass(frozen=True)
class RunFiles:
    """What the files of one run contain.

    Args:
        label: the path that a person gave.
        rows: its steps.
        summary: its summary; ``None`` if the run did not end.
        plan: the plan of a BatchFinder in the run; ``None`` without one.
    """

    label: str
    rows: list[Row]
    summary: Summary | None
    plan: Plan | None

    @property
    def training(self) -> list[tuple[int, Row]]:
        """The training steps, with their numbers."""
        return [(row["step"], row) for row in self.rows if row["stage"] == "train"]

    @property
    def peak_bytes(self) -> float | None:
        """Highest peak of a training step; None without one."""
        if self.summary is not None:
            return self.summary.peak_bytes
        peaks = [row["peak_allocated_mib"] for _, row in self.training]
        return max((peak * MIB for peak in peaks if peak is not None), default=None)


def read_run(path: Path) -> RunFiles:
    """Read a ``memory_per_batch.csv``, or the only one in a directory, and the files beside it.

    Raises:
        ValueError: if there is not exactly one, or if a file is damaged.
    """
    paths = [path] if path.is_file() else sorted(path.rglob(NAME.replace(".", "*.")))
    if len(paths) != 1:
        found = ", ".join(str(found_path.relative_to(path)) for found_path in paths) or "none"
        raise ValueError(
            f"LOG_DIR must have one {NAME}, or be the path of one, got {str(path)!r} with: {found}"
        )
    csv_path = paths[0]
    number = csv_path.stem.removeprefix(Path(NAME).stem)
    read: dict[str, Any] = {}
    for name, from_json in ((SUMMARY_NAME, Summary.from_json), (PLAN_NAME, Plan.from_json)):
        file = csv_path.with_name(name.replace(".", f"{number}."))
        if file.is_file():
            try:
                read[name] = from_json(finite_json(file))
            except ValueError as error:
                raise ValueError(f"{file} is damaged: {error}") from error
    return RunFiles(str(path), read_rows(csv_path), read.get(SUMMARY_NAME), read.get(PLAN_NAME))


def difference_table(first: RunFiles, second: RunFiles) -> Table:
    """Return peak, throughput and wait of both runs, and the change from the first to the second.

    Without its summary, only the peak of a run is known.
    """
    table = Table()
    table.add_column("")
    for label in (first.label, second.label):
        table.add_column(label, justify="right", overflow="fold")
    table.add_column("change", justify="right")
    summaries = (first.summary, second.summary)
    peaks = (first.peak_bytes, second.peak_bytes)
    sizes, speeds, times, waits = (
        [None if summary is None else getattr(summary, name) for summary in summaries]
        for name in ("batch_size", "samples_per_second", "step_seconds", "data_wait_share")
    )
    rows = [
        ("batch size", sizes, "{:,.0f}", 1.0, ""),
        ("peak", peaks, "{:,.1f} MiB", 1 / MIB, ""),
        ("samples/s", speeds, "{:,.1f}", 1.0, ""),
        ("step", times, "{:,.1f} ms", 1e3, ""),
        # A change of per cents is a difference, not a ratio.
        ("waiting for data", waits, "{:.1f}%", 100.0, " points"),
    ]
    for name, values, form, factor, difference_unit in rows:
        cells = ["-" if value is None else form.format(value * factor) for value in values]
        table.add_row(name, *cells, _change(values, factor, difference_unit))
    return table


def _change(values: Sequence[float | None], factor: float, difference_unit: str) -> str:
    before, after = values
    if before is None or after is None:
        return "-"
    if difference_unit:
        return f"{(after - before) * factor:+.1f}{difference_unit}"
    return f"{after / before - 1:+.1%}" if before else "-"


def draw_two(first: RunFiles, second: RunFiles) -> dict[str, Figure]:
    """Draw both runs into each figure, by name; a figure needs its data from both runs."""
    runs = (first, second)
    drawn = {
        "memory_over_steps": _memory_over_steps(runs),
        "memory_composition": _composition(runs),
        "throughput_vs_batch_size": _throughput(runs),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _memory_over_steps(runs: Sequence[RunFiles]) -> Figure | None:
    if any(run.peak_bytes is None or not run.training for run in runs):
        return None
    width = steps_per_point([step for run in runs for step, _ in run.training])
    title = "Peak memory of each training step"
    if width > 1:
        title = f"Peak memory of training, highest of every {width:,} steps"
    figure, axes = new_figure(title, "step", "memory (MiB)")
    for run, color in zip(runs, _COLORS, strict=True):
        axes.plot(
            *highest_of_steps(run.training, "peak_allocated_mib", width),
            label=run.label,
            color=color,
            marker=".",
        )
    axes.set_ylim(bottom=0)
    return with_legend(figure)


def _composition(runs: Sequence[RunFiles]) -> Figure | None:
    breakdowns = [None if run.summary is None else run.summary.breakdown for run in runs]
    figure, axes = new_figure("Memory of a step", "", "memory (MiB)")
    for place, breakdown in enumerate(breakdowns):
        if breakdown is None:
            return None
        base_bytes = 0
        for name, field, color in BREAKDOWN_PARTS:
            count_bytes = getattr(breakdown, field)
            # The second bar has the same parts, which are named once.
            label = None if place else name
            axes.bar(place, count_bytes / MIB, 0.8, base_bytes / MIB, label=label, color=color)
            base_bytes += max(0, count_bytes)
    axes.set_xticks(range(len(runs)), [run.label for run in runs])
    return with_legend(figure)


def _throughput(runs: Sequence[RunFiles]) -> Figure | None:
    speeds = [() if run.plan is None else measured_speeds(run.plan.trials) for run in runs]
    if not all(speeds):
        return None
    figure, axes = new_figure(
        "Throughput in the search", "batch size (samples)", "throughput (samples/s)"
    )
    for run, measured, color in zip(runs, speeds, _COLORS, strict=True):
        axes.plot(
            [speed.batch_size for speed in measured],
            [speed.samples_per_second for speed in measured],
            label=run.label,
            color=color,
            marker="o",
        )
    axes.set_ylim(bottom=0)
    return with_legend(figure)
