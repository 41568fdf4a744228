"""The summary of a run, and its table.

Without a terminal, rich prints plain text.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lightning_batchmem.devices.breakdown import PARTS, MemoryBreakdown
from lightning_batchmem.plan.json_fields import from_json, to_json
from lightning_batchmem.plan.records import counted, mib
from lightning_batchmem.profile.alerts import MAX_WAIT_SHARE
from lightning_batchmem.profile.module_memory import PeakByModule
from lightning_batchmem.profile.module_table import module_table

SUMMARY_NAME = "memory_summary.json"

# In columns; it is wider than the table.
_WIDTH = 100
# A device with this utilization hardly has anything to wait for.
_BUSY_PERCENT = 90.0
# A search stays below 0.95 of what a device can provide.
_MOSTLY_FULL_SHARE = 0.9
_STAGES = {"train": "training", "validate": "validation", "test": "test", "predict": "prediction"}


def summary_name(stage: str) -> str:
    """Return the file name of the summary of a training or an evaluation.

    The name for an evaluation is for example ``memory_summary_test.json``.
    """
    return SUMMARY_NAME if stage == "train" else SUMMARY_NAME.replace(".json", f"_{stage}.json")


@dataclass(frozen=True)
class Summary:
    """Memory and time of the steps of one stage in one call of a Trainer.

    The call is one of ``fit``, ``validate``, ``test`` and ``predict``.

    Args:
        device: ``"cuda"`` or ``"host"``; the device type if its memory cannot be measured.
        steps: number of steps.
        peak_bytes: highest allocated bytes in a step (host: resident set); None if memory cannot be
            measured.
        peak_step: the step of this peak, as in ``memory_per_batch.csv``.
        batch_size: samples of that step, on this rank; None if its batch does not show it.
        peak_reserved_bytes: highest reserved bytes; None if the device reserves none.
        limit_bytes: bytes that this process may hold, at the last reading: the limit of the device,
            or of a BatchFinder's plan.
        breakdown: parts of the memory at the highest peak of the steady state, which begins with
            the first step after an optimizer step (in an evaluation: with the second step); None if
            the run ended before.
        samples_per_second: samples of all ranks per second of wall time; None if no batch shows its
            size.
        step_seconds: mean time of a step.
        data_wait_share: share of wall time before the batch arrived, 0 to 1; None if unknown.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        items_per_second: items of all ranks per second, as ``items_fn`` counts them; None without
            it.
        outside_bytes: bytes on the device outside this process's allocator when the breakdown was
            taken: contexts, NCCL, other processes; None if unknown.
        alerts: the alerts of the run, in their order.
        rank_peaks_bytes: highest peak of each rank, in rank order; empty for one rank.
        modules: the bytes of each module at the peak of one steady step, with
            ``MemoryProfiler(modules=True)``; None without it, or if they could not be measured.
        no_modules_reason: why they could not be measured; empty if they were, or without
            ``modules=True``.
        busy_percent: mean utilization of the device in the steps, 0 to 100 (host: of the cores of
            this process); ``None`` if it cannot be read.
        cores: how many cores this process may use, for ``busy_percent`` of the host; ``None`` on a
            device.
        flops_per_sample: floating-point operations of a sample in forward and backward, with
            ``MemoryProfiler(flops=True)``; None without it, or if they could not be counted.
        tflops_per_device: 1e12 of these per second of wall time, on one device.
        mfu_pct: the same in per cent of the device's peak; None if the peak is unknown too.
        no_flops_reason: why one of these three is not known; empty if they are, or without
            ``flops=True``.
        validation_peak_bytes: highest allocated bytes in a step of the validations of a training;
            None without them.
        graph_steps: steps that replayed CUDA graphs. Their live peak is not known, so
            ``peak_bytes`` is that of the other steps.
    """

    device: str
    steps: int
    peak_bytes: int | None
    peak_step: int
    batch_size: int | None
    peak_reserved_bytes: int | None
    limit_bytes: int | None
    samples_per_second: float | None
    step_seconds: float
    data_wait_share: float | None
    stage: str = "train"
    items_per_second: float | None = None
    breakdown: MemoryBreakdown | None = None
    outside_bytes: int | None = None
    alerts: tuple[str, ...] = ()
    rank_peaks_bytes: tuple[int, ...] = ()
    modules: PeakByModule | None = None
    no_modules_reason: str = ""
    busy_percent: float | None = None
    cores: float | None = None
    flops_per_sample: float | None = None
    tflops_per_device: float | None = None
    mfu_pct: float | None = None
    no_flops_reason: str = ""
    graph_steps: int = 0
    validation_peak_bytes: int | None = None

    def __repr__(self) -> str:
        peak = "" if self.peak_bytes is None else f"peak {mib(self.peak_bytes)}, "
        return f"<Summary of {_STAGES[self.stage]}: {peak}{_speed(self)}>"

    def _repr_markdown_(self) -> str:
        """The table in a notebook, with its columns aligned."""
        text = io.StringIO()
        # In a notebook, rich would show the table at once.
        show_summary(self, Console(file=text, width=_WIDTH, force_jupyter=False))
        return f"```text\n{text.getvalue()}```"

    @property
    def cached_bytes(self) -> int | None:
        """Reserved bytes beyond the highest allocated bytes; None if the device reserves none."""
        if self.peak_reserved_bytes is None or self.peak_bytes is None:
            return None
        return max(0, self.peak_reserved_bytes - self.peak_bytes)

    @property
    def conclusion(self) -> str:
        """What limits the run, and what helps, in a line; empty where the numbers do not decide."""
        # A busy device works while the process waits for data, and more memory would not make it
        # faster.
        if self.busy_percent is not None and self.busy_percent >= _BUSY_PERCENT:
            return (
                f"Limited by compute: the device was {self.busy_percent:.0f}% busy."
                " A lower precision, torch.compile or a faster device helps."
            )
        if self.data_wait_share is not None and self.data_wait_share > MAX_WAIT_SHARE:
            return (
                f"Limited by data: {self.data_wait_share:.0%} of the time passed before the batch"
                " arrived. More loader workers (num_workers) or cheaper samples help."
            )
        held_bytes = self.peak_reserved_bytes or self.peak_bytes
        if held_bytes is None or self.limit_bytes is None:
            return ""
        if held_bytes < _MOSTLY_FULL_SHARE * self.limit_bytes:
            return ""
        return (
            f"Limited by memory: {held_bytes / self.limit_bytes:.0%} of the limit. A lower"
            " precision, activation checkpointing or sharding needs less memory."
        )

    def to_json(self) -> str:
        """Return the summary as JSON, for :meth:`from_json`."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Summary:
        """Read the JSON of :meth:`to_json`; unknown keys are ignored.

        Raises:
            ValueError: if ``text`` is not the JSON of a summary.
        """
        return from_json(cls, text)


