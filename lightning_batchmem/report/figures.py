"""The figures of a search and of a run.

Made without pyplot, so that no backend is chosen and no global state changes. matplotlib is an extra (``plot``), and is
imported when a figure is drawn. A figure is 640 x 480 pixels at its own 100 dots per inch; what has to be read beside
the data stands in a legend outside the axes, so that it covers nothing. Heights start at 0, so that they compare.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_batchmem.plan.decide import THROUGHPUT_SHARE
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import PHASES
from lightning_batchmem.report.figure import (
    BLACK,
    BLUE,
    FAR,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    Levels,
    NothingToDrawError,
    digits,
    draw_level,
    draw_line,
    finished,
    new_figure,
    set_whole_numbers,
    thinned,
)
from lightning_batchmem.report.pile import plot_composition
from lightning_batchmem.report.step_csv import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "plot_composition",
    "plot_memory_over_steps",
    "plot_memory_vs_batch_size",
    "plot_throughput_vs_batch_size",
    "save",
]

# phase -> colour, marker, size of the marker, width of the line. Phases often have the same peak on the host: what is
# drawn later is smaller and thinner, so that all of them stay visible.
_PHASE_STYLES = {
    "forward": (BLUE, "^", 11.0, 3.6),
    "backward": (ORANGE, "v", 8.5, 2.4),
    "optimizer_step": (GREEN, "s", 5.5, 1.4),
    "evaluation": (SKY, "D", 3.5, 0.7),
}
_STAGE_STYLES = {"validate": (SKY, "D"), "test": (PURPLE, "P"), "predict": (GREEN, "X")}

_WIDE = 50.0  # batch sizes that span more than this factor get a logarithmic axis
_MOST_POINTS = 1000  # of a line: 640 pixels show no more, and an SVG would hold them all


def plot_memory_over_steps(rows: Sequence[Row], *, limit_bytes: int | None = None) -> Figure:
    """Draw the peak memory of every step and of its phases, the evaluations between them, and the limit.

    An evaluation stands at the training step that it followed; without training it is a line of its own. Beyond 1,000
    rows a point is the highest of several, and rows may be that already: the title says how many steps are in a point.

    Args:
        rows: of ``memory_per_batch.csv``, as :func:`~lightning_batchmem.report.step_csv.read_rows` gives them.
        limit_bytes: what the process may hold; ``None``: what the rows say of it.

    Returns:
        The figure. What a row does not tell is a gap in its line.

    Raises:
        ValueError: when no row tells its memory.
        ImportError: without matplotlib.
    """
    known = [count for row in rows for count in (row.peak_bytes, row.peak_reserved_bytes) if count is not None]
    if not known:
        raise NothingToDrawError(f"rows must hold at least one step that tells its memory, got {len(rows)} that do not")
    stages = _by_stage(rows)
    placed_rows = [placed for of_stage in stages.values() for placed in of_stage]
    limits = [(step, row.limit_bytes) for step, row in placed_rows if row.limit_bytes is not None]
    if limit_bytes is not None:
        limits = [(0, limit_bytes)]
    levels = Levels(max(known), [limit for _, limit in limits])
    width = math.ceil(max(map(len, stages.values())) / _MOST_POINTS)
    steps = width * _steps_per_row(stages.get("train") or next(iter(stages.values())))
    name, what = "Peak memory", "peak"
    title = f"{name} of each step" if steps == 1 else f"{name}, the highest of every {steps:,} steps"
    figure, axes = new_figure(title, "step (batches since the start)", levels)
    for stage, placed in stages.items():
        label = f"{what}, {stage}" if {*stages} != {"train"} else f"{what} of the step"
        x, y = (
            [step for step, _ in placed[::width]],
            levels.scaled(thinned([row.peak_bytes for _, row in placed], width)),
        )
        colour, marker = _STAGE_STYLES.get(stage, (GREY, "x"))
        if stage == "train":
            _draw_reserved_and_phases(axes, levels, placed, width)
            draw_line(axes, x, y, label=label, color=BLACK, linewidth=0.7)
        elif "train" in stages:
            style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 6, "linestyle": "none"}
            axes.plot(x, y, label=label, zorder=4, **style)
        else:
            draw_line(axes, x, y, label=label, color=colour, linewidth=1.4)
    first, last = min(step for step, _ in placed_rows), max(step for step, _ in placed_rows)
    levels.draw_limit(axes, [*limits, (last, limits[-1][1])] if limits else [])
    set_whole_numbers(axes)
    if last == first:
        axes.set_xlim(first - 1, last + 1)
    return finished(figure, axes)


def plot_memory_vs_batch_size(plan: Plan) -> Figure:
    """Draw the sizes that were run, the lines fitted to them with their upper bound, the limit and the chosen size.

    The lines are left out below the sizes that they were fitted to: a law that bends is fitted to its last part only.

    Args:
        plan: of a finished search.

    Returns:
        The figure. A size that ran out of memory is a cross at the limit, as its peak is not known. The peaks of
        the phases are allocated bytes; where the allocator reserves more, step and line are reserved bytes.

    Raises:
        ValueError: when no size was run.
        ImportError: without matplotlib.
    """
    done, failed = _trials(plan)
    grid = _grid(plan)
    memory = plan.memory
    shown = [trial.held_bytes for trial in done]
    if memory is not None:
        shown += [round(memory.upper_bytes(plan.batch_size))]
    levels = Levels(max(shown), [plan.limit_bytes], need_limit=bool(failed))
    figure, axes = new_figure("Memory of a step by batch size", "batch size (samples)", levels)
    for phase in PHASES:
        of_phase = [trial for trial in done if phase in trial.phase_peak_bytes]
        if of_phase:
            colour, marker, size, _ = _PHASE_STYLES[phase]
            x, y = [trial.batch_size for trial in of_phase], [trial.phase_peak_bytes[phase] for trial in of_phase]
            style: dict[str, Any] = {
                "color": colour,
                "marker": marker,
                "markersize": size,
                "fillstyle": "none",
                "markeredgewidth": 1.6,
            }
            axes.plot(x, levels.scaled(y), label=phase.replace("_", " "), linestyle="none", **style)
    reserved = any(trial.peak_reserved_bytes is not None for trial in done)
    style = {"color": BLACK, "marker": "o", "markersize": 4.0, "linestyle": "none", "zorder": 5}
    label = "whole step (reserved)" if reserved else "whole step"
    axes.plot([trial.batch_size for trial in done], levels.scaled([t.held_bytes for t in done]), label=label, **style)
    if failed:
        style = {"color": VERMILLION, "marker": "x", "markersize": 10, "markeredgewidth": 2.5, "linestyle": "none"}
        at_limit = levels.scaled([plan.limit_bytes] * len(failed))
        axes.plot([trial.batch_size for trial in failed], at_limit, label="out of memory", zorder=6, **style)
    if memory is not None:
        fitted = [size for size in grid if size >= memory.lines[memory.phase_at(size)].first_batch_size]
        expected = levels.scaled([memory.predict_bytes(size) for size in fitted])
        upper = levels.scaled([memory.upper_bytes(size) for size in fitted])
        axes.plot(fitted, expected, label="fitted line", color=BLACK, linewidth=1.2)
        axes.fill_between(fitted, expected, upper, label="up to its upper bound", color=GREY, alpha=0.3, linewidth=0)
    levels.draw_limit(axes, [(grid[0], plan.limit_bytes)])
    _set_size_axis(axes, grid, plan)
    return finished(figure, axes)


def plot_throughput_vs_batch_size(plan: Plan) -> Figure:
    """Draw the speed of the sizes that were run, the fitted curve, what it tends to, and the chosen size.

    Source: with ``T(B) = t0 + c * B`` the throughput ``B / T(B)`` tends to ``1 / c``, and reaches the share ``s`` of
    that at ``B = s / (1 - s) * t0 / c``.

    Args:
        plan: of a finished search.

    Returns:
        The figure, in samples per second of one rank.

    Raises:
        ValueError: when no size was timed.
        ImportError: without matplotlib.
    """
    timed = [(trial.batch_size, trial.step_seconds) for trial in _trials(plan)[0] if trial.step_seconds]
    if not timed:
        raise NothingToDrawError("plan must hold at least one trial with its time, got none")
    figure, axes = new_figure("Throughput by batch size", "batch size (samples)", None)
    axes.set_ylabel("throughput (samples/s)", fontsize=11)
    speeds = [size / seconds for size, seconds in timed]
    top = max(speeds)
    style: dict[str, Any] = {"color": BLUE, "marker": "o", "markersize": 7, "linestyle": "none", "zorder": 5}
    axes.plot([size for size, _ in timed], speeds, label="measured", **style)
    grid = _grid(plan)
    if plan.time is not None:
        t0, c = plan.time.line.intercept, plan.time.line.slope
        curve = [plan.time.samples_per_second(size) for size in grid]
        axes.plot(grid, [y if y < math.inf else math.nan for y in curve], label="fitted curve", color=BLACK)
        if c > 0:
            near = 1 / c <= FAR * top
            top = max(top, 1 / c) if near else top
            draw_level(axes, 1 / c, f"tends to {digits(1 / c)} samples/s", near=near, color=GREEN, linestyle="--")
            if t0 > 0:
                share = THROUGHPUT_SHARE
                label = f"{share:.0%} of that, from {math.ceil(share / (1 - share) * t0 / c):,}"
                draw_level(axes, share / c, label, near=near, color=ORANGE, linestyle=":", linewidth=2.2)
    axes.set_ylim(0, 1.08 * top)
    _set_size_axis(axes, grid, plan)
    return finished(figure, axes)


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG (1,280 x 960 pixels) or SVG, by the ending of the path.

    Args:
        figure: one of this module.
        path: of the file; its directory is made when it does not exist.

    Raises:
        ValueError: for another ending.
        OSError: when it cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"path must end in .png or .svg, got {str(path)!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # without the date the same figure gives the same SVG header; in a PNG there is none
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    figure.savefig(path, dpi=200, metadata=metadata)


def _draw_reserved_and_phases(axes: Axes, levels: Levels, placed: Sequence[tuple[float, Row]], width: int) -> None:
    x = [step for step, _ in placed[::width]]
    reserved = thinned([row.peak_reserved_bytes for _, row in placed], width)
    if any(count is not None for count in reserved):
        draw_line(axes, x, levels.scaled(reserved), label="reserved", color=GREY, linestyle="--", linewidth=1.5)
    for phase in PHASES:
        of_phase = thinned([row.phase_peak_bytes.get(phase) for _, row in placed], width)
        if any(count is not None for count in of_phase):
            colour, _, _, line_width = _PHASE_STYLES[phase]
            style: dict[str, Any] = {"color": colour, "linewidth": line_width}
            draw_line(axes, x, levels.scaled(of_phase), label=phase.replace("_", " "), **style)


def _steps_per_row(placed: Sequence[tuple[float, Row]]) -> int:
    """How many steps a row stands for: the usual distance to the next one (a resumed run goes back in between)."""
    distances = [after.step - before.step for (_, before), (_, after) in pairwise(placed) if after.step > before.step]
    return round(statistics.median_low(distances)) if distances else 1


def _set_size_axis(axes: Axes, grid: Sequence[float], plan: Plan) -> None:
    """The chosen size, and an axis of sizes that is logarithmic where they span much."""
    from matplotlib.ticker import LogLocator, NullLocator

    style: dict[str, Any] = {"color": PURPLE, "linestyle": "-.", "linewidth": 1.8, "zorder": 1}
    axes.axvline(plan.batch_size, label=f"chosen: {plan.batch_size:,}", **style)
    set_whole_numbers(axes)
    if grid[-1] / grid[0] > _WIDE:
        numbers = axes.xaxis.get_major_formatter()
        axes.set_xscale("log")
        subs = (1.0, 2.0, 5.0) if grid[-1] / grid[0] < 3e3 else (1.0,)
        axes.xaxis.set_major_locator(LogLocator(subs=subs))
        axes.xaxis.set_major_formatter(numbers)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(grid[0] / 1.2, grid[-1] * 1.05)
    else:
        axes.set_xlim(0, grid[-1] * 1.02)


def _grid(plan: Plan) -> list[float]:
    """Sizes to draw curves at, from the smallest run to a tenth beyond the largest; bends lie anywhere between."""
    sizes = [trial.batch_size for trial in plan.trials] + [plan.batch_size]
    first, last = min(sizes), 1.1 * max(sizes)
    between = (first * (last / first) ** (step / 200) for step in range(1, 200))
    return [float(first), *between, last]


def _trials(plan: Plan) -> tuple[list[Any], list[Any]]:
    """The trials that ran through, and those that ran out of memory."""
    done = [trial for trial in plan.trials if trial.outcome == "ok" and trial.phase_peak_bytes]
    if not done:
        raise NothingToDrawError("plan must hold at least one size that was run, got none")
    return done, [trial for trial in plan.trials if trial.outcome == "out_of_memory"]


def _by_stage(rows: Sequence[Row]) -> dict[str, list[tuple[float, Row]]]:
    """Stage -> its rows and where they stand: an evaluation, whose batches count anew, at the training step before."""
    stages: dict[str, list[tuple[float, Row]]] = {}
    step = None
    for row in rows:
        if row.stage == "train":
            step = row.step
        place = row.step if step is None else step
        stages.setdefault(row.stage, []).append((place, row))
    return stages
