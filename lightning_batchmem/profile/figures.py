"""Figures of a search and of a run, also for loggers.

matplotlib is an extra (``plot``) and is imported when a figure is drawn, without pyplot, which has
global state. Each ``plot_`` function returns ``None`` when there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_batchmem.devices.breakdown import PARTS
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, mib
from lightning_batchmem.profile.figure_style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    draw_limit,
    new_figure,
    with_legend,
)
from lightning_batchmem.profile.plan_figure import plot_search
from lightning_batchmem.profile.step_csv import Row, read_rows
from lightning_batchmem.profile.summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Reserved memory and the phases. A later line is thinner, because lines often have the same peak.
_PART_STYLES: dict[str, dict[str, Any]] = {
    "peak_reserved_mib": {"label": "reserved", "color": GREY, "linewidth": 5.5},
    "forward_peak_mib": {"label": "forward", "color": BLUE, "linewidth": 4.5},
    "backward_peak_mib": {"label": "backward", "color": ORANGE, "linewidth": 3.5},
    "optimizer_step_peak_mib": {"label": "optimizer step", "color": GREEN, "linewidth": 2.5},
}
_STAGE_STYLES: dict[str, dict[str, Any]] = {
    "train": {"label": "peak", "color": BLACK, "marker": ".", "linewidth": 1, "markersize": 3},
    "validate": {"label": "peak (validate)", "color": SKY, "marker": "D"},
    "test": {"label": "peak (test)", "color": PURPLE, "marker": "P"},
    "predict": {"label": "peak (predict)", "color": GREEN, "marker": "X"},
}

_PART_COLORS = (GREY, BLUE, PURPLE, GREEN, SKY, ORANGE)
# Name, field and color of each part of a breakdown, from the bottom of a bar to its top. "Other" is
# the first, because it can be negative. The parts that grow with the batch size are the last.
_BREAKDOWN_PARTS = tuple(
    (name, field, color)
    for (name, field), color in zip((PARTS[-1], *PARTS[:-1]), _PART_COLORS, strict=True)
)


def plot_memory_over_steps(rows: Sequence[Row]) -> Figure | None:
    """Plot the peak memory of every step and of its phases.

    The figure also has the evaluations between the steps, and the limit.
    """
    if not any(row["peak_allocated_mib"] for row in rows):
        return None
    # The keys are stages, and the values are their rows, each with the step to draw it at. The row
    # of an evaluation is drawn at the training step before it.
    stages: dict[str, list[tuple[int, Row]]] = {}
    train_step = None
    for row in rows:
        if row["stage"] == "train":
            train_step = row["step"]
        drawn_step = row["step"] if train_step is None else train_step
        stages.setdefault(row["stage"], []).append((drawn_step, row))
    all_steps = [step for points in stages.values() for step, _ in points]
    width = _steps_per_point(all_steps)
    title = "Peak memory of each step"
    if width > 1:
        title = f"Peak memory, highest of every {width:,} steps"
    figure, axes = new_figure(title, "step", "memory (MiB)")
    for stage, points in stages.items():
        line = "solid"
        if stage == "train":
            for column, style in _PART_STYLES.items():
                steps, values = _highest_of_steps(points, column, width)
                if steps:
                    axes.plot(steps, values, **style)
        elif "train" in stages:
            line = "none"
        steps, values = _highest_of_steps(points, "peak_allocated_mib", width)
        # A damaged file may name another stage.
        other_style = {"label": f"peak ({stage})", "color": GREY, "marker": "x"}
        axes.plot(steps, values, linestyle=line, **_STAGE_STYLES.get(stage, other_style))
    points = [point for points in stages.values() for point in points]
    steps, limits = _highest_of_steps(points, "limit_mib", width)
    if limits:
        # The last limit holds until the last step.
        steps.append(max(all_steps))
        limits.append(limits[-1])
    draw_limit(axes, steps, limits)
    return with_legend(figure)


def plot_breakdown(summary: Summary) -> Figure | None:
    """Plot what fills the memory at the peak of a step, as a stacked bar."""
    breakdown = summary.breakdown
    if breakdown is None or breakdown.peak_bytes <= 0:
        return None
    title = f"Memory of a step ({summary.stage}): {mib(breakdown.peak_bytes)}"
    title += "" if summary.limit_bytes is None else f", limit {mib(summary.limit_bytes)}"
    figure, axes = new_figure(title, "", "memory (MiB)")
    parts = [(name, getattr(breakdown, field), color) for name, field, color in _BREAKDOWN_PARTS]
    if summary.cached_bytes:
        parts.append(("cached by the allocator, unused", summary.cached_bytes, PALE))
    base_bytes = 0
    for name, count_bytes, color in parts:
        # The cache has no share, because it is not in the peak.
        share = f" ({count_bytes / breakdown.peak_bytes:.1%})" if color != PALE else ""
        label = f"{name}\n{mib(count_bytes)}{share}"
        axes.bar(
            0, count_bytes / MIB, 0.8, base_bytes / MIB, label=label, color=color, edgecolor="white"
        )
        base_bytes += max(0, count_bytes)
    axes.set(xlim=(-0.6, 0.6), xticks=[])
    figure.legend(loc="outside right center", frameon=False, labelspacing=0.9, reverse=True)
    return figure


def draw(*sources: list[Row] | Plan | Summary | None) -> dict[str, Figure]:
    """Draw all figures of the sources, by name."""
    drawn: dict[str, Figure | None] = {}
    for source in sources:
        if isinstance(source, list):
            drawn["memory_over_steps"] = plot_memory_over_steps(source)
        elif isinstance(source, Plan):
            drawn["search"] = plot_search(source)
        elif source is not None:
            drawn["memory_composition"] = plot_breakdown(source)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix; a PNG has 1,280 x 960 pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def _steps_per_point(steps: Sequence[int]) -> int:
    """Return how many steps share a point of a figure.

    A figure is about a thousand pixels wide, and a file with every step would be large.
    """
    return (max(steps) - min(steps)) // 1000 + 1


def _highest_of_steps(
    points: Iterable[tuple[int, Row]], column: str, width: int
) -> tuple[list[int], list[float]]:
    """Return the steps with a value, and the highest value of each ``width`` steps.

    A resumed run repeats steps, and the steps of an evaluation are drawn at one training step.
    """
    highest: dict[int, float] = {}
    for step, row in points:
        value: float | None = row.get(column)
        if value is not None:
            first_step = step - step % width
            highest[first_step] = max(value, highest.get(first_step, value))
    steps = sorted(highest)
    return steps, [highest[step] for step in steps]


def log_figures(
    loggers: Iterable[Logger],
    csv_path: Path | None,
    plan: Plan | None,
    summary: Summary | None,
    step: int,
) -> None:
    """Draw the figures of a run, and log them to the loggers that accept figures.

    Their names are ``batchmem/<name>``.
    """
    figures: dict[str, Figure] = {}
    for logger in loggers:
        try:
            log_figure = _figure_function(logger)
            if log_figure is None:
                continue
            if not figures:
                rows = None if csv_path is None else read_rows(csv_path)
                figures = draw(rows, plan, summary)
            for name, figure in figures.items():
                log_figure(f"batchmem/{name}", figure, step)
        except ImportError as error:
            rank_zero_info(f"MemoryProfiler logs no figures: {error}.")
            return
        # A logger may raise anything, and training must go on.
        except Exception as error:  # noqa: BLE001
            name = type(logger).__name__
            rank_zero_warn(
                f"MemoryProfiler could not log figures to {name}: {type(error).__name__}: {error}"
            )


def _figure_function(logger: Any) -> Callable[[str, Figure, int], object] | None:
    """Return the function that logs one figure; None for a logger that accepts none."""
    # All checks are of the class, since the objects of Lightning's dummy loggers have every method.
    # The WandbLogger of Lightning 2.5.0 to 2.6.6 has this method, and wandb.Image takes a figure.
    if hasattr(type(logger), "log_image"):
        return lambda name, figure, step: logger.log_image(key=name, images=[figure], step=step)
    experiment: Any = getattr(logger, "experiment", None)
    # The SummaryWriter of torch 2.13 has this method.
    if hasattr(type(experiment), "add_figure"):
        return lambda name, figure, step: experiment.add_figure(name, figure, step)
    if hasattr(type(experiment), "log_figure"):
        # The MlflowClient of MLflow 3.17 is one client for all runs, so it needs the run's id.
        if hasattr(type(logger), "run_id"):
            return lambda name, figure, step: experiment.log_figure(
                logger.run_id, figure, f"{name}.png"
            )
        # The Experiment of Comet 3.58 has this signature.
        return lambda name, figure, step: experiment.log_figure(name, figure, step=step)
    return None
