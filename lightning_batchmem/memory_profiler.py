"""MemoryProfiler: what fills the memory of every step, what the device waits for, and how close the edge is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from torch import Tensor

from lightning_batchmem._lightning.trainer_state import is_fast_dev_run, logging_step, logs_at_all
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.oom_snapshot import OomSnapshot
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.devices.select import device_memory_for
from lightning_batchmem.measure.recorder import StepRecorder
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.report.files import PLAN_NAME, check_writable, write_beside
from lightning_batchmem.report.step_csv import NAME
from lightning_batchmem.report.summary import Summary, summary_name
from lightning_batchmem.report.tables import show_summary


class MemoryProfiler(Callback):
    """Measures the peak memory of every step, and says what it is made of.

    Every step of training, validation, test and prediction becomes a row of ``memory_per_batch.csv`` in
    ``trainer.log_dir``. All loggers of the Trainer get, at its ``log_every_n_steps`` and once more at the end, the
    highest peaks, the mean times and the throughput since they last did; an evaluation is logged at its end, under
    names that begin with its stage (``validate/peak_allocated_mib``). At the end a table shows what the memory is made
    of, loggers that take images get figures (with the extra ``plot``), and :attr:`summary` has the same as data.

    What deserves attention is warned of once: a leak, a limit that is near, steps above the prediction of a
    BatchFinder's plan, an evaluation above training, allocator retries, a device that mostly waits for data. When
    memory runs out, the error says in a note at which step, and what the memory was made of.

    Nothing waits for the device: on a GPU the time of a step is read from events some steps later. It runs from the end
    of the step before, without evaluation and without what happens between epochs; the first step after a checkpoint
    begins when it gets its batch. The wait for data is what passes on the host until the batch is there: moving it to
    the device and the other callbacks' work between two steps are part of it. Throughput counts this rank's samples
    times the number of ranks; at the end of each epoch the ranks' own peaks and speeds are joined.

    Args:
        csv: whether to write ``memory_per_batch.csv``, and beside it ``memory_summary.json`` and the plan of a
            BatchFinder, from which ``python -m lightning_batchmem`` draws (never under ``fast_dev_run``, nor into a
            remote ``log_dir``).
        items_fn: counts in a batch what matters to you, for example tokens: ``lambda batch: batch["mask"].sum()``. It
            is called after every step; a tensor on a GPU would make every step wait for the device.
        snapshot: ``"on_oom"``: when a step runs out of memory on CUDA, write PyTorch's own memory snapshot into
            ``log_dir`` (for https://pytorch.org/memory_viz). Recording it costs time and host memory.
        progress_bar: whether the progress bar shows the run's peak and the limit, in GiB (they are in
            ``trainer.callback_metrics`` then, too).

    Attributes:
        summary: what the last run used; ``None`` before its end, and when it did no step. After an exception: what
            was measured until then. In a process that Lightning spawned it stays there.

    Raises:
        ValueError: when ``snapshot`` or ``items_fn`` is something else.
        OSError: at ``setup``, when ``log_dir`` cannot be written.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> profiler = MemoryProfiler()
        >>> trainer = Trainer(callbacks=[profiler], logger=False)  # then: trainer.fit(module); profiler.summary
    """

    def __init__(
        self,
        *,
        csv: bool = True,
        items_fn: Callable[[Any], float] | None = None,
        snapshot: Literal["on_oom"] | None = None,
        progress_bar: bool = False,
    ) -> None:
        if snapshot not in (None, "on_oom"):
            raise ValueError(f'snapshot must be "on_oom" or None, got {snapshot!r}')
        if items_fn is not None and not callable(items_fn):
            raise ValueError(f"items_fn must be a function of a batch, got {items_fn!r}")
        self.summary: Summary | None = None
        self._csv_wanted, self._items_fn, self._progress_bar = csv, items_fn, progress_bar
        self._snapshot_wanted = snapshot == "on_oom"
        self._snapshot: OomSnapshot | None = None
        self._device_memory: DeviceMemory | None = None
        self._log_dir: Path | None = None
        self._csv_path: Path | None = None
        self._run: StepRecorder | None = None
        self._run_peak_bytes: int | None = None
        self._table_due = False

    @property
    def epoch_peak_bytes(self) -> int | None:
        """Highest allocated bytes inside a step of this epoch so far, its validation included; ``None`` between runs.

        The profiler resets the device's peak counter in every step, so read this, or :attr:`run_peak_bytes`, in the
        place of ``torch.cuda.max_memory_allocated()``.
        """
        return None if self._run is None else self._run.report.epoch_peak_bytes

    @property
    def run_peak_bytes(self) -> int | None:
        """Highest allocated bytes inside a step of this run so far; after its end, of all of it."""
        return self._run_peak_bytes if self._run is None else self._run.report.run_peak_bytes

    def __getstate__(self) -> dict[str, Any]:
        """Without the run, which has files open: a loader that spawns workers may pickle the Trainer meanwhile."""
        return {**self.__dict__, "_run": None, "_snapshot": None}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the meter of the device, and make sure that the log directory can be written."""
        self.summary, self._run_peak_bytes, self._table_due = None, None, False
        self._device_memory = device_memory_for(trainer.strategy.root_device, quick=True)
        if self._device_memory is None:
            rank_zero_warn(f"MemoryProfiler measures nothing: {trainer.strategy.root_device} has no peak counter.")
        log_dir = trainer.log_dir or trainer.default_root_dir  # broadcasts: every rank has to ask
        self._log_dir = None if "://" in log_dir or is_fast_dev_run(trainer) else Path(log_dir)
        if self._csv_wanted and trainer.is_global_zero:
            if self._log_dir is not None:
                check_writable(self._log_dir)
            elif "://" in log_dir:
                rank_zero_warn(f"MemoryProfiler writes no {NAME}: the log directory {log_dir} is not a local one.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch a training."""
        self._begin(trainer, pl_module, "train")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out what happened between two epochs."""
        if self._run is not None:  # somebody may have configured the optimizers again
            self._run.watch(trainer.optimizers, automatic=pl_module.automatic_optimization)
            self._run.restart()
            self._run.report.begin_epoch()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a step."""
        if self._run is not None:
            self._run.start(pl_module, batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Forward has ended."""
        if self._run is not None:
            self._run.phase_peaks.enter("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Backward has ended; unscaling, clipping and the optimizer follow."""
        if self._run is not None:
            self._run.phase_peaks.enter("optimizer_step")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step: its row, and what the loggers get."""
        if self._run is not None and (self._run.stop(trainer, batch) or batch_idx == 0) and self._progress_bar:
            report = self._run.report
            for name, count_bytes in ((report.peak_name, report.run_peak_bytes), ("limit_gib", report.limit_bytes)):
                if count_bytes is not None:
                    pl_module.log(name, round(count_bytes / 2**30, 2), prog_bar=True, logger=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the ranks: every one of them comes here."""
        if self._run is not None and trainer.world_size > 1 and logs_at_all(trainer):
            self._run.report.log_ranks(self._run.report.join_ranks(), max(0, logging_step(trainer) - 1))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what was not logged yet, close the CSV, and make the summary."""
        self._finish(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock of a training, or begin to watch a validation."""
        self._begin_evaluation(trainer, pl_module, "validate")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch a test."""
        self._begin_evaluation(trainer, pl_module, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch a prediction."""
        self._begin_evaluation(trainer, pl_module, "predict")

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin a step."""
        if self._run is not None:
            self._run.start(pl_module, batch)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """End the step."""
        if self._run is not None:
            self._run.stop(trainer, batch)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a validation; inside a training its clock runs on."""
        if self._run is not None:
            if self._run.stage == "train":
                self._run.end_evaluation(trainer)
            else:
                self._finish(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a test."""
        self._finish(trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a prediction."""
        self._finish(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Writing what follows takes time that is no wait for data; nobody tells when it ends."""
        if self._run is not None:
            self._run.forget_wait()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep what was measured, leave nothing behind on the optimizers, and say where memory ran out."""
        if self._run is None:
            return
        try:
            if is_out_of_memory(exception):
                exception.add_note(f"MemoryProfiler: {self._run.explain(trainer, pl_module)}")
                if self._snapshot is not None:
                    exception.add_note(f"MemoryProfiler: {self._snapshot.write(trainer.global_rank)}")
            self._finish(trainer, is_complete=False)
            if isinstance(exception, KeyboardInterrupt):
                self._table_due = True  # nobody tears down after it, and who stops a run wants to know what it used
                self.teardown(trainer, pl_module, "fit")
        except Exception as error:  # noqa: BLE001 - a device that has failed answers no question; its error is the news
            exception.add_note(f"MemoryProfiler could not finish its report: {type(error).__name__}: {error}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the table, once the progress bar is gone."""
        if self._table_due and self.summary is not None and trainer.is_global_zero:
            if (bar := trainer.progress_bar_callback) is not None:
                bar.teardown(trainer, pl_module, stage)  # Lightning puts it last, and Rich's would draw over the table
            show_summary(self.summary, Console())
        self._table_due = False

    def _begin(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        if self._device_memory is None:  # no setup: the callback came in later
            return
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set where mypy does not look
        plans = (vars(callback).get("plan") for callback in callbacks)
        plan = next((plan for plan in plans if isinstance(plan, Plan)), None)
        self._run = StepRecorder(trainer, module, self._device_memory, stage, items_fn=self._items_fn, plan=plan)
        if self._csv_wanted and self._log_dir is not None and trainer.is_global_zero:
            own_path = self._csv_path
            self._csv_path = self._run.report.open_csv(self._log_dir, resume=trainer.global_step > 0, own_path=own_path)
            if plan is not None:
                write_beside(self._csv_path, PLAN_NAME, plan.to_json())
        else:
            self._csv_path = None
        if self._snapshot_wanted:
            self._snapshot = OomSnapshot.start(self._log_dir, self._device_memory)
        self._run.restart()  # what came before is not the first step's time

    def _begin_evaluation(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        if trainer.sanity_checking:
            return
        if self._run is not None:
            self._run.begin_evaluation(stage)
        else:
            self._begin(trainer, module, stage)

    def _finish(self, trainer: Trainer, *, is_complete: bool = True) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        if self._snapshot is not None:
            self._snapshot.stop()
            self._snapshot = None
        # Lightning logs the values of an epoch's end at the step before the next one too
        step = max(0, logging_step(trainer) - (run.stage == "train"))
        ranks = None
        try:
            run.report.log(run.stage, step if logs_at_all(trainer) else None)
            if is_complete and run.stage == "train" and trainer.world_size > 1:
                ranks = run.report.join_ranks()
        finally:
            run.close()
        self._run_peak_bytes = run.report.run_peak_bytes
        self.summary = run.report.summary(ranks)
        if self.summary is None:
            return
        if self._csv_path is not None:
            write_beside(self._csv_path, summary_name(run.stage), self.summary.to_json())
        if is_complete:
            self._table_due = True
            if trainer.is_global_zero and run.stage == "train":
                run.report.log_figures(self.summary, step)
