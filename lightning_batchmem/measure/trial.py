"""Real steps at one batch size, measured: a probe of a few steps, or a rehearsal of the training."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_batchmem._lightning.strategies import without_synchronisation
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.devices.tensors import tensors_in
from lightning_batchmem.measure.compiled import forget_compiled, was_compiled
from lightning_batchmem.measure.live_bytes import LiveStorages, RequestedBytes
from lightning_batchmem.measure.phases import PhasePeaks, StepPeaks
from lightning_batchmem.measure.ranks import Ranks
from lightning_batchmem.measure.steps import EvaluationSteps, Steps, TrainingSteps
from lightning_batchmem.plan.records import Outcome, Trial, TrialKind

_MAX_WARMUP_STEPS = 20  # until every optimizer has stepped; fp16 skips the first steps while it finds its loss scale
_GRAPH_WARMUP_STEPS = 3  # CUDA graphs: warm up, record, replay
_STEADY_STEPS = 5  # with fewer, simulated trainings ran out of memory in later steps
_MORE_STEPS = 15  # while steps differ, as with random depth or image size
_DIFFERENCE = 0.1  # of the highest: more is no noise
_RESERVE_SHARE = 0.1  # of the growth of the resident set, by which later steps exceed the first ones


class PhaseCallback(Callback):
    """Mark where the phases of a step begin; the only callback that steps of a search reach.

    Attributes:
        peaks: of the step that runs.
        stepped: ids of the optimizers that have stepped since :meth:`watch`.
    """

    def __init__(self, device: DeviceMemory) -> None:
        self.peaks = PhasePeaks(device)
        self.stepped: set[int] = set()

    def watch(self, optimizers: Iterable[Optimizer]) -> list[RemovableHandle]:
        """Mark the end of each optimizer's step, which Lightning has no hook for."""
        self.stepped.clear()

        def after_step(optimizer: Optimizer, *_: Any) -> None:
            self.stepped.add(id(optimizer))
            self.peaks.enter("forward")  # a second forward pass follows under manual optimization

        return [optimizer.register_step_post_hook(after_step) for optimizer in optimizers]

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Mark the end of the forward pass."""
        self.peaks.enter("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mark the end of the backward pass."""
        self.peaks.enter("optimizer_step")


@dataclass
class _Record:
    """What the steps of one trial used."""

    exact: list[StepPeaks] = field(default_factory=list)  # live bytes of each counted step
    held_bytes: list[int] = field(default_factory=list)  # of each step
    seconds: list[float] = field(default_factory=list)  # of each counted call
    calls: int = 0
    full_steps: int = 0
    samples: int = 0
    fixed_bytes: int = 0
    reserve_bytes: int = 0
    error: str = ""

    def phase_peaks(self) -> dict[str, int]:
        phases = dict.fromkeys(phase for step in self.exact for phase in step.phase_peak_bytes)
        return {phase: max(step.phase_peak_bytes.get(phase, 0) for step in self.exact) for phase in phases}


