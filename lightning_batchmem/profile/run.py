"""What the hooks of a profiler call while nothing is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from rich.console import Console

from lightning_batchmem.devices.oom_snapshot import OomSnapshot
from lightning_batchmem.profile.summary import Summary, show_summary


class Run:
    """What the hooks of a profiler call before the first run and after the last one.

    It records nothing, and keeps the results of the last run. The class ``RecordedRun`` is a run.

    Args:
        summary: the summary of the last run; None if there was none.
        peak_bytes: the highest peak of the last run.
        is_table_due: whether the summary is to be printed.
    """

    def __init__(
        self,
        summary: Summary | None = None,
        peak_bytes: int | None = None,
        *,
        is_table_due: bool = False,
    ) -> None:
        self.summary = summary
        self.is_table_due = is_table_due
        # It records the allocator's events.
        self.snapshot: OomSnapshot | None = None
        self._peak_bytes = peak_bytes

    @property
    def epoch_peak_bytes(self) -> int | None:
        return None

    @property
    def run_peak_bytes(self) -> int | None:
        return self._peak_bytes

    def _record_nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    begin_epoch = begin_step = end_step = end_epoch = _record_nothing
    begin_validation = end_validation = _record_nothing
    # A recorded run replaces these by methods of its recorder.
    enter_phase: Callable[..., None] = _record_nothing
    end_time: Callable[..., None] = _record_nothing

    def notes(
        self, error: BaseException, trainer: Trainer, module: LightningModule
    ) -> Iterable[str]:
        """Return sentences about an error that ended the run."""
        return ()

    def finish(self, trainer: Trainer, *, is_complete: bool) -> Run:
        """End the run; the result records nothing and has the summary."""
        return self

    def show_table(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Print the summary once, if it is due."""
        if self.is_table_due and self.summary is not None and trainer.is_global_zero:
            bar = trainer.progress_bar_callback
            if bar is not None:
                # Lightning ends the progress bar last, and the bar of Rich would overwrite the
                # table.
                bar.teardown(trainer, module, stage)
            show_summary(self.summary, Console())
        self.is_table_due = False
