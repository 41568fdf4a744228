"""The figures of a run and of a search.

matplotlib is an extra (``plot``) and is imported when a figure is drawn, without pyplot, which has
global state. Each ``plot_`` function returns ``None`` when there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, device_text
from lightning_batchmem.plan.trials_so_far import measured_speeds
from lightning_batchmem.profile.step_csv import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Source: Okabe and Ito 2008, "Color Universal Design", https://jfly.uni-koeln.de/color/
_BLACK = "#000000"
_GREY = "#7F7F7F"
_ORANGE = "#E69F00"
_SKY = "#56B4E9"
_GREEN = "#009E73"
_BLUE = "#0072B2"
_VERMILLION = "#D55E00"
_PURPLE = "#CC79A7"

# A later line is drawn over an earlier one.
_STEP_LINES = {
    "reserved": (".-", _GREY),
    "peak": (".-", _BLACK),
    "validation": ("D", _SKY),
}
# Without clipping, a point near size 0 is not cut off by the axis.
_POINTS: dict[str, Any] = {"marker": "o", "linestyle": "none", "markersize": 6, "clip_on": False}


def plot_memory_over_steps(rows: Sequence[Row]) -> Figure | None:
    """Plot the peaks of every step, and the last limit.

    A step of a validation is drawn at the training step before it.
    """
    if not any(row["peak_allocated_mib"] for row in rows):
        return None
    figure, (axes,) = _new_panels("Peak memory of each step", "step", "memory (MiB)")
    lines: dict[str, list[tuple[int, float | None]]] = {name: [] for name in _STEP_LINES}
    step = 0
    for row in rows:
        if row["stage"] == rows[0]["stage"]:
            step = row["step"]
            lines["reserved"].append((step, row.get("peak_reserved_mib")))
            lines["peak"].append((step, row["peak_allocated_mib"]))
        else:
            lines["validation"].append((step, row["peak_allocated_mib"]))
    known = {
        name: [point for point in points if point[1] is not None] for name, points in lines.items()
    }
    # Only an allocator reserves memory; without one a peak is that of the process.
    peak = "tensors" if known["reserved"] else "process"
    labels = {"reserved": "process", "peak": peak, "validation": f"{peak} (validation)"}
    for name, (style, color) in _STEP_LINES.items():
        if known[name]:
            axes.plot(*zip(*known[name], strict=True), style, label=labels[name], color=color)
    limits = [row["limit_mib"] for row in rows if row.get("limit_mib") is not None]
    _draw_limit(axes, limits[-1] if limits else None)
    return _with_legend(figure)


def plot_search(plan: Plan) -> Figure | None:
    """Plot the memory of a step, and below it the throughput of a rank, over the batch size.

    Memory has the trials, the fitted line and the limit. Throughput has the sizes that were
    measured. Both have the chosen size and the fastest one. ``None`` if no size was measured.
    """
    if not any(trial.peak_bytes for trial in plan.trials if trial.outcome == "ok"):
        return None
    of_rank = " of each rank" if plan.ranks > 1 else ""
    title = f"Memory and throughput{of_rank}{plan.device and f' on {device_text(plan.device)}'}"
    speeds = measured_speeds(plan.trials)
    y_labels = ["memory (MiB)", f"throughput ({plan.unit.items}/s)"]
    figure, panels = _new_panels(title, plan.unit.name, *y_labels[: 1 + bool(speeds)])
    last_size = 1.1 * max(plan.batch_size, *(trial.batch_size for trial in plan.trials))
    _draw_trials(panels[0], plan, last_size)
    if speeds:
        sizes = [speed.batch_size for speed in speeds]
        measured = [speed.samples_per_second for speed in speeds]
        connected = {**_POINTS, "linestyle": "solid"}
        panels[1].plot(sizes, measured, label="measured", color=_BLACK, **connected)
        panels[1].set_ylim(0, 1.15 * max(measured))
    lines = {plan.batch_size: ("chosen", _GREEN, "--")}
    if plan.fastest_batch_size is not None:
        lines.setdefault(plan.fastest_batch_size, ("fastest", _PURPLE, "-."))
    for panel in panels:
        panel.set_xlim(0, last_size)
        for size, (name, color, style) in lines.items():
            # The first panel has the names of these lines for both.
            label = f"{name}: {size:,}" if panel is panels[0] else None
            panel.axvline(size, label=label, color=color, linestyle=style, linewidth=1.8)
    return _with_legend(figure)


def _draw_trials(axes: Axes, plan: Plan, last_size: float) -> None:
    completed = [trial for trial in plan.trials if trial.outcome == "ok" and trial.peak_bytes]
    failed = [trial.batch_size for trial in plan.trials if trial.outcome != "ok"]
    limit = plan.limit_bytes / MIB
    if plan.memory is not None:
        # The line may bend, because it is the highest line of all phases.
        sizes = [last_size * percent / 100 for percent in range(101)]
        predicted = [plan.memory.predict_bytes(size) / MIB for size in sizes]
        axes.plot(sizes, predicted, label="tensors, predicted", color=_BLUE, linewidth=1.8)
    measured = [trial.batch_size for trial in completed]
    held = [trial.held_bytes / MIB for trial in completed]
    live = [trial.peak_bytes / MIB for trial in completed]
    if held != live:
        axes.plot(measured, live, label="tensors", color=_ORANGE, fillstyle="none", **_POINTS)
    axes.plot(measured, held, label="process", color=_BLACK, **_POINTS)
    # Failed trials are drawn at the limit, because the peak of a trial that ran out of memory is
    # not known.
    if failed:
        limits = [limit] * len(failed)
        axes.plot(failed, limits, "X", label="did not fit", color=_VERMILLION, markersize=11)
    _draw_limit(axes, limit)


def _new_panels(title: str, x_label: str, *y_labels: str) -> tuple[Figure, list[Axes]]:
    """Make an empty figure of axes below each other, which share their x axis.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'figures need matplotlib: pip install "lightning-batchmem[plot]"'
        ) from error
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    panels = list(figure.subplots(len(y_labels), sharex=True, squeeze=False)[:, 0])
    panels[0].set_title(title, loc="left", fontsize=12)
    panels[-1].set_xlabel(x_label)
    for axes, y_label in zip(panels, y_labels, strict=True):
        axes.set_ylabel(y_label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=_GREY, alpha=0.25, linewidth=0.6)
        axes.locator_params(axis="x", integer=True)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.10g}")
    return figure, panels


def _draw_limit(axes: Axes, limit: float | None) -> None:
    """Draw the limit, and begin the axis at 0.

    The axis ends above the limit, but at most at twice the data, so that they can be read.
    """
    _, data_top = axes.get_ylim()
    if limit is not None:
        axes.axhline(limit, label=f"limit {limit:,.1f} MiB", color=_VERMILLION, linewidth=2)
    _, top = axes.get_ylim()
    axes.set_ylim(0, min(top, 2 * data_top))


def _with_legend(figure: Figure) -> Figure:
    """Add a legend below the axes."""
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure
