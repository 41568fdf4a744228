"""The figures of a run and of a search.

matplotlib is an extra (``plot``) and is imported when a figure is drawn, without pyplot, which has
global state. Each ``plot_`` function raises a ValueError if there is nothing to draw, and an
ImportError without matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from lightning_batchmem.plan.records import MIB, Trial, device_text
from lightning_batchmem.plan.trials_so_far import measured_speeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_batchmem.plan.plan import Plan

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
# A label is above its point, and covers lines behind it.
_LABEL: dict[str, Any] = {
    "xytext": (0, 6),
    "textcoords": "offset points",
    "horizontalalignment": "center",
    "fontsize": 9,
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5},
}
# Labels of sizes that are this share of the axis apart do not overlap.
_LABEL_SHARE = 0.08
_NUMBER = "{x:,.0f}"


def plot_memory_over_steps(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot the peaks of every step, and the last limit.

    The highest peak of a validation is drawn at the training step before it.
    """
    if not any(map(_peak_mib, rows)):
        raise ValueError("no step has a peak of memory, so there is nothing to draw")
    figure, (axes,) = _new_panels("Peak memory of each step", "step", "memory (MiB)")
    peaks: dict[str, dict[int, float]] = {name: {} for name in _STEP_LINES}
    step = 0
    for row in rows:
        readings = {"validation": _peak_mib(row)}
        if row["stage"] == rows[0]["stage"]:
            step = row["step"]
            readings = {
                "reserved": row.get("peak_reserved_mib"),
                "peak": _peak_mib(row),
            }
        for name, peak_mib in readings.items():
            if peak_mib is not None:
                peaks[name][step] = max(peak_mib, peaks[name].get(step, peak_mib))
    # Only an allocator reserves memory; without one a peak is the process's.
    peak = "tensors" if peaks["reserved"] else "process"
    labels = {"reserved": "process", "peak": peak, "validation": f"{peak}, peak of a validation"}
    for name, (style, color) in _STEP_LINES.items():
        if peaks[name]:
            axes.plot(
                *zip(*peaks[name].items(), strict=True), style, label=labels[name], color=color
            )
    limits = [row["limit_mib"] for row in rows if row.get("limit_mib") is not None]
    _draw_limit(axes, limits[-1] if limits else None)
    return _with_legend(figure)


def _peak_mib(row: Mapping[str, Any]) -> float | None:
    """Return the peak of the tensors, or of the process where they are not counted."""
    peak_mib: float | None = row["peak_allocated_mib"]
    return row.get("peak_process_mib") if peak_mib is None else peak_mib


def plot_search(plan: Plan) -> Figure:
    """Plot the memory of a step, and below it the throughput of a rank, over the batch size.

    Memory has the trials, the fitted line and the limit. Throughput has the sizes that were
    measured. Both have the chosen size and the fastest one.
    """
    completed = [
        trial for trial in plan.trials if trial.outcome == "ok" and trial.memory.peak_bytes
    ]
    if not completed:
        raise ValueError("no size of this plan was measured, so there is nothing to draw")
    speeds = measured_speeds(plan.trials)
    what = "Memory and throughput" if speeds else "Memory"
    of_rank = " of each rank" if plan.ranks > 1 else ""
    title = f"{what}{of_rank}{plan.device and f' on {device_text(plan.device)}'}"
    y_labels = ["memory (MiB)", f"throughput ({plan.unit.items}/s)"]
    figure, panels = _new_panels(title, plan.unit.name, *y_labels[: 1 + bool(speeds)])
    sizes = sorted({plan.batch_size, *(trial.batch_size for trial in plan.trials)})
    largest_shown = (1 + _LABEL_SHARE) * sizes[-1]
    panels[0].set_xlim(0, largest_shown)
    ticks = _apart(sizes, plan.batch_size, _LABEL_SHARE * largest_shown)
    panels[0].set_xticks(ticks)
    panels[0].xaxis.set_major_formatter(_NUMBER)
    _draw_trials(panels[0], plan, completed)
    if speeds:
        measured = {speed.batch_size: speed.samples_per_s for speed in speeds}
        connected = {**_POINTS, "linestyle": "solid"}
        panels[1].plot(*zip(*measured.items(), strict=True), color=_BLACK, **connected)
        panels[1].set_ylim(0, 1.25 * max(measured.values()))
        for size in measured.keys() & ticks:
            text = f"{measured[size]:,.0f}"
            panels[1].annotate(text, (size, measured[size]), **_LABEL)
    lines = {plan.batch_size: ("chosen", _GREEN, "--")}
    if plan.fastest_batch_size is not None:
        lines.setdefault(plan.fastest_batch_size, ("fastest", _PURPLE, "-."))
    for panel in panels:
        for size, (name, color, style) in lines.items():
            # The first panel has the names of these lines for both.
            label = f"{name}: {size:,}" if panel is panels[0] else None
            panel.axvline(size, label=label, color=color, linestyle=style, linewidth=1.8, zorder=1)
    return _with_legend(figure)


