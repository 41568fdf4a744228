"""BatchFinder: measure -> fit -> decide -> apply -> report, before the first training step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from rich.console import Console

from lightning_batchmem._lightning.loaders import pretend_loaded
from lightning_batchmem._lightning.progress import is_rehearsal
from lightning_batchmem._lightning.state import RandomStates, record_before_optimizers
from lightning_batchmem._lightning.step import begin_training
from lightning_batchmem.apply import apply_batch_size, no_trace
from lightning_batchmem.data import BatchSizeHome, Samples, count_samples
from lightning_batchmem.decide import decide
from lightning_batchmem.limits import check_positive, limit_bytes
from lightning_batchmem.measure import StepWatcher, batches_in_epoch, measure
from lightning_batchmem.meters import Meter, meter_for
from lightning_batchmem.parts import measure_parts, tensors_in
from lightning_batchmem.phases import PhaseMarks
from lightning_batchmem.records import Bounds, Objective, Plan, Probe, Refusal, Trial, mib
from lightning_batchmem.report.plan import SearchProgress, plan_table
from lightning_batchmem.report.table import parts_text

_STREAM_MAX_BATCH_SIZE = 2**20
"""Largest size that is tried for a stream without a length, where neither data nor user sets a ceiling."""

_SMALLEST_PROBE = 2
"""Where the user names no minimum. One sample breaks BatchNorm (ultralytics PR26224)."""

_FIRST_WARMUP_STEPS = 3
"""The first step creates the optimizer's state, the second is the first with gradients alive in forward."""

_CHEAP_TRIALS = 2
"""The first two sizes are so small that more steps cost nothing, and say more of the noise and of the time."""