def show_summary(summary: Summary, console: Console) -> None:
    """Print what limits a run, its table, and its other numbers below it."""
    if summary.conclusion:
        console.print(summary.conclusion, highlight=False, markup=False, soft_wrap=True)
    if summary.peak_bytes is not None:
        console.print(summary_table(summary))
    if summary.modules is not None:
        console.print(module_table(summary.modules))
    console.print("\n".join(_caption(summary)), highlight=False, markup=False, soft_wrap=True)


def summary_table(summary: Summary) -> Table:
    """Return the memory breakdown of a run at its highest peak, in MiB and per cent."""
    title = f"Memory of a {_STAGES[summary.stage]} step ({summary.device})"
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    for heading in ("memory", "of the peak"):
        table.add_column(heading, justify="right")
    breakdown = summary.breakdown
    peak_bytes = (summary.peak_bytes or 0) if breakdown is None else breakdown.peak_bytes
    # Only an allocator reserves memory; a resident set includes the program.
    is_resident_set = summary.peak_reserved_bytes is None
    peak_name = "peak, held by this process" if is_resident_set else "peak, live"
    if breakdown is not None:
        other = "interpreter, libraries" if is_resident_set else "workspaces, kept tensors"
        for name, attribute in PARTS:
            count_bytes = getattr(breakdown, attribute)
            label = f"{name} ({other})" if attribute == "other_bytes" else name
            if attribute == "activations_bytes" and is_resident_set:
                label = "activations, and freed memory that is kept"
            share = f"{count_bytes / peak_bytes:.1%}" if peak_bytes else ""
            table.add_row(label, mib(count_bytes), share)
        table.add_section()
    table.add_row(peak_name, mib(peak_bytes), "100.0%")
    for name, beyond_bytes in (
        ("cached, unused", summary.cached_bytes),
        ("outside the allocator", summary.outside_bytes),
    ):
        if beyond_bytes is not None:
            table.add_row(name, mib(beyond_bytes), "")
    return table


