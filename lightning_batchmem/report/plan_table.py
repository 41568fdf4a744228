"""What a person sees of a search: a line while it works, a table at the end."""

from __future__ import annotations

from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, PHASES, NextSize

_HEADINGS = {"optimizer_step": "step", "evaluation": "eval"}
"""Of the phases; with all of them the table just fits into 80 columns."""


class SearchProgress:
    """Says which size is being tried and why.

    Args:
        console: where to write.
        enabled: ``False`` on ranks other than 0, and for a run without a progress bar.
    """

    def __init__(self, console: Console, *, enabled: bool) -> None:
        self._status: Status | None = None
        if enabled:
            self._status = console.status("looking for the batch size")

    def __enter__(self) -> SearchProgress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def trying(self, probe: NextSize) -> None:
        """Show the size that runs next."""
        if self._status is not None:
            self._status.update(f"trying batch size {probe.batch_size}: {probe.reason}")


def plan_table(plan: Plan) -> Table:
    """The trials of a plan, a row each: peak of each phase, what the device held, what the final lines say, time.

    Args:
        plan: of a finished search.

    Returns:
        A table for ``rich.print`` or a console; all memory in MiB.
    """
    phases = [phase for phase in PHASES if any(phase in trial.phase_peak_bytes for trial in plan.trials)]
    title = "BatchFinder: the sizes that were run, peaks in MiB"
    if plan.ranks > 1:
        title = f"BatchFinder: the sizes on each of {plan.ranks} ranks, highest peaks in MiB, samples/s of all"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("size", *(_HEADINGS.get(phase, phase) for phase in phases), "peak", "line", "ms", "samples/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for trial in plan.trials:
        held = "no memory" if trial.outcome == "out_of_memory" else _mib(trial.held_bytes)
        line = "" if plan.memory is None else _mib(plan.memory.predict_bytes(trial.batch_size))
        times = ("", "")
        if trial.step_seconds:
            times = (f"{trial.step_seconds * 1e3:,.1f}", f"{plan.ranks * trial.batch_size / trial.step_seconds:,.0f}")
        peaks = (_mib(trial.phase_peak_bytes.get(phase)) for phase in phases)
        chosen = "bold" if trial.batch_size == plan.batch_size else None
        table.add_row(str(trial.batch_size), *peaks, held, line, *times, style=chosen)
    return table


def _mib(count_bytes: float | None) -> str:
    if count_bytes is None:
        return ""
    return f"{count_bytes / MIB:,.{1 if count_bytes < 10_000 * MIB else 0}f}"