class BatchFinder(Callback):
    """Compute the batch size before training starts, from a few real steps at small sizes.

    Runs in ``on_fit_start``: measures the user's own training step at growing sizes, fits a line to the peak memory of
    each phase, computes the size, runs it for real, and leaves no other trace on the run.

    Args:
        objective: ``"memory"`` for the largest size that fits, ``"throughput"`` for the smallest one that is within
            5 % of the best samples per second.
        memory_limit: the most that this process may hold: bytes, a text such as ``"20GiB"``, or a fraction of what the
            device can give to this process (0.9). ``None``: all that it can give.
        max_batch_size: the largest size to consider, in samples.
        min_batch_size: the smallest size to consider, in samples; ``None``: 2 (one sample is an error to BatchNorm).
        multiple_of: sizes are rounded down to a multiple of it; ``None``: sizes of 64 and more to a multiple of 8.
        batch_arg_name: the attribute of the module, its hparams, the datamodule or its hparams that holds the size.

    Attributes:
        plan: the :class:`~lightning_batchmem.Plan` of the last search; ``None`` before.

    Raises:
        ValueError: for an argument out of range, and at ``fit`` for data whose batch size cannot be set.
        RuntimeError: at ``fit`` when no size fits, or when what was measured follows no law.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_batchmem import BatchFinder
        >>> trainer = Trainer(callbacks=[BatchFinder(memory_limit=0.9)], logger=False, enable_checkpointing=False)
    """

    def __init__(
        self,
        *,
        objective: Objective = "memory",
        memory_limit: int | float | str | None = None,
        max_batch_size: int | None = None,
        min_batch_size: int | None = None,
        multiple_of: int | None = None,
        batch_arg_name: str = "batch_size",
    ) -> None:
        super().__init__()
        if objective not in ("memory", "throughput"):
            raise ValueError(f'objective must be "memory" or "throughput", got {objective!r}')
        check_positive("max_batch_size", max_batch_size)
        check_positive("min_batch_size", min_batch_size)
        check_positive("multiple_of", multiple_of)
        limit_bytes(memory_limit, budget_bytes=1)  # for its error, here rather than at fit
        if max_batch_size is not None and max_batch_size < (min_batch_size or 1):
            raise ValueError(f"max_batch_size must be at least min_batch_size={min_batch_size}, got {max_batch_size}")
        if not isinstance(batch_arg_name, str) or not batch_arg_name.isidentifier():
            raise ValueError(f"batch_arg_name must be the name of an attribute, got {batch_arg_name!r}")
        self.plan: Plan | None = None
        self._objective = objective
        self._memory_limit = memory_limit
        self._max_batch_size = max_batch_size
        self._min_batch_size = min_batch_size
        self._multiple_of = multiple_of
        self._batch_arg_name = batch_arg_name
        self._random_before_optimizers: RandomStates | None = None
        self._stop_recording: Callable[[], object] = lambda: None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note the random states before ``configure_optimizers`` draws from them."""
        if stage != "fit" or is_rehearsal(trainer):
            return
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set where mypy does not look
        if sum(isinstance(callback, BatchFinder) for callback in callbacks) > 1:
            raise ValueError("callbacks must have one BatchFinder, got several")
        # before a LearningRateFinder, which Lightning puts first, and which needs the size
        trainer.callbacks = sorted(callbacks, key=lambda callback: callback is not self)  # type: ignore[attr-defined]
        self._stop_recording = record_before_optimizers(trainer, self._keep_random_states)

    def _keep_random_states(self, states: RandomStates) -> None:
        self._random_before_optimizers = states

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind on the strategy when ``fit`` ends before its optimizers are configured."""
        self._stop_recording()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search, and set the size that was found."""
        if is_rehearsal(trainer):
            rank_zero_info("BatchFinder does nothing under fast_dev_run")
            return
        if 0 in (trainer.max_epochs, trainer.max_steps, trainer.limit_train_batches):
            return  # there is no training to find a size for
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise ValueError(
                "training_step must take a batch for BatchFinder, got one that takes dataloader_iter;"
                " set the batch size by hand"
            )
        if not isinstance(trainer.strategy, SingleDeviceStrategy):
            raise ValueError(
                f"strategy must be on a single device for BatchFinder, got {type(trainer.strategy).__name__};"
                " search once with Trainer(devices=1) and set the size it finds"
            )
        meter = meter_for(trainer.strategy.root_device)
        if not meter.has_peak:
            raise ValueError(
                f"the device must tell its peak memory for BatchFinder, got {meter.name}, which tells only the current"
                " use; set the batch size by hand"
            )
        random = self._random_before_optimizers or RandomStates()
        self._random_before_optimizers = None
        home = BatchSizeHome(trainer, pl_module, self._batch_arg_name)
        outcome = self._search(trainer, pl_module, home, meter, random)
        meter.release_cached()  # training starts as if nothing had been allocated before
        if isinstance(outcome, Refusal):
            raise RuntimeError(outcome.reason)
        self.plan = outcome
        apply_batch_size(trainer, home, outcome.batch_size)
        if trainer.is_global_zero:
            console = Console()
            console.print(plan_table(outcome))
            console.print(str(outcome), highlight=False, markup=False, soft_wrap=True)

    def _search(
        self, trainer: Trainer, module: LightningModule, home: BatchSizeHome, meter: Meter, random: RandomStates
    ) -> Plan | Refusal:
        home.check()
        marks = PhaseMarks(meter)
        shown = trainer.is_global_zero and trainer.progress_bar_callback is not None
        progress = SearchProgress(Console(), enabled=shown)
        with no_trace(trainer, module, home, random, StepWatcher(marks)) as lent, progress:
            loader = home.loader_for(self._min_batch_size or _SMALLEST_PROBE)
            epoch_samples = count_samples(loader)
            pretend_loaded(trainer, loader, batches_in_epoch(epoch_samples, self._min_batch_size or _SMALLEST_PROBE))
            begin_training(trainer)
            samples = Samples(loader)
            bounds = self._bounds(meter, epoch_samples)
            trials: list[Trial] = []
            watched = marks.watch(trainer.optimizers)
            try:
                while isinstance(step := decide(trials, bounds, meter.repeatability), Probe):
                    progress.trying(step)
                    home.write(step.batch_size)
                    trials.append(
                        measure(
                            trainer,
                            samples,
                            meter,
                            marks,
                            step.batch_size,
                            epoch_samples=epoch_samples,
                            warmup_steps=1 if trials else _FIRST_WARMUP_STEPS,
                            measured_steps=self._measured_steps(meter, len(trials)),
                        )
                    )
                    if trials[-1].outcome == "out_of_memory":
                        lent.lend_scaler()
                if isinstance(step, Refusal) and trials:
                    batch = samples.batch(trials[-1].batch_size)
                    step = replace(step, reason=f"{step.reason} {self._made_of(trainer, meter, batch, trials[-1])}")
            finally:
                for handle in watched:
                    handle.remove()
        return step

    @staticmethod
    def _made_of(trainer: Trainer, meter: Meter, batch: object, trial: Trial) -> str:
        meter.release_cached()  # what the host's heap keeps of the steps is activations, not the rest
        parts = measure_parts(
            trainer.lightning_module,
            trainer.optimizers,
            None,  # counted as it is on the host: to move it could run out of memory once more
            trainer.strategy.root_device,
            start_bytes=meter.current().allocated_bytes,
            peak_bytes=trial.peak_bytes,
        )
        batch_bytes = sum(tensor.nbytes for tensor in tensors_in(batch))
        activations_bytes = max(0, parts.activations_bytes - batch_bytes)
        parts = replace(parts, batch_bytes=batch_bytes, activations_bytes=activations_bytes)
        return f"At {trial.batch_size} samples the memory held {parts_text(parts)}."

    @staticmethod
    def _measured_steps(meter: Meter, trials_run: int) -> int:
        exact = meter.repeatability == 0.0
        return 2 if exact and trials_run >= _CHEAP_TRIALS else 5

    def _bounds(self, meter: Meter, epoch_samples: int | None) -> Bounds:
        budget = meter.budget_bytes()
        wanted = limit_bytes(self._memory_limit, budget)
        if wanted > budget:
            rank_zero_warn(f"memory_limit={self._memory_limit!r} is more than the device can give, {mib(budget)}")
        user_max = self._max_batch_size or _STREAM_MAX_BATCH_SIZE
        from_data = epoch_samples is not None and epoch_samples < user_max
        largest = epoch_samples if from_data and epoch_samples is not None else user_max
        return Bounds(
            limit_bytes=min(wanted, budget),
            min_batch_size=self._min_batch_size or min(_SMALLEST_PROBE, largest),
            max_batch_size=largest,
            max_reason="dataset" if from_data else "max_batch_size",
            multiple_of=self._multiple_of,
            objective=self._objective,
        )
