"""What the figures share: colours, the memory axis, thinning, the legend outside the axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lightning_batchmem.plan.records import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Source: Okabe and Ito 2008, "Color Universal Design", https://jfly.uni-koeln.de/color/ (without the yellow, which is
# too pale on white). Markers, dashes and the order of the legend say the same once more, for a print without colours.
BLACK, GREY, ORANGE, SKY = "#000000", "#7F7F7F", "#E69F00", "#56B4E9"
GREEN, BLUE, VERMILLION, PURPLE = "#009E73", "#0072B2", "#D55E00", "#CC79A7"

FAR = 3.0
"""A level above so many times the data would press them to the floor: only the legend names it."""

_GIB = 1024 * MIB
_FEW_POINTS = 10  # of a line: so few are drawn as larger dots
_LEGEND_LETTERS = 72  # in a row of the legend: more is wider than the figure


class NothingToDrawError(ValueError):
    """What was passed holds nothing that a figure could show."""


class Levels:
    """The memory axis: its unit, how high it reaches, and whether the limits fit on it."""

    def __init__(self, highest_bytes: float, limits_bytes: Sequence[int], *, need_limit: bool = False) -> None:
        self._near = bool(limits_bytes) and (need_limit or min(limits_bytes) <= FAR * highest_bytes)
        top_bytes = max(highest_bytes, min(limits_bytes)) if self._near else highest_bytes
        self.unit, self._unit_bytes = _unit(top_bytes)
        self.top = 1.08 * top_bytes / self._unit_bytes or 1.0

    def scaled(self, counts_bytes: Iterable[float | None]) -> list[float]:
        """In the unit of the axis; what is missing becomes a gap."""
        return [math.nan if count is None else count / self._unit_bytes for count in counts_bytes]

    def draw_limit(self, axes: Axes, limits: Sequence[tuple[float, int]], *, label: str = "") -> None:
        """A limit holds from the place where it was asked to the next; its label is the last one's size."""
        if not limits:
            return
        label = label or f"limit {bytes_text(limits[-1][1])}"
        style: dict[str, Any] = {"color": VERMILLION, "linewidth": 2.0}
        if not self._near:
            axes.plot([], [], label=f"{label} (above)", **style)
        elif len({limit for _, limit in limits}) == 1:
            axes.axhline(self.scaled([limits[-1][1]])[0], label=label, **style)
        else:
            ordered = sorted(limits, key=lambda limit: limit[0])
            y = self.scaled(limit for _, limit in ordered)
            axes.plot([x for x, _ in ordered], y, label=label, drawstyle="steps-post", **style)


def new_figure(title: str, x_label: str, levels: Levels | None) -> tuple[Figure, Axes]:
    """An empty figure with a title above its one pair of axes; ``levels`` where the upright one is of memory."""
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
    axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    return figure, axes


def finished(figure: Figure, axes: Axes) -> Figure:
    """The figure with its legend, in as many columns as fit below the axes."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(3, _LEGEND_LETTERS // max(map(len, labels))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=10, frameon=False)
    return figure


def draw_line(axes: Axes, x: Sequence[float], y: Sequence[float], **style: Any) -> None:
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


def draw_level(axes: Axes, value: float, label: str, *, near: bool, **style: Any) -> None:
    """A level line over the whole width; where it is not near the data, the legend alone names it."""
    if near:
        axes.axhline(value, label=label, **style)
    else:
        axes.plot([], [], label=f"{label} (above)", **style)


def set_whole_numbers(axes: Axes) -> None:
    """Let the axis below count steps or samples."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def thinned(counts: Sequence[int | None], width: int) -> list[int | None]:
    """The highest known of each ``width`` counts, ``None`` where none is known."""
    groups = (counts[start : start + width] for start in range(0, len(counts), width))
    return [max((count for count in group if count is not None), default=None) for group in groups]


def bytes_text(count_bytes: float) -> str:
    """Bytes in the unit that suits them: ``"1,536 MiB"``, ``"16.0 GiB"``, ``"2.9 KiB"``."""
    unit, unit_bytes = ("KiB", 1024) if 0 < abs(count_bytes) < 0.1 * MIB else _unit(count_bytes)
    return f"{digits(count_bytes / unit_bytes)} {unit}"


def digits(number: float) -> str:
    """A number with one decimal where it is below 100."""
    return f"{number:,.{0 if abs(number) >= 100 else 1}f}"


def _unit(count_bytes: float) -> tuple[str, int]:
    return ("GiB", _GIB) if count_bytes >= 10 * _GIB else ("MiB", MIB)