class TrialRunner:
    """Run the user's steps at any batch size and measure them.

    Args:
        trainer: during a search.
        device: whose memory is limited.
        callback: reached by the steps.
        ranks: all processes of the run.
        training: the training steps; ``None`` in a search for an evaluation.
        evaluation: the evaluation steps; ``None`` where there are none.
        is_collective: whether ranks take every step together.
        samples_bytes: what the search's own samples hold in host memory; not part of any peak.
        saves_checkpoints: whether a callback saves checkpoints, which takes a copy of the state in host memory.
    """

    def __init__(
        self,
        trainer: Trainer,
        device: DeviceMemory,
        callback: PhaseCallback,
        ranks: Ranks,
        *,
        training: TrainingSteps | None,
        evaluation: EvaluationSteps | None,
        is_collective: bool,
        samples_bytes: int = 0,
        saves_checkpoints: bool = False,
    ) -> None:
        self._trainer, self._device, self._callback, self._ranks = trainer, device, callback, ranks
        self._training, self._evaluation = training, evaluation
        self._main: Any = training or evaluation
        self.is_collective = is_collective
        self._is_host = device.name == "host"
        self._samples_bytes = samples_bytes if self._is_host else 0
        self._saves_checkpoints = saves_checkpoints
        self._live: LiveStorages | RequestedBytes | None = self._live_counter()
        self._is_first = True
        self._fixed_evaluation: list[StepPeaks] = []  # of loaders that do not follow the batch size

    @property
    def has_training(self) -> bool:
        """Whether the steps train."""
        return self._training is not None

    @property
    def is_exact(self) -> bool:
        """Whether live bytes can be counted."""
        return self._live is not None

    def current_bytes(self) -> int:
        """Live bytes at this moment; the resident set where they cannot be counted."""
        return (self._live or self._device).current().allocated_bytes

    def probe(self, batch_size: int) -> Trial:
        """Run a few steps and measure the peak of each phase."""

        def run(record: _Record) -> Outcome:
            if self._training is not None:
                self._in_steps(self._training, batch_size, record, self._probe_steps)
                record.fixed_bytes = max(0, self.current_bytes() - self._gradient_bytes())
            if self._evaluation is not None:
                if self._training is None or self._evaluation.loaders.follows or not self._fixed_evaluation:
                    before = len(record.exact)
                    self._in_steps(self._evaluation, batch_size, record, self._probe_steps)
                    self._fixed_evaluation = record.exact[before:]
                else:
                    record.exact += self._fixed_evaluation
            self._is_first = False
            return "ok"

        return self._trial("probe", batch_size, run)

    def rehearse(self, batch_size: int, smaller_size: int, limit_bytes: int) -> Trial:
        """Run steps as training will, under the limit; the caller has restored the state in which training starts.

        Args:
            batch_size: samples in each step.
            smaller_size: samples in a batch at the end of an epoch.
            limit_bytes: what this process may hold.
        """
        main = self._main
        evaluation = self._evaluation if self._training is not None else None

        def run(record: _Record) -> Outcome:
            enforcing = nullcontext(False) if self.is_collective else self._device.limit_enforced(limit_bytes)
            start_bytes = self._held()
            with enforcing as is_enforced:
                if evaluation is not None and self._trainer.num_sanity_val_steps:
                    self._in_steps(evaluation, batch_size, record, self._two_steps)
                warm, retries = self._in_steps(main, batch_size, record, self._steady_steps)
                if evaluation is not None:
                    self._in_steps(evaluation, batch_size, record, self._two_steps)
                    self._in_steps(evaluation, smaller_size, record, self._one_step)
                self._in_steps(main, smaller_size, record, self._one_step)
                self._in_steps(main, batch_size, record, self._two_steps)
                retries = self._retries() - retries
            if self._is_host:
                record.reserve_bytes = self._reserve(record, start_bytes)
                for steps in (main, evaluation):
                    if steps is not None:
                        self._in_steps(steps, batch_size, record, self._live_steps)
            if retries > 0:
                return "allocator_retry"
            needed_bytes = max(record.held_bytes[warm:]) + record.reserve_bytes
            return "over_limit" if not is_enforced and needed_bytes > limit_bytes else "ok"

        return self._trial("rehearsal", batch_size, run)

    def synchronized_step(self, batch_size: int) -> int:
        """Run a step in which the ranks exchange gradients, and return what was held at its peak."""
        record = _Record()
        with self._ranks.collective_step():
            self._in_steps(self._main, batch_size, record, self._two_steps)
        return max(record.held_bytes)

    def _trial(self, kind: TrialKind, batch_size: int, run: Callable[[_Record], Outcome]) -> Trial:
        forget_compiled()
        self._device.release_cached()
        record, outcome = _Record(), "out_of_memory"
        alone: AbstractContextManager[None] = without_synchronisation(self._trainer)
        handles = self._callback.watch(self._trainer.optimizers)
        try:
            with self._ranks.collective_step() if self.is_collective else alone:
                outcome = run(record)
        except Exception as error:  # out of memory has many types; every other error is raised again
            if not is_out_of_memory(error) or self.is_collective:
                if self.is_collective:
                    error.add_note(f"BatchFinder: in a step of {batch_size} samples that all ranks take together")
                raise
            record.error = _let_go(error)
        finally:
            for handle in handles:
                handle.remove()
        if record.error:
            for steps in (self._training, self._evaluation):
                if steps is not None:
                    steps.let_go()
            gc.collect()
            self._device.release_cached()
        return Trial(
            batch_size=batch_size,
            outcome=outcome,  # type: ignore[arg-type]  # a literal
            kind=kind,
            phase_peak_bytes=record.phase_peaks(),
            is_exact=self.is_exact,
            peak_held_bytes=max(record.held_bytes, default=None),
            reserve_bytes=record.reserve_bytes,
            fixed_bytes=record.fixed_bytes,
            step_seconds=statistics.median(record.seconds) if record.seconds else None,
            full_steps=record.full_steps,
            samples_run=record.samples,
            error=record.error,
        )

    def _in_steps(
        self, steps: Steps, batch_size: int, record: _Record, body: Callable[[Steps, int, _Record], Any]
    ) -> Any:
        record.calls = steps.begin(batch_size)
        try:
            return body(steps, batch_size, record)
        finally:
            steps.end()

    def _probe_steps(self, steps: Steps, batch_size: int, record: _Record) -> None:
        if self._is_first:
            self._warm_up(steps, batch_size, record, at_least=2)
        else:
            self._run(steps, batch_size, record, _GRAPH_WARMUP_STEPS if was_compiled() else 1, counted=False)
        if self._is_host and was_compiled():
            self._live = None  # a compiled module allocates without operators that could be counted
        self._run(steps, batch_size, record, 2, timed=True)
        self._live_steps(steps, batch_size, record)

    def _one_step(self, steps: Steps, batch_size: int, record: _Record) -> None:
        self._run(steps, batch_size, record, 1)

    def _two_steps(self, steps: Steps, batch_size: int, record: _Record) -> None:
        self._run(steps, batch_size, record, 2)

    def _live_steps(self, steps: Steps, batch_size: int, record: _Record) -> None:
        """Count live bytes on the host, in steps of their own: counting uses memory itself."""
        if isinstance(self._live, LiveStorages):
            self._run(steps, batch_size, record, 1, live=True, counted=False)  # finds the storages that exist before
            self._run(steps, batch_size, record, 1, live=True)

    def _steady_steps(self, steps: Steps, batch_size: int, record: _Record) -> tuple[int, int]:
        """Warm up and run the steady steps; returns the measured calls and the retries before these."""
        self._warm_up(steps, batch_size, record, at_least=1)
        warm, retries = len(record.held_bytes), self._retries()
        self._run(steps, batch_size, record, _STEADY_STEPS, timed=True, varied=True)
        if _differ(record.held_bytes[warm:]):
            self._run(steps, batch_size, record, _MORE_STEPS, varied=True)
        return warm, retries

    def _warm_up(self, steps: Steps, batch_size: int, record: _Record, *, at_least: int) -> None:
        """Run until every optimizer has stepped, so that its state exists."""
        optimizers = {id(optimizer) for optimizer in self._trainer.optimizers} if steps is self._training else set()
        for step in range(_MAX_WARMUP_STEPS):
            if step >= at_least and optimizers <= self._callback.stepped:
                return
            self._run(steps, batch_size, record, 1, counted=False)

    def _run(
        self,
        steps: Steps,
        batch_size: int,
        record: _Record,
        count: int,
        *,
        live: bool = False,
        counted: bool = True,
        timed: bool = False,
        varied: bool = False,
    ) -> None:
        """Run full steps and record what they used.

        Args:
            steps: what runs.
            batch_size: samples in each call.
            record: gets the peaks, times and counts.
            count: full steps.
            live: whether to count live storages (host); the resident set is not recorded then.
            counted: whether the peaks of the phases count.
            timed: whether the times count.
            varied: whether every other step gets a batch of other lengths.
        """
        counter: DeviceMemory | LiveStorages | RequestedBytes = self._device
        if self._live is not None and (live or not self._is_host):
            counter = self._live
        elif self._live is not None:
            counted = False  # the resident set is no live bytes
        with counter if isinstance(counter, LiveStorages) else nullcontext():
            for step in range(count):
                self._callback.peaks = peaks = PhasePeaks(counter)
                for call in range(record.calls):
                    begin = time.perf_counter()
                    peaks.start(steps.first_phase)
                    steps.run(batch_size, step * record.calls + call, varied=varied and step % 2 == 1)
                    self._device.synchronize()
                    seconds = time.perf_counter() - begin
                    found = peaks.stop()
                    record.exact += [found] if counted else []
                    record.seconds += [seconds] if timed else []
                    if not live:
                        held_bytes = (
                            found.peak_bytes if self._is_host else found.peak_reserved_bytes or found.peak_bytes
                        )
                        record.held_bytes.append(held_bytes - self._samples_bytes)
                    record.samples += batch_size
                record.full_steps += steps is self._training or self._training is None

    def _retries(self) -> int:
        return self._device.counters().get("num_alloc_retries", 0)

    def _live_counter(self) -> LiveStorages | RequestedBytes | None:
        if not self._is_host:
            return RequestedBytes(self._device)
        if self.is_collective or not LiveStorages.is_possible():
            return None
        self._device.release_cached()
        module = self._trainer.lightning_module
        tensors = [*module.parameters(), *module.buffers()]
        counter = LiveStorages()
        counter.track(tensors)
        tensor_bytes = counter.current().allocated_bytes
        other_bytes = self._device.current().allocated_bytes - self._samples_bytes - tensor_bytes
        counter = LiveStorages(max(0, other_bytes))
        counter.track(tensors)
        return counter

    def _held(self) -> int:
        stats = self._device.current()
        held_bytes = stats.allocated_bytes if stats.reserved_bytes is None else stats.reserved_bytes
        return held_bytes - self._samples_bytes

    def _reserve(self, record: _Record, start_bytes: int) -> int:
        """Bytes to keep free for later steps and checkpoints, on top of the highest resident set."""
        peak_bytes = max(record.held_bytes)
        grown_bytes = max(0, peak_bytes - start_bytes)
        saving_bytes = self._held() + self._state_bytes() if self._saves_checkpoints else 0
        return max(int(_RESERVE_SHARE * grown_bytes), saving_bytes - peak_bytes)

    def _state_bytes(self) -> int:
        """Bytes of the weights and the optimizer state, which saving a checkpoint copies in host memory."""
        states = [optimizer.state for optimizer in self._trainer.optimizers]
        tensors = tensors_in([self._trainer.lightning_module.state_dict(), *states])
        return sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu")

    def _gradient_bytes(self) -> int:
        gradients = (parameter.grad for parameter in self._trainer.lightning_module.parameters())
        return sum(gradient.nbytes for gradient in gradients if gradient is not None)


def _differ(peaks_bytes: list[int]) -> bool:
    return max(peaks_bytes) - min(peaks_bytes) > _DIFFERENCE * max(peaks_bytes)


def _let_go(failure: BaseException) -> str:
    """Drop the tensors that a failed step's traceback holds, and return the first line of the error.

    Source: https://github.com/Lightning-AI/pytorch-lightning/issues/7335
    """
    lines = str(failure).strip().splitlines()
    text = f"{type(failure).__name__}: {lines[0]}" if lines else type(failure).__name__
    seen: set[int] = set()
    error: BaseException | None = failure
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    return text