def _caption(summary: Summary) -> Iterator[str]:
    """Yield the lines below the table."""
    if summary.peak_bytes is not None:
        text = f"Highest peak: {mib(summary.peak_bytes)} at step {summary.peak_step}"
        if summary.batch_size is not None:
            text += f" ({counted(summary.batch_size, 'sample')})"
        yield text
    if summary.peak_reserved_bytes is not None:
        yield f"Reserved: {mib(summary.peak_reserved_bytes)}"
    if summary.limit_bytes is not None:
        yield f"Limit of this process: {mib(summary.limit_bytes)}"
    yield _speed(summary)
    if summary.tflops_per_device is not None and summary.flops_per_sample is not None:
        share = "" if summary.mfu_pct is None else f" ({summary.mfu_pct:.1f}% of its peak)"
        yield (
            f"{summary.tflops_per_device:,.4g} TFLOP/s per device{share},"
            f" {summary.flops_per_sample:,.0f} FLOP per sample"
        )
    if summary.data_wait_share is not None:
        yield f"{summary.data_wait_share:.1%} of the time waiting for data"
    if summary.busy_percent is not None:
        name = "Device"
        if summary.cores is not None:
            name = f"Cores of this process ({summary.cores:g})"
        yield f"{name}: {summary.busy_percent:.1f}% busy"
    if peaks := summary.rank_peaks_bytes:
        yield (
            f"Peaks of {len(peaks)} ranks: {mib(min(peaks))} to {mib(max(peaks))},"
            f" highest on {peaks.index(max(peaks))}; {mib(sum(peaks))} in all"
        )
    if summary.validation_peak_bytes is not None:
        yield f"Highest peak of the validation: {mib(summary.validation_peak_bytes)}"
    yield from _breakdown_notes(summary)
    yield from filter(None, (summary.no_modules_reason, summary.no_flops_reason))
    for alert in summary.alerts:
        yield f"Warning: {alert}"


def _breakdown_notes(summary: Summary) -> Iterator[str]:
    """Yield what the table does not show, and why."""
    breakdown = summary.breakdown
    start = "the first step after an optimizer step"
    if summary.stage != "train":
        start = "the second step"
    if summary.graph_steps:
        yield (
            f"{summary.graph_steps:,} steps replayed CUDA graphs, whose memory counts as free in"
            " the allocator. Only the reserved memory includes it."
        )
    elif breakdown is None and summary.peak_bytes is not None:
        yield f"No breakdown: {start} did not come, or could not be measured."
    elif breakdown is not None and breakdown.peak_bytes < (summary.peak_bytes or 0):
        yield f"The highest peak came before {start}; the breakdown is that of the steps after it."
    if breakdown is not None and breakdown.other_bytes < 0:
        yield (
            '"Other" is negative: some tensors are not resident (swapped out, or mapped from a'
            " file)."
        )


def _speed(summary: Summary) -> str:
    text = f"{counted(summary.steps, 'step')} of {1e3 * summary.step_seconds:,.1f} ms"
    if summary.samples_per_second is not None:
        text += f", {summary.samples_per_second:,.1f} samples/s"
    if summary.items_per_second is not None:
        text += f", {summary.items_per_second:,.1f} items/s"
    return text
