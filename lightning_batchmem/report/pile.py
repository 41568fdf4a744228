"""The figure of what the memory is made of: a pile of parts, and beside it what arithmetic says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_batchmem.measure.breakdown import MemoryBreakdown
from lightning_batchmem.report.figure import (
    BLUE,
    FAR,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    Levels,
    NothingToDrawError,
    bytes_text,
    new_figure,
)
from lightning_batchmem.report.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From the bottom of the pile: first what is the same at every size, then what grows with the batch.
_PILE = (
    ("the rest", "other_bytes", GREY),
    ("model (parameters, buffers)", "parameters_bytes", BLUE),
    ("gradients", "gradients_bytes", PURPLE),
    ("optimizer", "optimizer_state_bytes", GREEN),
    ("batch", "batch_bytes", SKY),
    ("activations, temporaries", "activations_bytes", ORANGE),
)
_FORMULA = "total = model + gradients + optimizer + batch + activations + the rest"
_STEPS = {"train": "training", "validate": "validation", "test": "test", "predict": "prediction"}

_PALE, _WHITE = "#E8E8E8", "#FFFFFF"
_MEASURED = 0.0
_VISIBLE = 0.01  # of the axis: a lower bar would be all edge, and so low a second pile an empty place


def plot_composition(breakdown: MemoryBreakdown | Summary) -> Figure:
    """Draw what the memory is made of at the peak of a step: ``total = model + activations + optimizer + batch``.

    Gradients have a part of their own, and so has the rest: what is none of these. Beside the pile of a summary stands
    what arithmetic says of the parts that have a rule, on the same floor: the top of the measured rest. Where that is
    too low to be seen, the legend alone tells it. Hatched above the pile is what is no part of a step: memory that the
    allocator keeps unused, and what the device holds outside of it. The limit counts from what is outside, so the line
    is that much higher where this is drawn.

    Args:
        breakdown: the parts, or the summary of a run (then what it knows besides them is drawn too).

    Returns:
        The figure: the piles, and the parts in the same order with their size, share and estimate. A rest below 0
        hangs below the pile.

    Raises:
        ValueError: for a summary without parts (the run was too short).
        ImportError: without matplotlib.
    """
    if isinstance(breakdown, MemoryBreakdown):
        return _draw(breakdown, f"Memory of a step at its peak: {bytes_text(breakdown.peak_bytes)}")
    if breakdown.breakdown is None:
        raise NothingToDrawError("parts must be known, got the summary of a run that ended before they were")
    title = f"Memory of a {_STEPS[breakdown.stage]} step at its peak: {bytes_text(breakdown.breakdown.peak_bytes)}"
    return _draw(breakdown.breakdown, title, breakdown)


def _draw(breakdown: MemoryBreakdown, title: str, summary: Summary | None = None) -> Figure:
    extras = [] if summary is None else _extras(summary, breakdown.peak_bytes)
    drawn_extras_bytes = sum(count_bytes for _, count_bytes, _, drawn in extras if drawn)
    limits: list[tuple[float, int]] = []
    limit_label = ""
    if summary is not None and summary.limit_bytes is not None:
        limit_label = f"limit {bytes_text(summary.limit_bytes)}"
        limits = [(0, summary.limit_bytes)]
        if summary.outside_bytes is not None and extras[-1][3]:
            limits = [(0, summary.limit_bytes + summary.outside_bytes)]
            limit_label += "\non top of what is outside"
    highest_bytes = max(breakdown.peak_bytes, breakdown.peak_bytes - breakdown.other_bytes) + drawn_extras_bytes
    levels = Levels(highest_bytes, [limit for _, limit in limits])
    figure, axes = new_figure(title, "", levels)
    figure.supxlabel(_FORMULA, x=0.02, ha="left", fontsize=10)
    handles = _measured(axes, levels, breakdown)
    top_bytes = max(0, breakdown.other_bytes) + breakdown.peak_bytes - breakdown.other_bytes
    handles += _stacked(axes, levels, extras, top_bytes)
    lowest = min(0.0, 1.1 * levels.scaled([breakdown.other_bytes])[0])
    axes.set(xlim=(-0.5, 0.5), xticks=[], ylim=(lowest, None))
    axes.grid(visible=False)
    levels.draw_limit(axes, limits, label=limit_label)
    ordered = [*reversed(handles), *axes.lines[-1:]] if limits else handles[::-1]
    spacing = 0.9 if len(ordered) <= len(_PILE) + 1 else 0.5
    figure.legend(handles=ordered, loc="outside right center", fontsize=10, frameon=False, labelspacing=spacing)
    return figure


def _extras(summary: Summary, total_bytes: int) -> list[tuple[str, int, dict[str, Any], bool]]:
    """What is known of the memory above the pile: name, bytes, style, and whether it fits onto the axis."""
    found: list[tuple[str, int, dict[str, Any], bool]] = []
    drawn_bytes = total_bytes
    for name, count_bytes, face, hatch in (
        ("cached, unused", summary.cached_bytes, _PALE, "///"),
        ("outside the allocator", summary.outside_bytes, _WHITE, "..."),
    ):
        if count_bytes is not None:
            fits = drawn_bytes + count_bytes <= FAR * total_bytes
            drawn_bytes += count_bytes if fits else 0
            found.append((name, count_bytes, {"facecolor": face, "hatch": hatch, "edgecolor": GREY}, fits))
    return found


def _measured(axes: Axes, levels: Levels, breakdown: MemoryBreakdown) -> list[Any]:
    handles, base_bytes = [], 0
    for name, attribute, colour in _PILE:
        count_bytes = getattr(breakdown, attribute)
        label = f"{name}\n{bytes_text(count_bytes)}"
        if breakdown.peak_bytes:
            label += f", {_percent(count_bytes / breakdown.peak_bytes)}"
        handles.append(_bar(axes, levels, _MEASURED, 0.8, count_bytes, base_bytes, label=label, color=colour))
        base_bytes += max(0, count_bytes)  # only the rest, which comes first, can be below 0
    return handles


def _stacked(
    axes: Axes, levels: Levels, extras: Sequence[tuple[str, int, dict[str, Any], bool]], base_bytes: int
) -> list[Any]:
    from matplotlib.patches import Patch

    handles = []
    for name, count_bytes, style, drawn in extras:
        label = f"{name}\n{bytes_text(count_bytes)}"
        if drawn:
            handles.append(_bar(axes, levels, _MEASURED, 0.8, count_bytes, base_bytes, label=label, **style))
            base_bytes += count_bytes
        else:
            handles.append(Patch(label=f"{label} (above)", **style))
    return handles


def _bar(axes: Axes, levels: Levels, x: float, width: float, count_bytes: int, base_bytes: int, **style: Any) -> Any:
    height, bottom = levels.scaled([count_bytes, base_bytes])
    edge = 0.5 if abs(height) >= _VISIBLE * levels.top else 0.0
    return axes.bar(x, height, width, bottom, **{"edgecolor": "white", "linewidth": edge, **style})


def _percent(share: float) -> str:
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"
