"""Runs and plans to draw, and what tests ask of a figure: its lines, its legend, and that nothing overlaps."""

from __future__ import annotations

import itertools
import math

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightning_batchmem.measure.breakdown import MemoryBreakdown
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, PHASES, Line, MemoryModel, TimeModel, Trial
from lightning_batchmem.report.step_csv import Row
from lightning_batchmem.report.summary import Summary


def trial(size: int, *phases: int, seconds: float | None = None, reserved: int | None = None) -> Trial:
    peaks = dict(zip(PHASES, (count * MIB for count in phases), strict=False))
    return Trial(size, "ok", peaks, peak_reserved_bytes=reserved, step_seconds=seconds, measured_steps=5)


PLAN = Plan(
    batch_size=32,
    limited_by="memory",
    verified=True,
    limit_bytes=200 * MIB,
    predicted_peak_bytes=164 * MIB,
    upper_peak_bytes=170 * MIB,
    measured_peak_bytes=165 * MIB,
    trials=(
        trial(2, 104, 103, seconds=0.012),
        trial(4, 108, 107, seconds=0.014),
        trial(32, 165, 160, seconds=0.040),
        Trial(48, "out_of_memory", {"forward": 90 * MIB}),
    ),
    memory=MemoryModel({"forward": Line(100 * MIB, 2 * MIB, MIB, 2, 32)}),
    time=TimeModel(Line(0.010, 0.001, 0.0, 2, 32)),
)


def row(step: int, peak: int | None = 100, *, stage: str = "train", limit: int | None = None, **other: object) -> Row:
    phases = {} if peak is None else {"forward": peak * MIB, "backward": (peak - 10) * MIB}
    peak_bytes, limit_bytes = (None if count is None else count * MIB for count in (peak, limit))
    return Row(step, stage, 8, peak_bytes, None, limit_bytes, 80.0, 0.1, phases)._replace(**other)  # type: ignore[arg-type]


PARTS = MemoryBreakdown(100 * MIB, 90 * MIB, 200 * MIB, 50 * MIB, 1500 * MIB, 60 * MIB)
SUMMARY = Summary("host", 9, 2000 * MIB, 3, 64, {}, None, 4096 * MIB, PARTS, 10.0, 0.1, 0.2)


def line(figure: Figure, label: str) -> tuple[list[float], list[float]]:
    """Where the one line with this label is drawn; a gap is None."""
    (found,) = [line for line in figure.axes[0].lines if line.get_label() == label]
    return tuple(  # type: ignore[return-value]
        [None if math.isnan(float(value)) else round(float(value), 6) for value in values]
        for values in (found.get_xdata(), found.get_ydata())
    )


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def check_layout(figure: Figure) -> None:
    """No text lies on another, none beyond the edge, and the legend outside the axes."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert canvas.get_width_height() == (640, 480)
    axes, (legend,) = figure.axes[0], figure.legends
    shown = [
        figure._suptitle,
        figure._supxlabel or axes.xaxis.label,
        axes.xaxis.label,
        axes.yaxis.label,
        *legend.get_texts(),
    ]
    shown += [tick for tick in (*axes.get_xticklabels(), *axes.get_yticklabels()) if _inside(tick, axes)]
    boxes = {text.get_text(): text.get_window_extent() for text in shown if text.get_text()}
    boxes = {text: box for text, box in boxes.items() if box.width}
    assert len(boxes) > 5
    for text, box in boxes.items():
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= 641, text  # half a pixel is lost to rounding
        assert box.y1 <= 480, text
    for (one, box), (other, another) in itertools.combinations(boxes.items(), 2):
        assert not box.overlaps(another), (one, other)
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    assert min(text.get_fontsize() for text in shown) >= 10


def _inside(tick, axes):
    """Matplotlib makes labels beyond the limits of an axis as well, and does not show them."""
    (x, y), box = tick.get_position(), axes.viewLim
    horizontal = tick in axes.get_xticklabels()
    return box.x0 <= x <= box.x1 if horizontal else box.y0 <= y <= box.y1