def _apart(sizes: Sequence[int], chosen: int, distance: float) -> list[int]:
    """The sizes whose labels do not overlap: the chosen one, and others apart from it."""
    kept = [chosen]
    for size in reversed(sizes):
        if all(abs(size - other) >= distance for other in kept):
            kept.append(size)
    return kept


def _draw_trials(axes: Axes, plan: Plan, completed: Sequence[Trial]) -> None:
    failed = [trial.batch_size for trial in plan.trials if trial.outcome != "ok"]
    limit = plan.limit_bytes / MIB
    if plan.memory is not None:
        # The line may bend, because it is the highest line of all phases.
        _, largest_shown = axes.get_xlim()
        sizes = [largest_shown * percent / 100 for percent in range(101)]
        predicted = [plan.memory.predict_bytes(size) / MIB for size in sizes]
        axes.plot(sizes, predicted, label="tensors, predicted", color=_BLUE, linewidth=1.8)
    measured = [trial.batch_size for trial in completed]
    process = [trial.memory.held_bytes / MIB for trial in completed]
    tensors = [trial.memory.peak_bytes / MIB for trial in completed]
    if process != tensors:
        axes.plot(measured, tensors, label="tensors", color=_ORANGE, fillstyle="none", **_POINTS)
    # Failed trials are drawn at the limit, because the peak of a trial that ran out of memory is
    # not known.
    if failed:
        limits = [limit] * len(failed)
        axes.plot(failed, limits, "X", label="did not fit", color=_VERMILLION, markersize=11)
    axes.plot(measured, process, label="process", color=_BLACK, **_POINTS)
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
    # Without `%matplotlib inline` a notebook shows only the name of a figure. To W&B, which looks
    # at the module of a class, a subclass would not be a figure of matplotlib.
    figure._repr_png_ = partial(_png_of, figure)  # type: ignore[attr-defined]
    panels = list(figure.subplots(len(y_labels), sharex=True, squeeze=False)[:, 0])
    panels[0].set_title(title, loc="left", fontsize=12)
    panels[-1].set_xlabel(x_label)
    for axes, y_label in zip(panels, y_labels, strict=True):
        axes.set_ylabel(y_label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=_GREY, alpha=0.25, linewidth=0.6)
        axes.locator_params(axis="x", integer=True)
        axes.xaxis.set_major_formatter(_NUMBER)
        axes.yaxis.set_major_formatter("{x:,.10g}")
    return figure, panels


def _png_of(figure: Figure) -> bytes:
    file = BytesIO()
    figure.savefig(file)
    return file.getvalue()


def _draw_limit(axes: Axes, limit: float | None) -> None:
    """Draw the limit, and begin the axis at 0.

    A limit above twice the data is left out, so that the data can be read.
    """
    _, top = axes.get_ylim()
    if limit is not None and limit <= 2 * top:
        axes.axhline(limit, label=f"limit {limit:,.1f} MiB", color=_VERMILLION, linewidth=2)
        _, top = axes.get_ylim()
    # Lines that are nearly flat have hardly a margin.
    axes.set_ylim(0, max(top, 1.05 * axes.dataLim.ymax))


def _with_legend(figure: Figure) -> Figure:
    """Add a legend below the axes."""
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure
