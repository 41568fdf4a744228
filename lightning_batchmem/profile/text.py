"""The text of a summary for a terminal: tables, and lines below them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from textwrap import TextWrapper
from typing import TYPE_CHECKING

import torch

from lightning_batchmem.devices.breakdown import PARTS
from lightning_batchmem.plan.printing import table_text
from lightning_batchmem.plan.records import MIB, counted, device_text, mib
from lightning_batchmem.profile.alerts import STAGES
from lightning_batchmem.profile.module_memory import ModuleMemory, PeakByModule

if TYPE_CHECKING:
    from lightning_batchmem.plan.plan import Plan
    from lightning_batchmem.profile.summary import RunMemory, RunSpeed, Summary

_MAX_ROWS = 10
# As wide as the text of a plan.
_WRAPPER = TextWrapper(width=80, subsequent_indent="  ", break_on_hyphens=False)
# A first step is worth a number of its own if it takes as long as this many later ones.
_LONG_FIRST = 2.0
# The number of a block that has submodules.
_BLOCK_NUMBER = re.compile(r"\b\d+\.")


def summary_text(summary: Summary) -> str:
    """Return what limits a run, its tables, and its other numbers below them."""
    if summary.steps == 1:
        # The parts of its peak are not known.
        return headline(summary)
    blocks = [_WRAPPER.fill(summary.conclusion)]
    if summary.memory.peak_bytes is not None:
        title = f"Memory of a {STAGES[summary.stage]} step ({device_text(summary.device)})"
        blocks.append(f"{title}\n{_memory_table(summary.memory)}")
    if summary.modules is not None and not summary.modules.why_not:
        title = "Memory by module at the peak of a step"
        blocks.append(f"{title}\n{module_table(summary.modules)}")
    blocks.append("\n".join(map(_WRAPPER.fill, _caption(summary))))
    return "\n\n".join(filter(None, blocks))


def headline(summary: Summary) -> str:
    """Return the stage, the peak and the speed of a run."""
    peak_bytes = summary.memory.peak_bytes
    peak = "" if peak_bytes is None else f"peak {mib(peak_bytes)}, "
    return f"{STAGES[summary.stage]}: {peak}{_speed(summary.steps, summary.speed)}"


def _memory_table(memory: RunMemory) -> str:
    """Return the memory breakdown of a run at its highest peak, in MiB and per cent."""
    breakdown = memory.breakdown
    peak_bytes = (memory.peak_bytes or 0) if breakdown is None else breakdown.peak_bytes
    # Only an allocator reserves memory; a resident set includes the program.
    is_resident_set = memory.peak_reserved_bytes is None
    rows = []
    if breakdown is not None:
        other = "interpreter, libraries" if is_resident_set else "workspaces, kept tensors"
        for name, attribute in PARTS:
            count_bytes = getattr(breakdown, attribute)
            label = f"{name} ({other})" if attribute == "other_bytes" else name
            if attribute == "activations_bytes" and is_resident_set:
                label = "activations, and freed memory that is kept"
            share = f"{count_bytes / peak_bytes:.1%}" if peak_bytes else ""
            rows.append((label, mib(count_bytes), share))
        if breakdown.kept_bytes:
            share = f"{breakdown.kept_bytes / peak_bytes:.1%}"
            rows.append((f"kept since step {breakdown.step}", mib(breakdown.kept_bytes), share))
    peak_name = "peak of the process" if is_resident_set else "peak of the tensors"
    rows.append((peak_name, mib(peak_bytes), "100.0%"))
    for name, beyond_bytes in (
        (str(memory.between_steps), memory.between_bytes or None),
        ("cached, unused", memory.cached_bytes),
        ("outside the allocator", None if breakdown is None else breakdown.outside_bytes),
    ):
        if beyond_bytes is not None:
            rows.append((name, mib(beyond_bytes), ""))
    return table_text(("part", "memory", "of the peak"), rows)


def module_rows(peak: PeakByModule) -> dict[str, list[ModuleMemory]]:
    """Return the modules of each row, the largest row first.

    Modules of one class share a row if they are in the same place of several blocks:
    ``layers.*.linear (Linear)`` has ``layers.0.linear``, ``layers.1.linear`` and so on.
    """
    parents = {module.name.rpartition(".")[0] for module in peak.modules}
    rows: dict[str, list[ModuleMemory]] = {}
    for module in peak.modules:
        path = f"{module.name}." if module.name in parents else module.name
        place = _BLOCK_NUMBER.sub("*.", path).removesuffix(".")
        label = f"{place} ({module.class_name})"
        if not module.name:
            label = f"{module.class_name}: the step outside its modules"
        rows.setdefault(label, []).append(module)
    return dict(sorted(rows.items(), key=lambda row: -_total_bytes(row[1])))


def module_table(peak: PeakByModule) -> str:
    """Return the largest rows, in MiB and per cent of the peak, and one for everything else.

    The last column has the activations of one sample.
    """
    peak_bytes = peak.peak_bytes or max(1, _total_bytes(peak.modules))
    rest_bytes = peak_bytes
    rows = []
    for label, modules in list(module_rows(peak).items())[:_MAX_ROWS]:
        row_bytes = _total_bytes(modules)
        rest_bytes -= row_bytes
        activations_bytes = sum(module.activations_bytes for module in modules)
        each = mib(activations_bytes / peak.batch_size) if peak.batch_size else ""
        share = f"{row_bytes / peak_bytes:.1%}"
        rows.append((label, mib(row_bytes), share, mib(activations_bytes), each))
    rows.append(("everything else", mib(rest_bytes), f"{rest_bytes / peak_bytes:.1%}", "", ""))
    rows.append(("all", mib(peak_bytes), "100.0%", "", ""))
    return table_text(("module", "memory", "peak", "activations", "a sample"), rows)


def _total_bytes(modules: Iterable[ModuleMemory]) -> int:
    return sum(module.total_bytes for module in modules)


def fits_text(plan: Plan, memory: RunMemory, device: str, precision: str) -> str:
    """Return a line that says which size fits in how much memory, rounded up, and where."""
    if not memory.held_bytes:
        return ""
    size = f"{plan.unit.name} {plan.batch_size:,}"
    ranks = f" on each of {plan.ranks} ranks" if plan.ranks > 1 else ""
    held = f"{math.ceil(memory.held_bytes / MIB):,} MiB"
    if memory.held_bytes >= 2**30:
        held = f"{math.ceil(10 * memory.held_bytes / 2**30) / 10:,.1f} GiB"
    place = f"{device_text(device)}, torch {torch.__version__.partition('+')[0]}, {precision}"
    return f"{size}{ranks} fits in {held} ({place})"


def _caption(summary: Summary) -> Iterator[str]:
    """Yield the lines below the tables."""
    memory = summary.memory
    speed = summary.speed
    if memory.peak_bytes is not None:
        text = f"Highest peak: {mib(memory.peak_bytes)} at step {memory.peak_step}"
        if memory.batch_size is not None:
            text += f" ({counted(memory.batch_size, 'sample')})"
        yield text
        breakdown = memory.breakdown
        if breakdown is not None and breakdown.phase:
            yield f"Peak of step {breakdown.step}: in {breakdown.phase}"
    if memory.peak_reserved_bytes is not None:
        yield f"Highest memory of the process: {mib(memory.peak_reserved_bytes)}"
    if memory.limit_bytes is not None:
        yield f"Limit of this process: {mib(memory.limit_bytes)}"
    yield _speed(summary.steps, speed)
    flops = summary.flops
    if flops is not None and flops.tflops_per_device is not None:
        share = "" if flops.mfu_pct is None else f" ({flops.mfu_pct:.1f}% of its peak)"
        yield (
            f"{flops.tflops_per_device:,.4g} TFLOP/s per device{share},"
            f" {flops.flops_per_sample:,.0f} FLOP per sample"
        )
    if speed.data_wait_pct is not None:
        yield f"{speed.data_wait_pct:.1f}% of the time waiting for data"
    if speed.gpu_utilization_pct is not None:
        # The driver counts the time in which any process runs a kernel.
        yield f"GPU: {speed.gpu_utilization_pct:.1f}% busy, of all processes on it"
    if speed.cpu_utilization_pct is not None:
        yield f"Cores of this process ({speed.cores:g}): {speed.cpu_utilization_pct:.1f}% busy"
    if peaks := memory.rank_peaks_bytes:
        yield (
            f"Peaks of {len(peaks)} ranks: {mib(min(peaks))} to {mib(max(peaks))},"
            f" highest on {peaks.index(max(peaks))}; {mib(sum(peaks))} in all"
        )
    if memory.validation_peak_bytes is not None:
        yield f"Highest peak of the validation: {mib(memory.validation_peak_bytes)}"
    yield from _breakdown_notes(summary)
    for measured in (summary.modules, flops):
        if measured is not None and measured.why_not:
            yield measured.why_not
    if summary.training:
        yield f"Training: {summary.training}"
    if summary.fits:
        yield summary.fits
    for alert in summary.alerts:
        yield f"Warning: {alert}"


def _breakdown_notes(summary: Summary) -> Iterator[str]:
    """Yield what the table does not show, and why."""
    memory = summary.memory
    breakdown = memory.breakdown
    if memory.graph_steps:
        yield (
            f"{memory.graph_steps:,} steps replayed CUDA graphs, whose memory counts as free in"
            " the allocator. Only that of the process includes it."
        )
    elif breakdown is None and memory.peak_bytes is not None:
        yield (
            f"No breakdown: the {STAGES[summary.stage]} had too few steps for it, or it could not"
            " be measured."
        )
    elif breakdown is not None and breakdown.peak_bytes < (memory.peak_bytes or 0):
        yield (
            "The highest peak came before the steady steps; the breakdown is that of the steps"
            " after it."
        )


def _speed(steps: int, speed: RunSpeed) -> str:
    text = f"{counted(steps, 'step')} of {speed.step_ms:,.1f} ms"
    first_ms = speed.first_step_ms or 0.0
    if first_ms > _LONG_FIRST * speed.step_ms:
        text += f" (the first: {first_ms:,.1f} ms)"
    if speed.samples_per_s is not None:
        text += f", {speed.samples_per_s:,.1f} samples/s"
    if speed.items_per_s is not None:
        text += f", {speed.items_per_s:,.1f} items/s"
    return text
