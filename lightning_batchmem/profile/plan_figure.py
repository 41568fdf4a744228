"""The figure of a search: memory and throughput over the batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB
from lightning_batchmem.plan.throughput import measured_speeds
from lightning_batchmem.profile.figure_style import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    VERMILLION,
    draw_limit,
    new_panels,
    with_legend,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Without clipping, a point near size 0 is not cut off by the axis.
_POINTS: dict[str, Any] = {"marker": "o", "linestyle": "none", "markersize": 6, "clip_on": False}


def plot_search(plan: Plan) -> Figure | None:
    """Plot the memory of a step, and below it the throughput of a rank, over the batch size.

    Memory has the trials, the fitted line and the limit. Throughput has the sizes that were
    measured. Both have the chosen size and the fastest one. ``None`` if no size was measured.
    """
    if not any(trial.peak_bytes for trial in plan.trials if trial.outcome == "ok"):
        return None
    of_rank = " of each rank" if plan.ranks > 1 else ""
    title = f"Memory and throughput{of_rank}{plan.device and f' on {plan.device}'}"
    speeds = measured_speeds(plan.trials)
    y_labels = ["memory (MiB)", "throughput (samples/s)"]
    figure, panels = new_panels(title, "batch size (samples)", *y_labels[: 1 + bool(speeds)])
    last_size = 1.1 * max(plan.batch_size, *(trial.batch_size for trial in plan.trials))
    _draw_memory(panels[0], plan, last_size)
    if speeds:
        sizes = [speed.batch_size for speed in speeds]
        measured = [speed.samples_per_second for speed in speeds]
        connected = {**_POINTS, "linestyle": "solid"}
        panels[1].plot(sizes, measured, label="measured", color=BLACK, **connected)
        panels[1].set_ylim(0, 1.15 * max(measured))
    lines = {plan.batch_size: ("chosen", GREEN, "--")}
    if plan.fastest_batch_size is not None:
        lines.setdefault(plan.fastest_batch_size, ("fastest", PURPLE, "-."))
    for panel in panels:
        panel.set_xlim(0, last_size)
        for size, (name, color, style) in lines.items():
            # The first panel has the names of these lines for both.
            label = f"{name}: {size:,}" if panel is panels[0] else None
            panel.axvline(size, label=label, color=color, linestyle=style, linewidth=1.8)
    return with_legend(figure)


def _draw_memory(axes: Axes, plan: Plan, last_size: float) -> None:
    completed = [trial for trial in plan.trials if trial.outcome == "ok" and trial.peak_bytes]
    failed = [trial.batch_size for trial in plan.trials if trial.outcome != "ok"]
    limit = plan.limit_bytes / MIB
    if plan.memory is not None:
        # The line may bend, because it is the highest line of all phases.
        sizes = [last_size * percent / 100 for percent in range(101)]
        predicted = [plan.memory.predict_bytes(size) / MIB for size in sizes]
        axes.plot(sizes, predicted, label="fitted line", color=BLUE, linewidth=1.8)
    measured = [trial.batch_size for trial in completed]
    held = [trial.held_bytes / MIB for trial in completed]
    live = [trial.peak_bytes / MIB for trial in completed]
    if held != live:
        axes.plot(measured, live, label="live (tensors)", color=ORANGE, fillstyle="none", **_POINTS)
    axes.plot(measured, held, label="held", color=BLACK, **_POINTS)
    # Failed trials are drawn at the limit, because the peak of a trial that ran out of memory is
    # not known.
    if failed:
        limits = [limit] * len(failed)
        axes.plot(failed, limits, "X", label="did not fit", color=VERMILLION, markersize=11)
    draw_limit(axes, limit)
