"""The table of a run of the MemoryProfiler, which rich prints as plain text without a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from lightning_batchmem.measure.breakdown import MemoryBreakdown
from lightning_batchmem.measure.recorder import OutOfMemoryReport
from lightning_batchmem.plan.records import MIB
from lightning_batchmem.plan.records import mib as with_unit
from lightning_batchmem.report.summary import Summary

_PARTS = (
    ("parameters and buffers", "parameters_bytes"),
    ("gradients", "gradients_bytes"),
    ("optimizer state", "optimizer_state_bytes"),
    ("activations and temporaries", "activations_bytes"),
    ("batch data", "batch_bytes"),
    ("other", "other_bytes"),
)
_OTHER = {"host": "other (interpreter, libraries)", "cuda": "other (workspaces, kept tensors)"}
_STAGES = {"train": "training", "validate": "validation", "test": "test", "predict": "prediction"}


def mib(count_bytes: int) -> str:
    """Format bytes as MiB with one decimal, e.g. ``"1,536.0"``."""
    return f"{count_bytes / MIB:,.1f}"


def show_summary(summary: Summary, console: Console) -> None:
    """Print the table of a run, and its other numbers below it."""
    if summary.peak_bytes is not None:
        console.print(summary_table(summary))
    console.print("\n".join(_caption(summary)), highlight=False, markup=False, soft_wrap=True)


def summary_table(summary: Summary) -> Table:
    """Return the memory breakdown of a run at its highest peak, in MiB and per cent."""
    table = Table(title=f"Memory of a {_STAGES[summary.stage]} step ({summary.device})", title_justify="left")
    table.add_column("part")
    for heading in ("MiB", "of the peak"):
        table.add_column(heading, justify="right")
    breakdown = summary.breakdown
    peak_bytes = (summary.peak_bytes or 0) if breakdown is None else breakdown.peak_bytes
    if breakdown is not None:
        for name, attribute in _PARTS:
            count_bytes = getattr(breakdown, attribute)
            label = _OTHER.get(summary.device, name) if attribute == "other_bytes" else name
            table.add_row(label, mib(count_bytes), f"{count_bytes / peak_bytes:.1%}" if peak_bytes else "")
        table.add_section()
    table.add_row("peak", mib(peak_bytes), "100.0%")
    for name, beyond_bytes in (
        ("predicted by the plan", summary.predicted_bytes),
        ("cached, unused", summary.cached_bytes),
        ("outside the allocator", summary.outside_bytes),
    ):
        if beyond_bytes is not None:
            table.add_row(name, mib(beyond_bytes), "")
    return table


def _caption(summary: Summary) -> list[str]:
    samples = "" if summary.batch_size is None else f" ({summary.batch_size:,} samples)"
    lines = []
    if summary.peak_bytes is not None:
        lines.append(f"Highest peak: {mib(summary.peak_bytes)} MiB at step {summary.peak_step}{samples}")
    if summary.peak_reserved_bytes is not None:
        lines.append(f"Reserved: {mib(summary.peak_reserved_bytes)} MiB")
    if summary.limit_bytes is not None:
        lines.append(f"Limit of this process: {mib(summary.limit_bytes)} MiB")
    lines.append(_speed(summary))
    if summary.data_wait_share is not None:
        lines.append(f"{summary.data_wait_share:.1%} of the time waiting for data")
    if peaks := summary.rank_peaks_bytes:
        highest = peaks.index(max(peaks))
        lines.append(
            f"Peaks of {len(peaks)} ranks: {mib(min(peaks))} to {mib(max(peaks))} MiB, highest on {highest};"
            f" {mib(sum(peaks))} MiB in all"
        )
    if (validation := summary.validation) is not None:
        peak = "" if validation.peak_bytes is None else f"highest peak {mib(validation.peak_bytes)} MiB, "
        lines.append(f"Validation: {peak}{_speed(validation)}")
    start = "the first step after an optimizer step" if summary.stage == "train" else "the second step"
    if summary.breakdown is None and summary.peak_bytes is not None:
        lines.append(f"No breakdown: the run ended before {start}.")
    elif summary.breakdown is not None and summary.breakdown.peak_bytes < (summary.peak_bytes or 0):
        lines.append(f"The highest peak came before {start}; the breakdown is that of the steps after it.")
    if summary.breakdown is not None and summary.breakdown.other_bytes < 0:
        lines.append('"Other" is negative: some tensors are not resident (swapped out, or mapped from a file).')
    return [*lines, *(f"Warning: {alert}" for alert in summary.alerts)]


def _speed(summary: Summary) -> str:
    text = f"{summary.steps:,} step{'' if summary.steps == 1 else 's'} of {1e3 * summary.step_seconds:,.1f} ms"
    if summary.samples_per_second is not None:
        text += f", {summary.samples_per_second:,.1f} samples/s"
    if summary.items_per_second is not None:
        text += f", {summary.items_per_second:,.1f} items/s"
    return text


def breakdown_text(breakdown: MemoryBreakdown) -> str:
    """Format a breakdown in one line, for an error message: ``"0.2 MiB parameters and buffers, ..."``."""
    return ", ".join(f"{mib(getattr(breakdown, attribute))} MiB {name}" for name, attribute in _PARTS)


def out_of_memory_text(report: OutOfMemoryReport) -> str:
    """Format the note that an out-of-memory error gets."""
    text = f"memory ran out {report.where}."
    if report.breakdown is not None and report.limit_bytes is not None:
        held = f"{with_unit(report.peak_bytes)} of {with_unit(report.limit_bytes)}"
        text += f" Until then it held up to {held}: {breakdown_text(report.breakdown)}."
    return text
