"""One run of ``fit``, ``validate``, ``test`` or ``predict`` as the MemoryProfiler measures it, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_batchmem._lightning.trainer_state import logging_step, logs_at_all, logs_now
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.select import timer_for
from lightning_batchmem.measure.breakdown import samples_in
from lightning_batchmem.measure.composition import Composition
from lightning_batchmem.measure.phases import PhasePeaks, StepPeaks
from lightning_batchmem.measure.step_record import StepRecord, StepTimer
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import mib
from lightning_batchmem.report.reporter import StepReporter
from lightning_batchmem.report.tables import breakdown_text

_UNLOGGED_INTERVAL = 50
"""Steps between two looks at a run whose Trainer logs nothing (``log_every_n_steps=0``): Lightning's own default."""


@dataclass
class _Stage:
    """Where a stage stands: its clock, how many steps it has done, and the device's mark at the end of the last."""

    name: str
    clock: StepTimer = field(default_factory=StepTimer)
    steps: int = 0
    mark: object = None


class StepRecorder:
    """Measures the steps of one run.

    Args:
        trainer: when the run starts.
        module: the module that is run.
        device_memory: of the device that it runs on.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``; a training may have validations in it.
        items_fn: counts what the user wants counted in a batch.
        plan: what a BatchFinder of the same run has found.

    Attributes:
        stage: of the run, as it was given.
        report: where the steps go.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        device_memory: DeviceMemory,
        stage: str,
        *,
        items_fn: Callable[[Any], float] | None = None,
        plan: Plan | None = None,
    ) -> None:
        self._timer = timer_for(trainer.strategy.root_device)
        self.phase_peaks = PhasePeaks(device_memory)
        self._device_memory, self._items_fn = device_memory, items_fn
        self._world_size, self._rank = trainer.world_size, trainer.global_rank
        self._optimizers: list[Optimizer] = []
        self._handles: list[RemovableHandle] = []
        self.stage = stage
        number = trainer.fit_loop.total_batch_idx + 1 if stage == "train" else 0  # a resumed training goes on counting
        self._main = self._stage = _Stage(stage, steps=number)
        self._logs = logs_at_all(trainer)
        self._batch: object = None
        self._next_floor = 0.0
        self._in_step = self._stepped = self._is_steady = self._size_warned = False
        if stage == "train":
            self.watch(trainer.optimizers, automatic=module.automatic_optimization)
        self._composition = Composition(device_memory, trainer.strategy.root_device, module, self._optimizers)
        self.report = StepReporter(
            trainer, device_memory, self._timer, plan, stage=stage, composition=self._composition
        )

    def watch(self, optimizers: Iterable[Optimizer], *, automatic: bool) -> None:
        """Watch these optimizers and no others.

        Args:
            optimizers: of the trainer.
            automatic: whether Lightning steps them, once at the end of a step; a manual step may go forward again.
        """
        wanted = [optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer)]  # a strategy's may not be
        if list(map(id, wanted)) != list(map(id, self._optimizers)):
            self._unwatch()
            self._optimizers = wanted
            self._handles = [] if automatic else self.phase_peaks.watch(wanted)
            self._handles += [optimizer.register_step_post_hook(self._note_step) for optimizer in wanted]

    def restart(self) -> None:
        """The next step begins now, whatever happened since the last one."""
        self._stage.clock.restart()
        self._mark()

    def begin_evaluation(self, stage: str) -> None:
        """Steps of an evaluation inside ``fit`` follow; the clock of training stands still."""
        self._main.clock.pause()
        self._stage = _Stage(stage)
        self.restart()

    def end_evaluation(self, trainer: Trainer) -> None:
        """Report an evaluation inside ``fit``; the clock of training runs on."""
        self.report.end_evaluation(self._stage.name, logging_step(trainer) if self._logs else None)
        self._stage = self._main
        self._main.clock.resume()
        self._main.clock.forget_wait()  # its workers, and the other callbacks, may take time around it
        self.report.forget_utilization()  # what the device did for the evaluation is not training

    def forget_wait(self) -> None:
        """Something else than the loader may take time until the next batch."""
        self._main.clock.forget_wait()

    def start(self, module: LightningModule, batch: object) -> None:
        """Begin a step."""
        stage = self._stage
        if not stage.clock.start():
            self._mark()
        self._stepped, self._in_step, self._batch = False, True, batch
        if stage.name == "train":
            if stage.steps >= self._next_floor:
                self._next_floor = self.report.floor(stage.steps)
            self.phase_peaks.start()
        else:
            self.phase_peaks.start("evaluation")
        if self._is_steady and stage is self._main and self._composition.is_due:
            stage.clock.pause()
            self.report.take_in()  # the steps before are not like those to come
            self._composition.take(module, self._optimizers, batch)
            stage.clock.resume()

    def stop(self, trainer: Trainer, batch: object) -> bool:
        """End the step.

        Returns:
            Whether it was one at which training is logged.
        """
        if not self._in_step:  # the loader gave None: Lightning runs no step, and still calls this hook
            return False
        stage = self._stage
        peaks = self.phase_peaks.stop()
        seconds, wait_seconds = stage.clock.stop()
        since, stage.mark = stage.mark, None if self._timer is None else self._timer.mark()
        self._in_step, self._batch = False, None
        number, stage.steps, is_logged = stage.steps, stage.steps + 1, False
        if stage.name == "train":
            number = trainer.fit_loop.total_batch_idx
            is_logged = logs_now(trainer) if self._logs else not stage.steps % _UNLOGGED_INTERVAL
            if not self._stepped:
                _fold_optimizer_step(peaks)
        elif stage is self._main:
            self._is_steady = True  # from its second step on
        items = None if self._items_fn is None else float(self._items_fn(batch))
        step = StepRecord(number, self._samples(batch), peaks, seconds, wait_seconds, stage.name, items)
        self.report.add(step, since, stage.mark)
        if is_logged:
            self.report.log(stage.name, logging_step(trainer) if self._logs else None)
        stage.clock.leave()
        return is_logged

    def explain(self, trainer: Trainer, module: LightningModule) -> str:
        """Where memory ran out, and what it was made of then."""
        peak_bytes = self.phase_peaks.stop().peak_bytes
        breakdown = self._composition.at_failure(module, self._optimizers, self._batch, peak_bytes)
        where = "between two steps"
        if self._in_step:
            is_training = self._stage.name == "train"
            where = (
                f"in {self._stage.name} step {trainer.fit_loop.total_batch_idx if is_training else self._stage.steps}"
            )
            samples = samples_in(self._batch)
            where += "" if samples is None else f" with a batch of {samples:,} samples"
        rank = "" if self._world_size == 1 else f" on rank {self._rank}"
        return (
            f"memory ran out {where}{rank}. Until then it held up to {mib(peak_bytes)} of"
            f" {mib(self.report.limit_bytes)}: {breakdown_text(breakdown)}."
        )

    def close(self) -> None:
        """Take the hooks off the optimizers, and finish the report."""
        self._unwatch()
        self._batch = None
        self.report.close()

    def _mark(self) -> None:
        if self._timer is not None:
            self._stage.mark = self._timer.mark()

    def _samples(self, batch: object) -> int | None:
        samples = samples_in(batch)
        if samples is None and not self._size_warned:
            self._size_warned = True
            rank_zero_warn(
                "MemoryProfiler cannot tell how many samples a batch holds, as its tensors do not agree in their first"
                " dimension, or there are none: batch/size and throughput/samples_per_s leave such steps out."
            )
        return samples

    def _note_step(self, *_: Any) -> None:
        self._stepped = self._is_steady = True

    def _unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._optimizers = [], []


def _fold_optimizer_step(peaks: StepPeaks) -> None:
    """Where no optimizer stepped (accumulation), what followed backward is the end of backward."""
    phases = peaks.phase_peak_bytes
    if (after := phases.pop("optimizer_step", None)) is not None:
        phases["backward"] = max(phases.get("backward", 0), after)
