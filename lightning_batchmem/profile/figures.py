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

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.profile.figure_style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    draw_limit,
    new_panels,
    with_legend,
)
from lightning_batchmem.profile.plan_figure import plot_search
from lightning_batchmem.profile.step_csv import Row, read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Label, color and width of each line, by its column. A later line is thinner, because lines often
# have the same peak.
_LINES = {
    "peak_reserved_mib": ("reserved", GREY, 5.5),
    "forward_peak_mib": ("forward", BLUE, 4.5),
    "backward_peak_mib": ("backward", ORANGE, 3.5),
    "optimizer_step_peak_mib": ("optimizer step", GREEN, 2.5),
    "peak_allocated_mib": ("peak", BLACK, 1.0),
}


def plot_memory_over_steps(rows: Sequence[Row]) -> Figure | None:
    """Plot the peak memory of every step and of its phases.

    The figure also has the evaluations between the steps, and the last limit.
    """
    if not any(row["peak_allocated_mib"] for row in rows):
        return None
    figure, (axes,) = new_panels("Peak memory of each step", "step", "memory (MiB)")
    # An evaluation within the training is drawn at the step before it.
    step = 0
    own: list[tuple[int, Row]] = []
    inner: list[tuple[int, Row]] = []
    for row in rows:
        if row["stage"] == rows[0]["stage"]:
            step = row["step"]
            own.append((step, row))
        else:
            inner.append((step, row))
    for column, (label, color, width) in _LINES.items():
        points = _known(own, column)
        if points:
            axes.plot(*zip(*points, strict=True), ".-", label=label, color=color, linewidth=width)
    peaks = _known(inner, "peak_allocated_mib")
    if peaks:
        axes.plot(*zip(*peaks, strict=True), "D", label="peak (validation)", color=SKY)
    limits = [limit for _, limit in _known(own, "limit_mib")]
    draw_limit(axes, limits[-1] if limits else None)
    return with_legend(figure)


def _known(points: Iterable[tuple[int, Row]], column: str) -> list[tuple[int, float]]:
    return [(step, row[column]) for step, row in points if row.get(column) is not None]


def draw(*sources: list[Row] | Plan | None) -> dict[str, Figure]:
    """Draw all figures of the sources, by name."""
    drawn: dict[str, Figure | None] = {}
    for source in sources:
        if isinstance(source, list):
            drawn["memory_over_steps"] = plot_memory_over_steps(source)
        elif source is not None:
            drawn["search"] = plot_search(source)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix; a PNG has 1,280 x 960 pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def log_figures(
    loggers: Iterable[Logger], csv_path: Path | None, plan: Plan | None, step: int
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
                figures = draw(None if csv_path is None else read_rows(csv_path), plan)
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
