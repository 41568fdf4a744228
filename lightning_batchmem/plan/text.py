"""The text of a plan for a terminal."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_batchmem.plan.printing import shown, table_text
from lightning_batchmem.plan.records import Trial, mib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_batchmem.plan.plan import Plan

# In columns.
_WIDTH = 80
_HEADINGS = ("run", "fits", "size", "tensors MiB", "process MiB", "ms")
# Rows that the short text leaves out.
_DETAILS = ("speed", "tensors", "line", "sizes")
_KINDS = {"probe": "few steps"}
_OUTCOMES = {
    "ok": "yes",
    "out_of_memory": "OOM",
    "over_limit": "no",
    # Only if the allocator releases its cache and tries again.
    "allocator_retry": "retry",
}


def full_text(plan: Plan) -> str:
    """The plan with all reasons, all notes and every size that was run."""
    lines = [_wrapped(headline(plan)), *_lines(_rows(plan))]
    if plan.trials:
        headings = (*_HEADINGS, f"{plan.unit.items}/s")
        lines.append(table_text(headings, [_cells(plan, t) for t in plan.trials], left=2))
    return "\n".join(lines)


def short_text(plan: Plan) -> str:
    """The plan in a few rows, whose lines have at most 80 columns.

    It says what changes in the training, why the size is not larger, what it needs, and all notes
    but those about the search.
    """
    surprising = tuple(note for note in plan.notes if note.kind != "search")
    rows = [row for row in _rows(replace(plan, notes=surprising)) if row[0] not in _DETAILS]
    rows.append(("details", "print the plan, or set verbose=True"))
    return "\n".join([_wrapped(f"BatchFinder: {headline(plan)}"), *_lines(rows)])


def _lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    """A line for each row; one that is too long is continued below its text."""
    return [_wrapped(f"  {name:<10}{text}", indent=12) for name, text in rows]


def _wrapped(text: str, *, indent: int = 2) -> str:
    return textwrap.fill(
        shown(text), _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def headline(plan: Plan) -> str:
    """The size, what limits it, and whether it was rehearsed."""
    verified = "verified by a rehearsal" if plan.verified else "not verified"
    where = f" on each of {plan.ranks} ranks" if plan.ranks > 1 else ""
    if plan.simulated:
        where += f" on a {plan.device}"
        verified = "rehearsed on the simulated GPU" if is_rehearsed(plan) else "not rehearsed"
    return shown(
        f"{plan.unit.name} {plan.batch_size:,}{where}, limited by {plan.limited_by}, {verified}"
    )


def _rows(plan: Plan) -> list[tuple[str, str]]:
    rows = []
    if plan.training:
        rows.append(("training", plan.training))
    rows += [("note", note.text) for note in plan.notes if note.kind == "training"]
    if plan.chosen.why:
        rows.append(("why", plan.reason))
    rows.append(("memory", _memory(plan)))
    if plan.place:
        rows.append(("size", _place(plan.place)))
    rows += [("note", note.text) for note in plan.notes if note.kind != "training"]
    if plan.speeds:
        rows.append(("speed", _speeds(plan)))
    if plan.measured_peak_bytes is not None:
        text = mib(plan.measured_peak_bytes)
        if plan.predicted_peak_bytes is not None:
            text += f"; predicted from smaller sizes: {mib(plan.predicted_peak_bytes)}"
        rows.append(("tensors", text))
    if plan.memory is not None and plan.memory.lines:
        phase = plan.memory.phase_at(plan.batch_size)
        line = plan.memory.lines[phase]
        text = f"{mib(line.slope)} {plan.unit.one} ({phase.replace('_', ' ')})"
        # Where memory bends upward, the line through the largest sizes begins below 0.
        if line.intercept >= 0:
            text = f"{mib(line.intercept)} + {text}"
        rows.append(("line", text))
    if plan.trials:
        rows.append(("sizes", _known_sizes(plan)))
    return rows


def _place(place: str) -> str:
    """Where the size is set: an attribute, or a hook, which ends with the parentheses."""
    if place.endswith("()"):
        hook = place.removesuffix("()")
        return f"set on the loader of {hook}; write it into your code to keep it"
    return f"set as {place}"


def is_rehearsed(plan: Plan) -> bool:
    """Whether a rehearsal passed at the chosen size."""
    return plan.batch_size in _rehearsed_sizes(plan)


def _rehearsed_sizes(plan: Plan) -> set[int]:
    """The sizes at which a rehearsal passed."""
    return {t.batch_size for t in plan.trials if t.kind == "rehearsal" and t.outcome == "ok"}


def _known_sizes(plan: Plan) -> str:
    """The largest size that fits and the fastest size, and how each of them is known."""
    largest = plan.largest_batch_size or plan.batch_size
    verified = _rehearsed_sizes(plan)
    # What later steps keep may not fit, and a simulated GPU proves nothing.
    rehearsed = "verified" if plan.verified else "rehearsed"
    how_known = rehearsed if largest in verified else "predicted"
    if plan.chosen.state:
        how_known += f", {plan.chosen.state}"
    fastest = "" if plan.fastest_batch_size is None else f" · fastest {plan.fastest_batch_size:,}"
    return f"fits {largest:,} ({how_known}){fastest}"


def _speeds(plan: Plan) -> str:
    """The throughput at the size of the project and at the chosen size."""
    own, chosen = plan.speeds
    own_speed, speed = (plan.ranks * one.samples_per_s for one in (own, chosen))
    return (
        f"{own_speed:,.0f} {plan.unit.items}/s at {own.batch_size:,} (yours),"
        f" {speed:,.0f} at {chosen.batch_size:,}"
    )


def _memory(plan: Plan) -> str:
    """What the process took in the rehearsal, and the most that it may take."""
    most = f"at most {mib(plan.limit_bytes)}"
    if plan.held_peak_bytes is None:
        return most
    return f"{_number_of_mib(plan.held_peak_bytes)} of {most}"


def _number_of_mib(count_bytes: float) -> str:
    return mib(count_bytes).removesuffix(" MiB")


def _cells(plan: Plan, trial: Trial) -> tuple[str, ...]:
    """What was measured at one size."""
    readings = (trial.memory.peak_bytes or None, trial.memory.held_peak_bytes)
    memory = ["" if value is None else _number_of_mib(value) for value in readings]
    times = ["", ""]
    if trial.step_seconds:
        milliseconds = trial.step_seconds * 1e3
        decimals = 1 if milliseconds < 1000 else 0
        times[0] = f"{milliseconds:,.{decimals}f}"
    if trial.samples_per_s:
        times[1] = f"{plan.ranks * trial.samples_per_s:,.0f}"
    # Another version has other kinds and outcomes.
    kind = _KINDS.get(trial.kind, trial.kind)
    outcome = _OUTCOMES.get(trial.outcome, trial.outcome)
    return (kind, outcome, str(trial.batch_size), *memory, *times)
