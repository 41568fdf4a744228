"""A line with the size that a search runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from lightning_batchmem.plan.fit import fit_memory
from lightning_batchmem.plan.records import NextSize, Trial, mib


class SearchProgress(Progress):
    """A line with the size that runs; without a terminal only its last state is printed."""

    def __init__(self, *, enabled: bool, console: Console | None = None) -> None:
        columns = (TextColumn("BatchFinder: {task.description}", markup=False), TimeElapsedColumn())
        super().__init__(*columns, console=console or Console(), disable=not enabled)
        self._task = self.add_task("reading samples", total=None)

    def trying(self, probe: NextSize, trials: Sequence[Trial]) -> None:
        """Show the size that runs next, and the memory that the trials so far predict for it."""
        model = fit_memory(trials)
        predicted = ""
        if model is not None:
            predicted = f", predicted {mib(model.predict_bytes(probe.batch_size))}"
        self.update(self._task, description=f"size {probe.batch_size}{predicted}")

    def measured(self, trial: Trial) -> None:
        shown = self.tasks[self._task].description
        description = f"{shown}, measured {mib(trial.peak_bytes or trial.held_bytes)}"
        self.update(self._task, description=description)
