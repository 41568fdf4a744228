"""MemoryProfiler: what fills the memory of every training step, and how fast the steps are."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from torch import Tensor

from lightning_batchmem._lightning.progress import is_rehearsal, logging_step, logs_at_all
from lightning_batchmem.meters import Meter, meter_for
from lightning_batchmem.report.table import Summary, summary_table
from lightning_batchmem.run_record import RunRecord


class MemoryProfiler(Callback):
    """Measures the peak memory of every training step, and says what it is made of.

    Every step becomes a row of ``memory_per_batch.csv`` in ``trainer.log_dir``. All loggers of the Trainer get, at its
    ``log_every_n_steps`` and once more at the end of ``fit``, the highest peaks, the mean times and the throughput
    since they last did. At the end a table shows what the memory is made of; :attr:`summary` has the same as data.

    Nothing waits for the device: on a GPU the wall time of a single step is that of its launch, the mean over many is
    that of the work. The time of a step runs from the end of the one before it, without evaluation and without what
    happens between epochs; the first step after a checkpoint begins when it gets its batch. The wait for data is what
    passes until the batch is there: moving it to the device and the other callbacks' work between two steps are part
    of it. Throughput counts this rank's samples times the number of ranks.

    Args:
        csv: whether to write ``memory_per_batch.csv`` (never under ``fast_dev_run``, nor into a remote ``log_dir``).

    Attributes:
        summary: what the last ``fit`` used; ``None`` before its end, and when it did no step. After an exception: what
            was measured until then. In a process that Lightning spawned it stays there.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> profiler = MemoryProfiler()
        >>> trainer = Trainer(callbacks=[profiler], logger=False)  # then: trainer.fit(module); profiler.summary
    """

    def __init__(self, *, csv: bool = True) -> None:
        self.summary: Summary | None = None
        self._csv_wanted = csv
        self._meter: Meter | None = None
        self._run: RunRecord | None = None
        self._table_due = False

    @property
    def epoch_peak_bytes(self) -> int | None:
        """Highest allocated bytes inside a training step of this epoch so far; ``None`` outside ``fit``.

        The profiler resets the device's peak counter in every step, so read this, or :attr:`run_peak_bytes`, in the
        place of ``torch.cuda.max_memory_allocated()``.
        """
        return None if self._run is None else self._run.epoch_peak_bytes

    @property
    def run_peak_bytes(self) -> int | None:
        """Highest allocated bytes inside a training step of this ``fit`` so far; after its end, of all of it."""
        if self._run is None:
            return None if self.summary is None else self.summary.peak_bytes
        return self._run.run_peak_bytes

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the meter of the device that is trained on."""
        if stage == "fit":
            self.summary, self._table_due = None, False
            self._meter = meter_for(trainer.strategy.root_device, quick=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the CSV, before hours are spent, and begin to watch."""
        if self._meter is None:
            return
        self._run = RunRecord(trainer, pl_module, self._meter)
        self._run.watch(trainer.optimizers)
        log_dir = trainer.log_dir  # broadcasts: every rank has to ask
        if self._csv_wanted and log_dir is not None and trainer.is_global_zero and not is_rehearsal(trainer):
            self._run.open_csv(log_dir, resume=trainer.global_step > 0)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out what happened between two epochs."""
        if self._run is not None:
            self._run.watch(trainer.optimizers)  # somebody may have configured them again
            self._run.clock.restart()
            self._run.epoch_peak_bytes = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a step."""
        if self._run is not None:
            self._run.start(pl_module, batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Forward has ended."""
        if self._run is not None:
            self._run.marks.enter("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Backward has ended; unscaling, clipping and the optimizer follow."""
        if self._run is not None:
            self._run.marks.enter("optimizer_step")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step: its row, and what the loggers get."""
        if self._run is not None:
            self._run.stop(trainer, batch)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock: evaluation is not training."""
        if self._run is not None:
            self._run.clock.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the clock run on."""
        if self._run is not None:
            self._run.end_evaluation()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Writing what follows takes time that is no wait for data; nobody tells when it ends."""
        if self._run is not None:
            self._run.clock.forget_wait()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what was not logged yet, close the CSV, and make the summary."""
        if self._run is not None and logs_at_all(trainer):
            # Lightning logs the values of an epoch's end at the step before the next one too
            self._run.log(trainer, max(0, logging_step(trainer) - 1))
        self._table_due = self._run is not None
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep what was measured, and leave nothing behind on the optimizers."""
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the table, once the progress bars are gone."""
        self._end()
        if self._table_due and self.summary is not None and trainer.is_global_zero:
            Console().print(summary_table(self.summary))
        self._table_due = False

    def _end(self) -> None:
        if self._run is not None:
            self.summary = self._run.close()
            self._run = None
