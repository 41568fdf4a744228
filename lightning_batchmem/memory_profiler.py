"""MemoryProfiler: memory, time and throughput of every step."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.profiled_stage import log_dir_of
from lightning_batchmem._lightning.trainer_state import (
    is_fast_dev_run,
    is_one_of_several,
    stop_progress_bar,
)
from lightning_batchmem.devices import device_memory_for
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.foreign_values import add_note, begin_run, error_text, value_or_none
from lightning_batchmem.devices.oom_snapshot import start_snapshot
from lightning_batchmem.devices.peaks import PhasePeaks
from lightning_batchmem.plan.figures import plot_memory_over_steps
from lightning_batchmem.plan.options import check_switches, missing_attribute, names_our_arguments
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.printing import print_or_warn
from lightning_batchmem.profile.columns import read_rows
from lightning_batchmem.profile.run import Run, plan_in
from lightning_batchmem.profile.run_folder import CSV_NAME, RunFolder
from lightning_batchmem.profile.steady_steps import Options
from lightning_batchmem.profile.step_memory import PEAK
from lightning_batchmem.profile.summary import Summary
from lightning_batchmem.profile.text import summary_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class MemoryProfiler(Callback):
    """Measures the peak memory of every step, and what it consists of.

    Every step of training, validation, test and prediction becomes a row of
    ``memory_per_batch.csv`` in ``trainer.log_dir``. All loggers of the Trainer get the highest
    peaks, the mean times and the throughput since the previous log, at ``log_every_n_steps`` and at
    the end. An evaluation is logged at its end, with its stage as suffix
    (``memory/used_pct_validate``). At the end a line has what limits the run, a table shows the
    memory breakdown (not that of a single step), and :attr:`summary` contains the same as data.
    With the extra ``plot``, :meth:`plot` draws the steps, and ``python -m lightning_batchmem draw
    LOG_DIR`` the plan too. TensorBoard, W&B, MLflow and Comet get the plan of a BatchFinder as text
    when the training starts (``batch_finder/plan``), and the figure of its search
    (``batch_finder/search``).

    Each of these raises one warning: a leak, a limit that is near, a device that mostly waits for
    data. If memory runs out, the error gets a note with the step, the size of its batch, and on a
    GPU the step after which the memory in use has grown.

    Times are wall time. A step lasts from the request of its batch to the next request, without
    evaluation, checkpoints and the time between epochs. The device is never synchronized, and a GPU
    works while the CPU goes on: there each step has the mean time of the steps between two
    readings of limit and utilization, which are at least a second apart. The wait for data begins
    with the request of a batch, and ends on the CPU when the batch has arrived: the transfer to
    the device is part of it. Throughput is the samples of this rank times the number of ranks.
    The peaks of all ranks are exchanged once, when a training has ended.

    Memory is left out, with a warning, where it has no peak counter (MPS, XPU, HPU, TPU).

    Attributes:
        summary: the summary of the last run; ``None`` before its end, and if it had no step. After
            an exception it covers the steps until then. In a process that Lightning spawned it
            stays there. Before the first run it is an AttributeError.

    Args:
        csv: whether to write ``memory_per_batch.csv``, ``memory_summary.json`` and the plan of a
            BatchFinder (not under ``fast_dev_run``, and not into a remote ``log_dir``).
        items_fn: counts items in a batch, for example tokens: ``lambda batch:
            batch["mask"].sum()``. It is called after every step; a tensor on a GPU synchronizes
            every step.
        snapshot: ``"on_oom"``: if a step runs out of memory on CUDA, write PyTorch's memory
            snapshot into ``log_dir`` (for https://pytorch.org/memory_viz). Recording it costs time
            and memory of the CPU. A number: write it in the training step with this number, from
            0, and record it in this step only.
        modules: whether to divide the peak of one steady training step among the modules, by what
            they own and what autograd saves for them. That step takes somewhat longer. The training
            is the same bit for bit. A step that calls ``torch.func``, or forbids the hooks of
            autograd, cannot be measured: the summary has a sentence instead.
        flops: whether to count the floating-point operations of one steady training batch, for
            ``speed/tflops_per_device`` and ``speed/mfu_pct`` (per cent of the device's
            peak). They are scaled with the samples of the other batches, which is exact where all
            samples have one shape. The training is the same bit for bit.
        peak_flops: the peak of one device in FLOP/s; None to take it from a table of data sheets,
            for the precision of the Trainer.

    Raises:
        ValueError: if ``snapshot``, ``items_fn`` or ``peak_flops`` is invalid.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> profiler = MemoryProfiler()
        >>> trainer = Trainer(callbacks=[profiler], logger=False)
        >>> trainer.fit(module)  # doctest: +SKIP
        >>> profiler.summary  # doctest: +SKIP
    """

    summary: Summary | None

    @names_our_arguments
    def __init__(
        self,
        *,
        csv: bool = True,
        items_fn: Callable[[Any], float] | None = None,
        snapshot: Literal["on_oom"] | int | None = None,
        modules: bool = False,
        flops: bool = False,
        peak_flops: float | None = None,
    ) -> None:
        is_step = type(snapshot) is int and snapshot >= 0
        if not is_step and snapshot not in (None, "on_oom"):
            raise ValueError(
                f'snapshot must be "on_oom", the number of a step or None, got {snapshot!r}'
            )
        check_switches(csv=csv, modules=modules, flops=flops)
        if items_fn is not None and not callable(items_fn):
            raise ValueError(f"items_fn must be a function of a batch, got {items_fn!r}")
        is_number = isinstance(peak_flops, Real) and not isinstance(peak_flops, bool)
        is_usable = flops and is_number and 0 < float(peak_flops or 0) < math.inf
        if peak_flops is not None and not is_usable:
            raise ValueError(
                "peak_flops must be a number of FLOP/s above 0, with flops=True, got"
                f" {peak_flops!r:.80}"
            )
        self._has_csv = csv
        self._options = Options(items_fn, modules, flops, peak_flops)
        self._snapshot_when = snapshot
        self._log_dir: Path | None = None
        # That of the last run; None if it has none.
        self._csv_path: Path | None = None
        # The run that is recorded now.
        self._run: Run | None = None
        # The plan of the last run.
        self._plan: Plan | None = None
        self._run_peak_bytes: int | None = None
        # From the setup of a run to its begin.
        self._device_memory: DeviceMemory | None = None
        self._is_table_due = False
        # The phases of the step that runs; None where they are not measured.
        self._phases: PhasePeaks | None = None

    @classmethod
    def optional(cls, **options: Any) -> Self:
        """A profiler for a script that does not know the package, and has to run as without it.

        The environment variable makes such profilers. Metrics go to loggers of Lightning only: a
        logger of the project may not expect them.

        Args:
            **options: arguments of MemoryProfiler.
        """
        profiler = cls(**options)
        profiler._options = profiler._options._replace(is_optional=True)
        return profiler

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Say what there is, and when: the Trainer has an argument `profiler` too."""
            return missing_attribute(
                self,
                name,
                "a summary in a run: read profiler.summary after it. Where another process trains,"
                " read memory_summary.json.",
            )

    @property
    def epoch_peak_bytes(self) -> int | None:
        """Highest peak in this epoch so far, with its validation, as in :attr:`run_peak_bytes`.

        It is ``None`` between runs. The profiler resets the device's peak counter in every step, so
        read this, or :attr:`run_peak_bytes`, instead of ``torch.cuda.max_memory_allocated()``.
        """
        return None if self._run is None else self._run.peaks.epoch_bytes or None

    @property
    def run_peak_bytes(self) -> int | None:
        """Highest peak in this run so far; after its end, of the whole run.

        On a GPU it is that of tensors, on a CPU that of the process.

        Between two steps they are read after a checkpoint, an evaluation and an epoch, where hooks
        of yours run, and at some steps after one with another peak.
        """
        return self._run_peak_bytes if self._run is None else self._run.peaks.run_bytes or None

    def plot(self) -> Figure:
        """Draw the peak memory of each step of the last run, which may still go on.

        Its steps are read from ``memory_per_batch.csv``, which gets them about once a second.

        Returns:
            A figure of matplotlib, which a notebook shows. ``profiler.plot().savefig("peaks.png")``
            writes it to a file.

        Raises:
            ImportError: if matplotlib is not installed (extra ``plot``).
            ValueError: if no run of this process has written the file, or if no step has a peak.
        """
        if self._csv_path is None:
            raise ValueError(
                f"there is no {CSV_NAME} of a run to draw. Call plot on the first rank after a run"
                " has begun, with csv=True, a local log directory and no fast_dev_run."
            )
        return plot_memory_over_steps(read_rows(self._csv_path))

    def device_memory(self, device: torch.device) -> DeviceMemory | None:
        """Return the memory that is measured; override it to measure another kind of device.

        Args:
            device: the device of the Trainer.

        Returns:
            The memory of this process on the device, with cheap readings; ``None`` to measure time
            only.
        """
        return device_memory_for(device, quick=True)

    def setup(
        self,
        trainer: Trainer,
        # Lightning leaves it out where it calls the function of a class.
        pl_module: LightningModule = None,  # type: ignore[assignment]
        stage: str = "",
    ) -> None:
        """Find the log directory, and begin the peak before the first step."""
        if is_one_of_several(self, trainer, MemoryProfiler):
            rank_zero_warn(
                "The Trainer has several MemoryProfilers, which measure and print the same. Remove"
                " all but one."
            )
        begin_run()
        self._run = None
        self.summary = None
        self._run_peak_bytes = None
        self._device_memory = self._memory_of(trainer)
        self._restart_peak()
        log_dir = log_dir_of(trainer) or os.fsdecode(trainer.default_root_dir)
        is_remote = "://" in log_dir
        self._log_dir = None if is_remote or is_fast_dev_run(trainer) else Path(log_dir)
        if self._has_csv and is_remote and trainer.is_global_zero:
            rank_zero_warn(
                f"MemoryProfiler writes no {CSV_NAME}: the log directory {log_dir} is not local."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to record a training."""
        self._begin(trainer, pl_module, "train")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the peak of an epoch."""
        if self._run is not None:
            self._run.begin_epoch()

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Begin a step."""
        if self._run is not None:
            placed = (batch, batch_idx, dataloader_idx)
            self._phases = self._run.begin_step(pl_module, placed)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """End forward."""
        if self._phases is not None:
            self._phases.enter("backward")

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """End backward."""
        if self._phases is not None:
            self._phases.enter("optimizer step")

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = on_train_batch_start

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """End a step, and log the training if it is due."""
        self._phases = None
        if self._run is not None:
            self._run.end_step(trainer, (batch, batch_idx, dataloader_idx))

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the last step of an epoch."""
        if self._run is not None:
            self._run.end_epoch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a training."""
        self._finish(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to record an evaluation, by itself or in a training."""
        if self._run is not None:
            self._run.begin_validation()
        # The sanity check is before the training, so it is not recorded.
        elif trainer.state.fn != "fit":
            # The stage is "validate", "test" or "predict". mypy does not see that it is set here.
            stage: str = trainer.state.stage.value  # type: ignore[union-attr]
            self._begin(trainer, pl_module, stage)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report an evaluation."""
        if trainer.state.fn != "fit":
            self._finish(trainer)
        elif self._run is not None:
            self._run.end_validation()

    on_test_end = on_predict_end = on_validation_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin what follows the last step of an evaluation."""
        if self._run is not None:
            self._run.leave()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Report the steps so far, remove all hooks, and add a note to an out-of-memory error."""
        try:
            if self._run is not None:
                for note in self._run.notes(exception, trainer):
                    add_note(exception, f"MemoryProfiler: {note}")
            self._finish(trainer, is_complete=False)
            if isinstance(exception, KeyboardInterrupt):
                # Lightning does not call teardown after this exception.
                self._is_table_due = hasattr(self, "summary")
                self.teardown(trainer, pl_module, "fit")
        # A failed device may raise any error, which must not replace the first one.
        except Exception as error:  # noqa: BLE001
            add_note(exception, f"MemoryProfiler could not finish its report: {error_text(error)}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the table once the progress bar has stopped."""
        if self._is_table_due and self.summary is not None and trainer.is_global_zero:
            # Lightning ends the progress bar last, and the bar of Rich would overwrite the table.
            stop_progress_bar(trainer, pl_module, stage)
            print_or_warn(summary_text(self.summary))
        self._is_table_due = False

    def _begin(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        device = trainer.strategy.root_device
        folder = None
        if self._has_csv and self._log_dir is not None and trainer.is_global_zero:
            try:
                self._log_dir.mkdir(parents=True, exist_ok=True)
                folder = RunFolder(self._log_dir)
            # The training goes on without files.
            except OSError as error:
                rank_zero_warn(
                    f"MemoryProfiler writes no {CSV_NAME}: {error}. Give the Trainer another"
                    " default_root_dir, or pass csv=False."
                )
        self._csv_path = None if folder is None else folder.path
        snapshot = None
        if self._snapshot_when is not None and (
            stage == "train" or self._snapshot_when == "on_oom"
        ):
            snapshot = start_snapshot(self._snapshot_when, self._log_dir, device)
        # A search leaves nothing of a setup that came after the one of its finder.
        self._device_memory = self._device_memory or self._memory_of(trainer)
        plan = plan_in(trainer)
        is_new = plan is not self._plan
        if is_new:
            self._plan = plan
        elif stage != "train":
            # An evaluation that did not search has no plan: the limit of the earlier run no longer
            # holds, and its plan is in a file already.
            plan = None
        self._run = Run(
            trainer,
            module,
            stage,
            self._device_memory,
            plan,
            self._options,
            folder=folder,
            snapshot=snapshot,
        )
        if is_new:
            # The run does not include the steps of its search, and the drawing of its figure.
            self._restart_peak()
        self._device_memory = None

    def _memory_of(self, trainer: Trainer) -> DeviceMemory | None:
        device = trainer.strategy.root_device
        return value_or_none("The memory of the device", self.device_memory, device)

    def _restart_peak(self) -> None:
        if self._device_memory is not None:
            value_or_none(PEAK, self._device_memory.reset_peak)

    def _finish(self, trainer: Trainer, *, is_complete: bool = True) -> None:
        run = self._run
        # Nothing more is recorded, even if an error ends the report.
        self._run = self._phases = None
        if run is not None:
            self.summary = run.finish(trainer, is_complete=is_complete)
            self._run_peak_bytes = run.peaks.run_bytes or None
            self._is_table_due = is_complete
