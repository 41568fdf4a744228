"""The figure of the modules that hold the most memory at the peak of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_batchmem.devices.module_memory import PeakByModule
from lightning_batchmem.plan.records import MIB, mib
from lightning_batchmem.profile.figure_style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    new_figure,
    with_legend,
)
from lightning_batchmem.profile.module_table import MAX_ROWS, module_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PARTS = (
    ("parameters", "parameters_bytes", BLUE),
    ("gradients", "gradients_bytes", PURPLE),
    ("optimizer state", "optimizer_state_bytes", GREEN),
    ("activations", "activations_bytes", ORANGE),
    ("temporary", "temporary_bytes", SKY),
    ("batch, other", "other_bytes", GREY),
)


def plot_modules(peak: PeakByModule) -> Figure:
    """Plot the memory of the largest modules as horizontal bars, the largest at the top."""
    title = f"Live memory by module: {mib(peak.peak_bytes)}"
    figure, axes = new_figure(title, "memory (MiB)", "")
    rows = module_rows(peak)[:MAX_ROWS]
    places = range(len(rows))
    left = [0.0] * len(rows)
    for name, field, color in _PARTS:
        widths = [sum(getattr(module, field) for module in row.modules) / MIB for row in rows]
        axes.barh(places, widths, 0.8, left, label=name, color=color, edgecolor="white")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(places, [row.label for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter("{x:,.10g}")
    return with_legend(figure)
