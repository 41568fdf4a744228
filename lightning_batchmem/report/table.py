"""What a run of the profiler used: as data, and as a table that ``rich`` renders plain where there is no terminal."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from lightning_batchmem.parts import Parts
from lightning_batchmem.records import MIB

_PARTS = (
    ("parameters and buffers", "parameters_bytes"),
    ("gradients", "gradients_bytes"),
    ("optimizer state", "optimizer_state_bytes"),
    ("activations and temporaries", "activations_bytes"),
    ("batch data", "batch_bytes"),
    ("the rest", "rest_bytes"),
)
_REST = {"host": "the rest (interpreter, libraries)", "cuda": "the rest (workspaces, kept tensors)"}


@dataclass(frozen=True)
class Summary:
    """What a run of ``fit`` used, as data.

    Args:
        device: the kind of device, as its meter is named: ``"cuda"``, ``"host"`` or ``"mps"``.
        steps: training steps that were measured.
        peak_bytes: highest allocated bytes inside a step (host: resident set).
        peak_step: the step it was seen in, as in ``memory_per_batch.csv``.
        batch_size: samples of that step, on this rank; ``None`` when its batch did not tell.
        phase_peak_bytes: phase -> highest allocated bytes while it ran, over all steps.
        peak_reserved_bytes: highest reserved bytes; ``None`` where nothing is reserved.
        limit_bytes: what this process might hold when it was last asked.
        parts: what the memory is made of at the highest peak of the steady state, that is from the first step after
            an optimizer step on; ``None`` when the run ended before. Parameters, gradients, optimizer state, batch and
            rest are those of the first such step; what the peak held beyond them counts as activations.
        samples_per_second: samples of all ranks over wall time; ``None`` when no batch told its size.
        step_seconds: mean wall time of a step.
        data_wait_share: share of that spent waiting for the next batch, 0 to 1; ``None`` when it is not known.
        has_peak: ``False`` where the device has no peak counter, and the bytes are the highest seen at the marks.
    """

    device: str
    steps: int
    peak_bytes: int
    peak_step: int
    batch_size: int | None
    phase_peak_bytes: dict[str, int]
    peak_reserved_bytes: int | None
    limit_bytes: int
    parts: Parts | None
    samples_per_second: float | None
    step_seconds: float
    data_wait_share: float | None
    has_peak: bool = True


def mib(number: int) -> str:
    """Bytes as MiB with one decimal, e.g. ``"1,536.0"``."""
    return f"{number / MIB:,.1f}"


def summary_table(summary: Summary) -> Table:
    """What the memory of a run is made of, at its highest peak.

    Args:
        summary: ``MemoryProfiler.summary`` after ``fit``.

    Returns:
        Part, MiB and share of the peak; the run's other numbers stand below. For ``rich.print`` or a console.
    """
    table = Table(
        title=f"Memory of a training step ({summary.device})", caption=_caption(summary), title_justify="left"
    )
    table.caption_justify = "left"
    table.add_column("part")
    table.add_column("MiB", justify="right")
    table.add_column("of the peak", justify="right")
    parts = summary.parts
    peak_bytes = summary.peak_bytes if parts is None else parts.peak_bytes
    if parts is not None:
        for name, attribute in _PARTS:
            number = getattr(parts, attribute)
            label = _REST.get(summary.device, name) if attribute == "rest_bytes" else name
            table.add_row(label, mib(number), f"{number / peak_bytes:.1%}" if peak_bytes else "")
        table.add_section()
    table.add_row("peak" if summary.has_peak else "highest value seen", mib(peak_bytes), "100.0%")
    return table


def _caption(summary: Summary) -> str:
    samples = "" if summary.batch_size is None else f" ({summary.batch_size:,} samples)"
    lines = [f"Highest peak: {mib(summary.peak_bytes)} MiB at step {summary.peak_step}{samples}"]
    if summary.peak_reserved_bytes is not None:
        lines.append(f"Reserved: {mib(summary.peak_reserved_bytes)} MiB")
    lines.append(f"The device can give this process: {mib(summary.limit_bytes)} MiB")
    lines.append(f"{summary.steps:,} steps of {1e3 * summary.step_seconds:,.1f} ms")
    if summary.samples_per_second is not None:
        lines[-1] += f", {summary.samples_per_second:,.1f} samples/s"
    if summary.data_wait_share is not None:
        lines.append(f"{summary.data_wait_share:.1%} of the time waiting for data")
    if summary.parts is None:
        lines.append("Its parts are known from the first step after an optimizer step on: the run was too short.")
    elif summary.parts.peak_bytes < summary.peak_bytes:
        lines.append("The highest peak came before the first optimizer step was done; the parts are those after it.")
    if summary.parts is not None and summary.parts.rest_bytes < 0:
        lines.append("The rest is below 0: not all of the tensors are resident (swapped out, or mapped from a file).")
    if not summary.has_peak:
        lines.append("This device has no peak counter: inside a step it may have been more.")
    return "\n".join(lines)


def parts_text(parts: Parts) -> str:
    """The parts in one line, for an error message: ``"0.2 MiB parameters and buffers, ..."``."""
    return ", ".join(f"{mib(getattr(parts, attribute))} MiB {name}" for name, attribute in _PARTS)
