"""A line with the size that a search runs."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, TextColumn

from lightning_batchmem.plan.fit import fit_memory
from lightning_batchmem.plan.printing import StandardOutput
from lightning_batchmem.plan.records import NextSize, Trial, counted, mib

START_TEXT = "BatchFinder: searching for a batch size (usually 2 to 60 s)."
"""What is printed at the start of a search that is not shown on a terminal.

Source: 129 of the 130 searches of `python -m benchmarks.search` and `benchmarks.throughput`
"""


USUAL_RUNS = 5
"""Three probes of the ladder, and two rehearsals; a search on a CPU has up to five probes."""


def about_runs(number: int) -> str:
    """The number of a run, and about how many a search has, which are never fewer."""
    return f"run {number} of about {max(number, USUAL_RUNS)}"


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
        # rich annotates its file as a text file, and needs only the methods that this one has.
        console = console or Console(file=StandardOutput(), quiet=not enabled)  # type: ignore[arg-type]
        super().__init__(TextColumn(text, markup=False), console=console, disable=not enabled)
        self._task = self.add_task("reading samples", total=None)
        self._num_trials = 0
        self._num_steps = 0
        self._trial = ""

    def start(self) -> None:
        """Begin the line."""
        console = self.console
        if not (self.disable or console.is_terminal or console.is_jupyter):
            console.print(self._start_text, highlight=False, soft_wrap=True)
        super().start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        """End the line. After an error it keeps the trial in which the error occurred."""
        if exc_type is None:
            self._show(counted(self._num_trials, "run"))
        super().__exit__(exc_type, exc_val, exc_tb)

    def begin_trial(self, probe: NextSize, trials: Sequence[Trial]) -> None:
        """Show the size that runs next, and the memory that the trials so far predict for it.

        Args:
            probe: the size and the kind of the trial.
            trials: everything that was run before.
        """
        self._num_trials += 1
        self._num_steps = 0
        model = fit_memory(trials)
        predicted = ""
        rehearsal = "rehearsal of " * (probe.kind == "rehearsal")
        if model is not None:
            predicted = f", predicted {mib(model.predict_bytes(probe.batch_size))}"
        self._trial = f"{rehearsal}size {probe.batch_size:,}{predicted}"
        self._show(f"{about_runs(self._num_trials)}, {self._trial}")

    def begin_step(self) -> None:
        """Show that another step of the trial begins."""
        self._num_steps += 1
        self._show(f"{about_runs(self._num_trials)}, step {self._num_steps}, {self._trial}")

    def measured(self, trial: Trial) -> None:
        measured = mib(trial.peak_bytes or trial.held_bytes)
        self._show(f"{about_runs(self._num_trials)}, measured {measured}, {self._trial}")
        if not (self.disable or self.console.is_terminal or self.console.is_jupyter):
            seconds = self.tasks[0].elapsed or 0.0
            self.console.print(
                f"BatchFinder: {seconds:.0f} s, {about_runs(self._num_trials)}: {self._trial}"
                f" needs {measured}",
                highlight=False,
                soft_wrap=True,
                markup=False,
            )

    def _show(self, text: str) -> None:
        self.update(self._task, description=text)
