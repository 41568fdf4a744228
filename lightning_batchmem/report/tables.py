"""What a run of the profiler used, as a table that ``rich`` renders plain where there is no terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from lightning_batchmem.measure.breakdown import MemoryBreakdown
from lightning_batchmem.plan.records import MIB
from lightning_batchmem.report.summary import Summary

_PARTS = (
    ("parameters and buffers", "parameters_bytes"),
    ("gradients", "gradients_bytes"),
    ("optimizer state", "optimizer_state_bytes"),
    ("activations and temporaries", "activations_bytes"),
    ("batch data", "batch_bytes"),
    ("the rest", "other_bytes"),
)
_REST = {"host": "the rest (interpreter, libraries)", "cuda": "the rest (workspaces, kept tensors)"}
_STEP = {"train": "training", "validate": "validation", "test": "test", "predict": "prediction"}


def mib(number: int) -> str:
    """Bytes as MiB with one decimal, e.g. ``"1,536.0"``."""
    return f"{number / MIB:,.1f}"


def show_summary(summary: Summary, console: Console) -> None:
    """Print what a run used: the table, and the run's other numbers below it.

    Args:
        summary: ``MemoryProfiler.summary`` after ``fit``, ``validate``, ``test`` or ``predict``.
        console: where to.
    """
    console.print(summary_table(summary))
    console.print(_caption(summary), highlight=False, markup=False, soft_wrap=True)


def summary_table(summary: Summary) -> Table:
    """What the memory of a run is made of, at its highest peak.

    Args:
        summary: ``MemoryProfiler.summary`` after ``fit``, ``validate``, ``test`` or ``predict``.

    Returns:
        Part, MiB, share of the peak, and what arithmetic says of the part; what the device holds beyond the peak stands
        below. For ``rich.print`` or a console.
    """
    table = Table(title=f"Memory of a {_STEP[summary.stage]} step ({summary.device})", title_justify="left")
    table.add_column("part")
    for heading in ("MiB", "of the peak", "estimate"):
        table.add_column(heading, justify="right")
    breakdown = summary.breakdown
    peak_bytes = summary.peak_bytes if breakdown is None else breakdown.peak_bytes
    if breakdown is not None:
        for name, attribute in _PARTS:
            number = getattr(breakdown, attribute)
            label = _REST.get(summary.device, name) if attribute == "other_bytes" else name
            estimate = getattr(summary.estimate, attribute, None)
            share = f"{number / peak_bytes:.1%}" if peak_bytes else ""
            table.add_row(label, mib(number), share, "" if estimate is None else mib(estimate))
        table.add_section()
    predicted = "" if summary.predicted_bytes is None else mib(summary.predicted_bytes)
    table.add_row("peak" if summary.has_peak else "highest value seen", mib(peak_bytes), "100.0%", predicted)
    beyond = (("cached, unused", summary.cached_bytes), ("outside the allocator", summary.outside_bytes))
    for name, count_bytes in beyond:
        if count_bytes is not None:
            table.add_row(name, mib(count_bytes), "", "")
    return table


def _caption(summary: Summary) -> str:
    samples = "" if summary.batch_size is None else f" ({summary.batch_size:,} samples)"
    seen = "Highest peak" if summary.has_peak else "Highest value seen"
    lines = [f"{seen}: {mib(summary.peak_bytes)} MiB at step {summary.peak_step}{samples}"]
    if summary.peak_reserved_bytes is not None:
        lines.append(f"Reserved: {mib(summary.peak_reserved_bytes)} MiB")
    lines.append(f"This process may hold: {mib(summary.limit_bytes)} MiB")
    lines.append(_speed(summary))
    if summary.data_wait_share is not None:
        lines.append(f"{summary.data_wait_share:.1%} of the time waiting for data")
    if peaks := summary.rank_peaks_bytes:
        highest = peaks.index(max(peaks))
        lines.append(f"Peaks of {len(peaks)} ranks: {mib(min(peaks))} to {mib(max(peaks))} MiB, highest on {highest}")
        lines[-1] += f"; {mib(sum(peaks))} MiB in all"
    if (validation := summary.validation) is not None:
        lines.append(f"Validation: highest peak {mib(validation.peak_bytes)} MiB, {_speed(validation)}")
    if summary.breakdown is None:
        lines.append(f"Its parts are known from {_known_from(summary.stage)} on: the run was too short.")
    elif summary.breakdown.peak_bytes < summary.peak_bytes:
        lines.append(f"The highest peak came before {_known_from(summary.stage)}; the parts are those after it.")
    if summary.breakdown is not None and summary.breakdown.other_bytes < 0:
        lines.append("The rest is below 0: not all of the tensors are resident (swapped out, or mapped from a file).")
    if not summary.has_peak:
        lines.append("No peak could be read here, only values at some moments: inside a step it may have been more.")
    return "\n".join([*lines, *(f"Warned: {alarm}" for alarm in summary.alerts)])


def _speed(summary: Summary) -> str:
    text = f"{summary.steps:,} step{'' if summary.steps == 1 else 's'} of {1e3 * summary.step_seconds:,.1f} ms"
    if summary.samples_per_second is not None:
        text += f", {summary.samples_per_second:,.1f} samples/s"
    if summary.items_per_second is not None:
        text += f", {summary.items_per_second:,.1f} items/s"
    return text


def _known_from(stage: str) -> str:
    return "the first step after an optimizer step" if stage == "train" else "the second step"


def breakdown_text(breakdown: MemoryBreakdown) -> str:
    """The parts in one line, for an error message: ``"0.2 MiB parameters and buffers, ..."``."""
    return ", ".join(f"{mib(getattr(breakdown, attribute))} MiB {name}" for name, attribute in _PARTS)
