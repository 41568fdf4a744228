"""A plan, rows and a summary to draw, and readers of a figure's lines and legend."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_batchmem.measure.breakdown import MemoryBreakdown
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, PHASES, Line, MemoryModel, TimeModel, Trial
from lightning_batchmem.report.step_csv import Row
from lightning_batchmem.report.tables import Summary


def trial(size: int, *phases: int, seconds: float | None = None, reserved: int | None = None) -> Trial:
    peaks = dict(zip(PHASES, (count * MIB for count in phases), strict=False))
    return Trial(size, "ok", peaks, peak_held_bytes=reserved, step_seconds=seconds)


PLAN = Plan(
    batch_size=32,
    limited_by="memory",
    verified=True,
    limit_bytes=200 * MIB,
    predicted_peak_bytes=164 * MIB,
    measured_peak_bytes=165 * MIB,
    trials=(
        trial(2, 104, 103, seconds=0.012),
        trial(4, 108, 107, seconds=0.014),
        trial(32, 165, 160, seconds=0.040),
        Trial(48, "out_of_memory", {"forward": 90 * MIB}),
    ),
    memory=MemoryModel({"forward": Line(100 * MIB, 2 * MIB, 2, 32)}),
    time=TimeModel(Line(0.010, 0.001, 2, 32)),
    device="host",
)


def row(step: int, peak: int | None = 100, *, stage: str = "train", limit: int | None = None, **other: object) -> Row:
    phases = {} if peak is None else {"forward": peak * MIB, "backward": (peak - 10) * MIB}
    peak_bytes, limit_bytes = (None if count is None else count * MIB for count in (peak, limit))
    return Row(step, stage, peak_bytes, None, limit_bytes, phases)._replace(**other)  # type: ignore[arg-type]


BREAKDOWN = MemoryBreakdown(100 * MIB, 90 * MIB, 200 * MIB, 50 * MIB, 1500 * MIB, 60 * MIB)
SUMMARY = Summary("host", 9, 2000 * MIB, 3, 64, {}, None, 4096 * MIB, BREAKDOWN, 10.0, 0.1, 0.2)


def axes_of(figure: Figure | None) -> Axes:
    assert figure is not None
    return figure.axes[0]


def line(figure: Figure | None, label: str) -> tuple[list[float], list[float]]:
    """Coordinates of the one line with this label."""
    (found,) = [line for line in axes_of(figure).lines if line.get_label() == label]
    return [float(x) for x in found.get_xdata()], [float(y) for y in found.get_ydata()]


def labels(figure: Figure | None) -> list[str]:
    return [text.get_text() for text in axes_of(figure).figure.legends[0].get_texts()]
