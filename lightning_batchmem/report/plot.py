"""The figures of a search and of a run.

Made without pyplot, so that no backend is chosen and no global state changes. matplotlib is an extra (``plot``), and is
imported when a figure is drawn. A figure is 640 x 480 pixels at its own 100 dots per inch; what has to be read beside
the data stands in a legend outside the axes, so that it covers nothing. Heights start at 0, so that they compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_batchmem.decide import THROUGHPUT_SHARE
from lightning_batchmem.parts import Parts
from lightning_batchmem.plan import Plan
from lightning_batchmem.records import MIB, PHASES
from lightning_batchmem.report.csv import Row
from lightning_batchmem.report.table import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIB = 1024 * MIB

# Source: Okabe and Ito 2008, "Color Universal Design", https://jfly.uni-koeln.de/color/ (without the yellow, which is
# too pale on white). Markers, dashes and the order of the legend say the same once more, for a print without colours.
_BLACK, _GREY, _ORANGE, _SKY = "#000000", "#7F7F7F", "#E69F00", "#56B4E9"
_GREEN, _BLUE, _VERMILLION, _PURPLE = "#009E73", "#0072B2", "#D55E00", "#CC79A7"

# phase -> colour, marker, size of the marker, width of the line. Phases often have the same peak on the host: what is
# drawn later is smaller and thinner, so that all of them stay visible.
_PHASE_STYLES = {
    "forward": (_BLUE, "^", 11.0, 3.6),
    "backward": (_ORANGE, "v", 8.5, 2.4),
    "optimizer_step": (_GREEN, "s", 5.5, 1.4),
    "evaluation": (_SKY, "D", 3.5, 0.7),
}
_STAGE_STYLES = {"validate": (_SKY, "D"), "test": (_PURPLE, "P"), "predict": (_GREEN, "X")}

# From the bottom of the pile: first what is the same at every size, then what grows with the batch.
_PILE = (
    ("the rest", "rest_bytes", _GREY),
    ("model (parameters, buffers)", "parameters_bytes", _BLUE),
    ("gradients", "gradients_bytes", _PURPLE),
    ("optimizer", "optimizer_state_bytes", _GREEN),
    ("batch", "batch_bytes", _SKY),
    ("activations, temporaries", "activations_bytes", _ORANGE),
)

_FAR = 3.0  # a level above so many times the data would press them to the floor: only the legend names it
_WIDE = 50.0  # batch sizes that span more than this factor get a logarithmic axis
_FEW_POINTS = 10  # of a line: so few are drawn as larger dots
_LEGEND_LETTERS = 72  # in a row of the legend: more is wider than the figure
_MOST_POINTS = 1000  # of a line: 640 pixels show no more, and an SVG would hold them all


def plot_memory_over_steps(rows: Sequence[Row], *, limit_bytes: int | None = None) -> Figure:
    """Draw the peak memory of every step and of its phases, the evaluations between them, and the limit.

    An evaluation stands at the training step that it followed. Beyond 1,000 steps a point is the highest of several.

    Args:
        rows: of ``memory_per_batch.csv``, as :func:`~lightning_batchmem.report.csv.read_rows` gives them.
        limit_bytes: what the process may hold; ``None``: what the rows say of it.

    Returns:
        The figure. What a row does not tell is a gap in its line.

    Raises:
        ValueError: when no row tells its memory.
        ImportError: without matplotlib.
    """
    known = [count for row in rows for count in (row.peak_bytes, row.peak_reserved_bytes) if count is not None]
    if not known:
        raise ValueError(f"rows must hold at least one step that tells its memory, got {len(rows)} that do not")
    stages = _by_stage(rows)
    placed_rows = [placed for of_stage in stages.values() for placed in of_stage]
    limits = [(step, row.limit_bytes) for step, row in placed_rows if row.limit_bytes is not None]
    if limit_bytes is not None:
        limits = [(0, limit_bytes)]
    levels = _Levels(max(known), [limit for _, limit in limits])
    width = math.ceil(max(map(len, stages.values())) / _MOST_POINTS)
    name, what = ("Peak memory", "peak") if rows[0].has_peak else ("Memory seen at the marks", "highest seen")
    figure, axes = _figure(
        f"{name} of each step" if width == 1 else f"{name}, the highest of every {width:,} steps",
        "step (batches since the start)",
        levels,
    )
    style: dict[str, Any]
    for stage, placed in stages.items():
        x = [step for step, _ in placed[::width]]
        peaks = _thinned([row.peak_bytes for _, row in placed], width)
        if stage != "train":
            colour, marker = _STAGE_STYLES.get(stage, (_GREY, "x"))
            style = {"color": colour, "marker": marker, "markersize": 6, "linestyle": "none", "zorder": 4}
            axes.plot(x, levels.scaled(peaks), label=f"{what}, {stage}", **style)
            continue
        reserved = _thinned([row.peak_reserved_bytes for _, row in placed], width)
        if any(count is not None for count in reserved):
            _line(axes, x, levels.scaled(reserved), label="reserved", color=_GREY, linestyle="--", linewidth=1.5)
        phases = [phase for phase in PHASES if any(phase in row.phase_peak_bytes for _, row in placed)]
        for phase in phases:
            colour, _, _, line_width = _PHASE_STYLES[phase]
            of_phase = _thinned([row.phase_peak_bytes.get(phase) for _, row in placed], width)
            style = {"color": colour, "linewidth": line_width, "label": phase.replace("_", " ")}
            _line(axes, x, levels.scaled(of_phase), **style)
        label = f"{what}, train" if len(stages) > 1 else f"{what} of the step"
        _line(axes, x, levels.scaled(peaks), label=label, color=_BLACK, linewidth=0.7)
    first, last = min(step for step, _ in placed_rows), max(step for step, _ in placed_rows)
    levels.draw_limit(axes, [*limits, (last, limits[-1][1])] if limits else [])
    _whole_numbers(axes)
    if last == first:
        axes.set_xlim(first - 1, last + 1)
    return _finished(figure, axes)


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
    levels = _Levels(max(shown), [plan.limit_bytes], need_limit=bool(failed))
    figure, axes = _figure("Memory of a step by batch size", "batch size (samples)", levels)
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
    style = {"color": _BLACK, "marker": "o", "markersize": 4.0, "linestyle": "none", "zorder": 5}
    label = "whole step (reserved)" if reserved else "whole step"
    axes.plot([trial.batch_size for trial in done], levels.scaled([t.held_bytes for t in done]), label=label, **style)
    if failed:
        style = {"color": _VERMILLION, "marker": "x", "markersize": 10, "markeredgewidth": 2.5, "linestyle": "none"}
        at_limit = levels.scaled([plan.limit_bytes] * len(failed))
        axes.plot([trial.batch_size for trial in failed], at_limit, label="out of memory", zorder=6, **style)
    if memory is not None:
        fitted = [size for size in grid if size >= memory.lines[memory.phase_at(size)].first_batch_size]
        expected = levels.scaled([memory.predict_bytes(size) for size in fitted])
        upper = levels.scaled([memory.upper_bytes(size) for size in fitted])
        axes.plot(fitted, expected, label="fitted line", color=_BLACK, linewidth=1.2)
        axes.fill_between(fitted, expected, upper, label="up to its upper bound", color=_GREY, alpha=0.3, linewidth=0)
    levels.draw_limit(axes, [(grid[0], plan.limit_bytes)])
    _size_axis(axes, grid, plan)
    return _finished(figure, axes)


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
        raise ValueError("plan must hold at least one trial with its time, got none")
    figure, axes = _figure("Throughput by batch size", "batch size (samples)", None)
    axes.set_ylabel("throughput (samples/s)", fontsize=11)
    speeds = [size / seconds for size, seconds in timed]
    top = max(speeds)
    style: dict[str, Any] = {"color": _BLUE, "marker": "o", "markersize": 7, "linestyle": "none", "zorder": 5}
    axes.plot([size for size, _ in timed], speeds, label="measured", **style)
    grid = _grid(plan)
    if plan.time is not None:
        t0, c = plan.time.line.intercept, plan.time.line.slope
        curve = [plan.time.samples_per_second(size) for size in grid]
        axes.plot(grid, [y if y < math.inf else math.nan for y in curve], label="fitted curve", color=_BLACK)
        if c > 0:
            near = 1 / c <= _FAR * top
            top = max(top, 1 / c) if near else top
            _level(axes, 1 / c, f"tends to {_digits(1 / c)} samples/s", near=near, color=_GREEN, linestyle="--")
            if t0 > 0:
                share = THROUGHPUT_SHARE
                label = f"{share:.0%} of that, from {math.ceil(share / (1 - share) * t0 / c):,}"
                _level(axes, share / c, label, near=near, color=_ORANGE, linestyle=":", linewidth=2.2)
    axes.set_ylim(0, 1.08 * top)
    _size_axis(axes, grid, plan)
    return _finished(figure, axes)


def plot_composition(parts: Parts | Summary) -> Figure:
    """Draw what the memory is made of at the peak of a step: ``total = model + activations + optimizer + batch``.

    Gradients have a part of their own, and so has the rest: what is none of these.

    Args:
        parts: the parts, or the summary of a run (then its limit is drawn too).

    Returns:
        The figure: a pile, and its parts in the same order with their size and share. A rest below 0 hangs below it.

    Raises:
        ValueError: for a summary without parts (the run was too short).
        ImportError: without matplotlib.
    """
    limits: list[tuple[float, int]] = []
    if isinstance(parts, Summary):
        if parts.parts is None:
            raise ValueError("parts must be known, got the summary of a run that ended before they were")
        limits, parts = [(0, parts.limit_bytes)], parts.parts
    total_bytes = parts.peak_bytes
    levels = _Levels(max(total_bytes, total_bytes - parts.rest_bytes), [limit for _, limit in limits])
    figure, axes = _figure(f"Memory of a step at its peak: {levels.text(total_bytes)}", "", levels)
    base_bytes = 0
    for name, attribute, colour in _PILE:
        count_bytes = getattr(parts, attribute)
        share = f", {count_bytes / total_bytes:.1%}" if total_bytes else ""
        height, bottom = levels.scaled([count_bytes, base_bytes])
        style: dict[str, Any] = {"color": colour, "edgecolor": "white", "linewidth": 0.5}
        axes.bar(0, height, 0.8, bottom, label=f"{name}\n{levels.text(count_bytes)}{share}", **style)
        base_bytes += max(0, count_bytes)  # only the rest, which comes first, can be below 0
    levels.draw_limit(axes, limits)
    lowest = min(0.0, 1.1 * levels.scaled([parts.rest_bytes])[0])
    axes.set(xlim=(-0.5, 0.5), xticks=[], ylim=(lowest, None))
    axes.grid(visible=False)
    handles, labels = axes.get_legend_handles_labels()
    piled = sorted(zip(handles, labels, strict=True), key=lambda entry: entry[1].startswith("limit"))
    ordered = [*piled[: len(_PILE)][::-1], *piled[len(_PILE) :]]
    figure.legend(*zip(*ordered, strict=True), loc="outside right center", fontsize=10, frameon=False, labelspacing=0.9)
    return figure


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


class _Levels:
    """The memory axis: its unit, how high it reaches, and whether the limits fit on it."""

    def __init__(self, highest_bytes: float, limits_bytes: Sequence[int], *, need_limit: bool = False) -> None:
        self._near = bool(limits_bytes) and (need_limit or min(limits_bytes) <= _FAR * highest_bytes)
        top_bytes = max(highest_bytes, min(limits_bytes)) if self._near else highest_bytes
        self.unit, self._unit_bytes = _unit(top_bytes)
        self.top = 1.08 * top_bytes / self._unit_bytes or 1.0

    def scaled(self, counts_bytes: Iterable[float | None]) -> list[float]:
        """In the unit of the axis; what is missing becomes a gap."""
        return [math.nan if count is None else count / self._unit_bytes for count in counts_bytes]

    def text(self, count_bytes: float) -> str:
        """Bytes in the unit of the axis."""
        return f"{_digits(count_bytes / self._unit_bytes)} {self.unit}"

    def draw_limit(self, axes: Axes, limits: Sequence[tuple[float, int]]) -> None:
        """A limit holds from the place where it was asked to the next."""
        if not limits:
            return
        unit, unit_bytes = _unit(limits[-1][1])
        label = f"limit {_digits(limits[-1][1] / unit_bytes)} {unit}"
        style: dict[str, Any] = {"color": _VERMILLION, "linewidth": 2.0}
        if not self._near:
            axes.plot([], [], label=f"{label} (above)", **style)
        elif len({limit for _, limit in limits}) == 1:
            axes.axhline(self.scaled([limits[-1][1]])[0], label=label, **style)
        else:
            ordered = sorted(limits, key=lambda limit: limit[0])
            y = self.scaled(limit for _, limit in ordered)
            axes.plot([x for x, _ in ordered], y, label=label, drawstyle="steps-post", **style)


def _figure(title: str, x_label: str, levels: _Levels | None) -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import StrMethodFormatter
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "lightning-batchmem[plot]"') from error
    figure = Figure(figsize=(6.4, 4.8), dpi=100, layout="constrained")
    figure.suptitle(title, x=0.02, ha="left", fontsize=13)
    axes = figure.subplots()
    axes.set_xlabel(x_label, fontsize=11)
    if levels is not None:
        axes.set_ylabel(f"memory ({levels.unit})", fontsize=11)
        axes.set_ylim(0, levels.top)
    axes.tick_params(labelsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=_GREY, alpha=0.25, linewidth=0.6)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    return figure, axes


def _finished(figure: Figure, axes: Axes) -> Figure:
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(3, _LEGEND_LETTERS // max(map(len, labels))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=10, frameon=False)
    return figure


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], **style: Any) -> None:
    """A line that is broken where a resumed run goes back; its points show alone between two gaps."""
    xs: list[float] = []
    ys: list[float] = []
    for place, value in zip(x, y, strict=True):
        if xs and place < xs[-1]:
            xs.append(math.nan)
            ys.append(math.nan)
        xs.append(place)
        ys.append(value)
    markersize = style["linewidth"] + (1.0 if len(x) > _FEW_POINTS else 5.0)
    axes.plot(xs, ys, **{"marker": ".", "markersize": markersize, **style})


def _level(axes: Axes, value: float, label: str, *, near: bool, **style: Any) -> None:
    if near:
        axes.axhline(value, label=label, **style)
    else:
        axes.plot([], [], label=f"{label} (above)", **style)


def _size_axis(axes: Axes, grid: Sequence[float], plan: Plan) -> None:
    """The chosen size, and an axis of sizes that is logarithmic where they span much."""
    from matplotlib.ticker import LogLocator, NullLocator

    style: dict[str, Any] = {"color": _PURPLE, "linestyle": "-.", "linewidth": 1.8, "zorder": 1}
    axes.axvline(plan.batch_size, label=f"chosen: {plan.batch_size:,}", **style)
    _whole_numbers(axes)
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


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


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
        raise ValueError("plan must hold at least one size that was run, got none")
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


def _thinned(counts: Sequence[int | None], width: int) -> list[int | None]:
    """The highest known of each ``width`` counts, ``None`` where none is known."""
    groups = (counts[start : start + width] for start in range(0, len(counts), width))
    return [max((count for count in group if count is not None), default=None) for group in groups]


def _unit(count_bytes: float) -> tuple[str, int]:
    return ("GiB", _GIB) if count_bytes >= 10 * _GIB else ("MiB", MIB)


def _digits(number: float) -> str:
    return f"{number:,.{0 if abs(number) >= 100 else 1}f}"
