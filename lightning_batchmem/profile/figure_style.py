"""Colors, axes and legend that all figures share."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def new_figure(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """Make an empty figure with these texts.

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
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=12)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.10g}")
    return figure, axes


def with_legend(figure: Figure) -> Figure:
    """Add a legend below the axes."""
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure
