"""A line with the size that a search runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, TextColumn

from lightning_batchmem.plan.fit import fit_memory
from lightning_batchmem.plan.options import Unit
from lightning_batchmem.plan.printing import StandardOutput, printable
from lightning_batchmem.plan.records import NextSize, Trial, counted, mib
from lightning_batchmem.plan.rules import runs_left

START_TEXT = "BatchFinder: searching for a batch size."
"""What is printed at the start of a search that is not shown on a terminal."""


class SearchProgress(Progress):
    """A line with the time, and the trial and the step that run; it ends with the number of trials.

    Without a terminal ``start_text``, a line for each size and this end are printed.

    Args:
        enabled: whether anything is shown.
        start_text: what is printed at the start, because a search may take minutes.
        console: where it is shown; ``None``: the standard output.
    """

    def __init__(
        self, *, enabled: bool, start_text: str = START_TEXT, console: Console | None = None
    ) -> None:
        self._start_text = start_text
        # What changes comes first, because a narrow terminal cuts off the end.
        text = "BatchFinder: {task.elapsed:.0f} s, {task.description}"
        # Where it is disabled, rich 13.7 still prints an empty line at the end.
        console = console or Console(
            # rich annotates its file as a text file, and needs only the methods that this one has.
            file=StandardOutput(),  # type: ignore[arg-type]
            quiet=not enabled,
            # A notebook gets the lines of a log file. There a live line needs ipywidgets, or leaves
            # escape codes in what is saved, because the kernel sets FORCE_COLOR.
            force_jupyter=False,
            force_terminal=False if "ipykernel" in sys.modules else None,
        )
        super().__init__(TextColumn(text, markup=False), console=console, disable=not enabled)
        self._task = self.add_task("reading samples", total=None)
        self._num_trials = 0
        self._num_steps = 0
        # The number of the run, with about how many there are, and what it runs.
        self._run = ""
        self._trial = ""

    def start(self) -> None:
        """Begin the line."""
        self._print(self._start_text)
        super().start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        """End the line. After an error it keeps the trial in which the error occurred."""
        if exc_type is None:
            self.update(self._task, description=counted(self._num_trials, "run"))
        super().__exit__(exc_type, exc_val, exc_tb)

    def begin_trial(self, probe: NextSize, trials: Sequence[Trial]) -> None:
        """Show the size that runs next, and the memory that the trials so far predict for it.

        Args:
            probe: the size and the kind of the trial.
            trials: everything that was run before.
        """
        self._num_trials += 1
        self._num_steps = 0
        about = self._num_trials + runs_left(probe, trials)
        self._run = f"run {self._num_trials} of about {about}"
        model = fit_memory(trials)
        predicted = ""
        rehearsal = "rehearsal of " * (probe.kind == "rehearsal")
        if model is not None:
            predicted = f", predicted {mib(model.predict_bytes(probe.batch_size))}"
        self._trial = f"{rehearsal}size {probe.batch_size:,}{predicted}"
        self._show()

    def begin_step(self) -> None:
        """Show that another step of the trial begins."""
        self._num_steps += 1
        self._show(f", step {self._num_steps}")

    def measured(self, trial: Trial, unit: Unit) -> None:
        """Show what a trial took, or why it failed, and keep that where there is no line."""
        measured = mib(trial.memory.peak_bytes or trial.memory.held_bytes)
        self._show(f", measured {measured}")
        rehearsal = ", rehearsal" * (trial.kind == "rehearsal")
        verb = "takes" if unit.budget_name else "take"
        result = f"{verb} {measured}" if trial.outcome == "ok" else printable(trial.failure)
        self._print(
            f"BatchFinder: {self.tasks[0].elapsed:.0f} s, {self._run}{rehearsal}:"
            f" {unit.size(trial.batch_size)} {result}"
        )

    def _show(self, now: str = "") -> None:
        self.update(self._task, description=f"{self._run}{now}, {self._trial}")

    def _print(self, text: str) -> None:
        """Print a text where no line is shown, such as in a log file and a notebook."""
        if not (self.disable or self.console.is_terminal):
            self.console.out(text, highlight=False)
