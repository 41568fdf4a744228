"""Colors, axes and legend that all figures share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Source: Okabe and Ito 2008, "Color Universal Design", https://jfly.uni-koeln.de/color/
BLACK = "#000000"
GREY = "#7F7F7F"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"


def new_panels(title: str, x_label: str, *y_labels: str) -> tuple[Figure, list[Axes]]:
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
    figure = Figure(figsize=(6.4, 4.8), dpi=100, layout="constrained")
    panels = list(figure.subplots(len(y_labels), sharex=True, squeeze=False)[:, 0])
    panels[0].set_title(title, loc="left", fontsize=12)
    panels[-1].set_xlabel(x_label)
    for axes, y_label in zip(panels, y_labels, strict=True):
        axes.set_ylabel(y_label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
        axes.locator_params(axis="x", integer=True)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.10g}")
    return figure, panels


def draw_limit(axes: Axes, limit: float | None) -> None:
    """Draw the limit, and begin the axis at 0.

    The axis ends above the limit, but at most at twice the data, so that they can be read.
    """
    _, data_top = axes.get_ylim()
    if limit is not None:
        axes.axhline(limit, label=f"limit {limit:,.1f} MiB", color=VERMILLION, linewidth=2)
    _, top = axes.get_ylim()
    axes.set_ylim(0, min(top, 2 * data_top))


def with_legend(figure: Figure) -> Figure:
    """Add a legend below the axes."""
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure
