"""Figures of a search and of a run, and their images in loggers.

matplotlib is an extra (``plot``) and is imported when a figure is drawn. pyplot is not used: it has
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
from lightning_batchmem.plan.records import MIB, PHASES, mib
from lightning_batchmem.profile.step_csv import Row, read_rows
from lightning_batchmem.profile.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Source: Okabe and Ito 2008, "Color Universal Design", https://jfly.uni-koeln.de/color/
BLACK = "#000000"
GREY = "#7F7F7F"
PALE = "#D9D9D9"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"

# These are the colors of reserved memory and of the phases, in this order.
_LINE_COLORS = (GREY, BLUE, ORANGE, GREEN, SKY)
_STAGE_STYLES = {"validate": (SKY, "D"), "test": (PURPLE, "P"), "predict": (GREEN, "X")}

# Without clipping, a point near size 0 is not cut off by the axis.
_POINTS: dict[str, Any] = {"markersize": 7, "clip_on": False}

# The parts begin at the bottom of the bar. "Other" is the first, because it can be negative, and
# the parts that grow with the batch size are the last.
_BREAKDOWN = tuple(
    zip((PARTS[-1], *PARTS[:-1]), (GREY, BLUE, PURPLE, GREEN, SKY, ORANGE), strict=True)
)

# A line has about this many points at most, because a figure is 640 pixels wide, and Agg cannot
# draw a line of very many points.
_MAX_POINTS = 1000
# A limit above this multiple of the data is only in the legend. Otherwise the data would be too low
# to be read.
_FAR = 3.0


def plot_memory_vs_batch_size(plan: Plan) -> Figure | None:
    """Plot the memory of a step against the batch size.

    The figure has the trials, the fitted line, the limit and the chosen size.
    """
    completed = [trial for trial in plan.trials if trial.outcome == "ok" and trial.peak_bytes]
    failed = [trial.batch_size for trial in plan.trials if trial.outcome != "ok"]
    if not completed:
        return None
    sizes = _sizes(plan)
    held = [trial.held_bytes / MIB for trial in completed]
    limit = plan.limit_bytes / MIB
    highest = max(held)
    title = f"Memory of a step{plan.device and f' on {plan.device}'}"
    figure, axes = _new_figure(title, "batch size (samples)", "memory (MiB)")
    if plan.memory is not None:
        predicted = [plan.memory.predict_bytes(size) / MIB for size in sizes]
        highest = max(highest, *predicted)
        axes.plot(sizes, predicted, label="fitted line", color=BLUE, linewidth=1.8)
    measured = [trial.batch_size for trial in completed]
    if any(trial.held_bytes != trial.peak_bytes for trial in completed):
        live = [trial.peak_bytes / MIB for trial in completed]
        axes.plot(
            measured, live, "o", label="live (tensors)", color=ORANGE, fillstyle="none", **_POINTS
        )
    axes.plot(measured, held, "o", label="held", color=BLACK, **_POINTS)
    # Failed trials are drawn at the limit, because the peak of a trial that ran out of memory is
    # not known.
    if failed:
        highest = max(highest, limit)
        axes.plot(
            failed,
            [limit] * len(failed),
            "X",
            label="did not fit",
            color=VERMILLION,
            markersize=11,
            zorder=4,
        )
    _draw_limit(axes, [0, sizes[-1]], [limit] * 2, highest)
    _draw_chosen_size(axes, plan, sizes[-1])
    return _with_legend(figure, axes)


def plot_throughput_vs_batch_size(plan: Plan) -> Figure | None:
    """Plot the throughput of one rank against the batch size.

    The figure has the trials, the fitted curve and the chosen size.
    """
    timed = [(trial.batch_size, trial.step_seconds) for trial in plan.trials if trial.step_seconds]
    if not timed:
        return None
    sizes = _sizes(plan)
    of_rank = " of each rank" if plan.ranks > 1 else ""
    title = f"Throughput{of_rank}{plan.device and f' on {plan.device}'}"
    figure, axes = _new_figure(title, "batch size (samples)", "throughput (samples/s)")
    if plan.time is not None:
        # Matplotlib leaves out infinite values.
        curve = [plan.time.samples_per_second(size) for size in sizes]
        axes.plot(sizes, curve, label="fitted curve", color=BLUE, linewidth=1.8)
    measured = [size / seconds for size, seconds in timed]
    axes.plot([size for size, _ in timed], measured, "o", label="measured", color=BLACK, **_POINTS)
    axes.set_ylim(0, 1.15 * max(measured))
    _draw_chosen_size(axes, plan, sizes[-1])
    return _with_legend(figure, axes)


def plot_memory_over_steps(rows: Sequence[Row]) -> Figure | None:
    """Plot the peak memory of every step and of its phases.

    The figure also has the evaluations between the steps, and the limit.
    """
    measured = [row for row in rows if row["peak_allocated_mib"]]
    peaks = [row.get("peak_reserved_mib") or row["peak_allocated_mib"] for row in measured]
    if not peaks:
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
    points = [point for placed in stages.values() for point in placed]
    steps = [step for step, _ in points]
    width = (max(steps) - min(steps)) // _MAX_POINTS + 1
    title = "Peak memory of each step"
    if width > 1:
        title = f"Peak memory, highest of every {width:,} steps"
    figure, axes = _new_figure(title, "step", "memory (MiB)")
    for stage, placed in stages.items():
        if stage != "train":
            color, marker = _STAGE_STYLES.get(stage, (GREY, "x"))
            line = "none" if "train" in stages else "solid"
            x, y = _extreme(placed, "peak_allocated_mib", width)
            axes.plot(x, y, label=f"peak ({stage})", color=color, marker=marker, linestyle=line)
            continue
        columns = {"reserved": "peak_reserved_mib"}
        columns |= {phase: f"{phase}_peak_mib" for phase in PHASES}
        # A later line is thinner, because the lines often have the same peak.
        for index, (name, column) in enumerate(columns.items()):
            x, y = _extreme(placed, column, width)
            if x:
                label = name.replace("_", " ")
                axes.plot(x, y, label=label, color=_LINE_COLORS[index], linewidth=5.5 - index)
        x, y = _extreme(placed, "peak_allocated_mib", width)
        axes.plot(x, y, label="peak", color=BLACK, linewidth=1.0, marker=".", markersize=3)
    x, y = _extreme(points, "limit_mib", width, min)
    if x:
        x = [*x, max(steps)]
        y = [*y, y[-1]]
    _draw_limit(axes, x, y, max(peaks))
    return _with_legend(figure, axes)


def plot_breakdown(summary: Summary) -> Figure | None:
    """Plot what fills the memory at the peak of a step, as a stacked bar."""
    breakdown = summary.breakdown
    if breakdown is None or breakdown.peak_bytes <= 0:
        return None
    title = f"Memory of a step ({summary.stage}): {mib(breakdown.peak_bytes)}"
    title += "" if summary.limit_bytes is None else f", limit {mib(summary.limit_bytes)}"
    figure, axes = _new_figure(title, "", "memory (MiB)")
    parts = [(name, getattr(breakdown, field), color) for (name, field), color in _BREAKDOWN]
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
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside right center", frameon=False, labelspacing=0.9
    )
    return figure


def draw(*sources: list[Row] | Plan | Summary | None) -> dict[str, Figure]:
    """Draw all figures of the sources, by name.

    The names of the figures of a plan of validation begin with ``evaluation_``.
    """
    drawn: dict[str, Figure | None] = {}
    for source in sources:
        if isinstance(source, list):
            drawn["memory_over_steps"] = plot_memory_over_steps(source)
        elif isinstance(source, Plan):
            drawn["memory_vs_batch_size"] = plot_memory_vs_batch_size(source)
            drawn["throughput_vs_batch_size"] = plot_throughput_vs_batch_size(source)
            evaluation = draw(source.evaluation)
            drawn |= {f"evaluation_{name}": figure for name, figure in evaluation.items()}
        elif source is not None:
            drawn["memory_composition"] = plot_breakdown(source)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix; a PNG has 1,280 x 960 pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def _new_figure(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'figures need matplotlib: pip install "lightning-batchmem[plot]"'
        ) from error
    figure = Figure(figsize=(6.4, 4.8), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=12)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.10g}")
    return figure, axes


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )
    return figure


def _draw_limit(axes: Axes, x: Sequence[float], limits: Sequence[float], highest: float) -> None:
    """Draw the limit, and set the range of the axis.

    The axis begins at 0 and ends above the data, and also above the limit unless that is far.
    """
    if limits:
        near = limits[-1] <= _FAR * highest
        highest = max(highest, *limits) if near else highest
        label = f"limit {limits[-1]:,.1f} MiB{'' if near else ' (above)'}"
        axes.plot(x, limits, label=label, color=VERMILLION, linewidth=2, drawstyle="steps-post")
    axes.set_ylim(0, 1.08 * highest or 1)


def _draw_chosen_size(axes: Axes, plan: Plan, last_size: float) -> None:
    axes.axvline(
        plan.batch_size,
        label=f"chosen: {plan.batch_size:,}",
        color=GREEN,
        linestyle="--",
        linewidth=1.8,
    )
    axes.set_xlim(0, last_size)


def _extreme(
    placed: Iterable[tuple[int, Row]],
    column: str,
    width: int,
    choose: Callable[[float, float], float] = max,
) -> tuple[list[int], list[float]]:
    """Return steps, and the highest or lowest value of each ``width`` of them.

    Steps without a reading are left out.
    """
    found: dict[int, float] = {}
    for step, row in placed:
        value: float | None = row.get(column)
        if value is not None:
            first = step - step % width
            found[first] = choose(value, found.get(first, value))
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def _sizes(plan: Plan) -> list[float]:
    """Batch sizes from 0 to a tenth beyond the largest, at which curves are drawn."""
    last = 1.1 * max(plan.batch_size, *(trial.batch_size for trial in plan.trials))
    return [last * index / 200 for index in range(201)]


def log_figures(
    loggers: Iterable[Logger],
    csv_path: Path | None,
    plan: Plan | None,
    summary: Summary | None,
    step: int,
) -> None:
    """Draw the figures of a run, and log them to the loggers that accept images.

    The tag of an image is ``batchmem/<name>``.
    """
    images: dict[str, Any] = {}
    for logger in loggers:
        try:
            if (send := _sender(logger)) is None:
                continue
            if not images:
                rows = None if csv_path is None else read_rows(csv_path)
                figures = draw(rows, plan, summary)
                images = {name: _pixels(figure) for name, figure in figures.items()}
            for name, pixels in images.items():
                send(f"batchmem/{name}", pixels, step)
        except ImportError as error:
            rank_zero_info(f"MemoryProfiler logs no figures: {error}.")
            return
        # A logger may raise anything, and training must go on.
        except Exception as error:  # noqa: BLE001
            name = type(logger).__name__
            rank_zero_warn(
                f"MemoryProfiler could not log figures to {name}: {type(error).__name__}: {error}"
            )


def _sender(logger: Any) -> Callable[[str, Any, int], object] | None:
    """Return the function that logs one image; None for a logger that accepts none."""
    # All checks are of the class, since the objects of Lightning's dummy loggers have every method.
    # The WandbLogger of Lightning 2.5.0 to 2.6.6 has this method.
    if hasattr(type(logger), "log_image"):
        return lambda tag, pixels, step: logger.log_image(key=tag, images=[pixels], step=step)
    experiment: Any = getattr(logger, "experiment", None)
    # The SummaryWriter of torch 2.13 has this method.
    if hasattr(type(experiment), "add_image"):
        return lambda tag, pixels, step: experiment.add_image(tag, pixels, step, dataformats="HWC")
    if hasattr(type(experiment), "log_image"):
        # The MlflowClient of MLflow 3.17 is one client for all runs, so it needs the run's id.
        if hasattr(type(logger), "run_id"):
            return lambda tag, pixels, step: experiment.log_image(
                logger.run_id, pixels, artifact_file=f"{tag}.png"
            )
        # The Experiment of Comet 3.58 has this signature.
        return lambda tag, pixels, step: experiment.log_image(pixels, name=tag, step=step)
    return None


def _pixels(figure: Figure) -> Any:
    """Return the figure as an array of height x width x RGB."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return numpy.asarray(canvas.buffer_rgba())[..., :3].copy()
