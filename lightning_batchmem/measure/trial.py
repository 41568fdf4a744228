"""Real steps at one batch size, measured."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from dataclasses import replace

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.measure.compiled import forget_compiled
from lightning_batchmem.measure.phases import PhasePeaks, StepPeaks
from lightning_batchmem.measure.steps import Steps
from lightning_batchmem.plan.records import Trial


class Looseness:
    """How much of what a step holds as forward ends is in no block.

    Args:
        device_memory: the device that is asked.
    """

    def __init__(self, device_memory: DeviceMemory) -> None:
        self._device_memory = device_memory
        self._start: tuple[int, int] | None = None
        self.share: float | None = None

    def start(self) -> None:
        """Begin at a size, when nothing is cached."""
        self.share, self._start = None, self._held_and_in_use()

    def mark(self) -> None:
        """Look, and keep the most that was seen."""
        now = self._held_and_in_use()
        if self._start is None or now is None or now[0] <= self._start[0]:
            return
        share = 1 - (now[1] - self._start[1]) / (now[0] - self._start[0])
        self.share = max(self.share or 0.0, min(1.0, share))

    def _held_and_in_use(self) -> tuple[int, int] | None:
        in_use_bytes = self._device_memory.in_use_bytes()
        return None if in_use_bytes is None else (self._device_memory.current().allocated_bytes, in_use_bytes)


class PhaseCallback(Callback):
    """Hears the hooks inside a probing step; the only callback that a probing step reaches.

    Args:
        phase_peaks: of the meter in use.
        looseness: of the same.
    """

    def __init__(self, phase_peaks: PhasePeaks, looseness: Looseness) -> None:
        self._phase_peaks = phase_peaks
        self._looseness = looseness
        self._gradients_freed = False

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Forward has ended, and under automatic optimization the last step's gradients are still there."""
        self._looseness.mark()
        self._gradients_freed = True

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Forward has ended."""
        self._phase_peaks.enter("backward")
        if not self._gradients_freed:
            self._looseness.mark()
        self._gradients_freed = False

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Backward has ended; unscaling, clipping and the optimizer follow."""
        self._phase_peaks.enter("optimizer_step")


def measure(
    steps: Steps,
    device_memory: DeviceMemory,
    phase_peaks: PhasePeaks,
    looseness: Looseness,
    batch_size: int,
    *,
    warmup_steps: int,
    measured_steps: int,
    enough_bytes: float,
    together: bool = False,
) -> Trial:
    """Run real steps at ``batch_size`` and say what they held and how long they took.

    Args:
        steps: what runs: training or evaluation.
        device_memory: the device that is asked.
        phase_peaks: of that meter, fed by a :class:`PhaseCallback` in the trainer.
        looseness: of that meter, fed likewise.
        batch_size: samples in each step.
        warmup_steps: full steps that are run first and not counted (lazy initialisation, autotuning, optimizer state).
        measured_steps: full steps that are counted.
        enough_bytes: a step that holds more than this ends the trial, there and then: the size does not fit.
        together: whether ranks take these steps together: then none of them ends its trial before the others.

    Returns:
        The trial; running out of memory is an outcome of it.

    Raises:
        Exception: whatever else the user's code raises, with its own traceback; running out of memory too, in a step
            that ranks take together, since the others wait in the middle of it.
    """
    forget_compiled()
    device_memory.release_cached()
    looseness.start()
    calls_per_step = steps.begin(batch_size)
    counted: list[StepPeaks] = []
    seconds: list[float] = []
    error_text, calls = "", 0
    try:
        for index in range((warmup_steps + measured_steps) * calls_per_step):
            begin = time.perf_counter()
            phase_peaks.start(steps.first_phase)
            error_text = _attempt(steps, device_memory, batch_size, index, together=together)
            end = time.perf_counter()
            step = phase_peaks.stop()
            too_much = not together and max(step.peak_bytes, step.peak_reserved_bytes or 0) > enough_bytes
            if error_text or too_much or index >= warmup_steps * calls_per_step:
                counted.append(step)
            if error_text:
                break
            calls += 1
            seconds.append(end - begin)
            if too_much:
                break
    finally:
        steps.end()
    if error_text:
        steps.let_go()
        gc.collect()
        device_memory.release_cached()
    phases = list(dict.fromkeys(phase for step in counted for phase in step.phase_peak_bytes))
    reserved = [step.peak_reserved_bytes for step in counted if step.peak_reserved_bytes is not None]
    timed = seconds[calls_per_step:] or seconds  # the first step at a size pays for pages and plans
    alike = [] if error_text else counted
    # the first of them finds nothing cached, which is no noise; where more go before it, they are not counted
    settled = alike if warmup_steps else alike[calls_per_step:]
    return Trial(
        batch_size=batch_size,
        outcome="out_of_memory" if error_text else "ok",
        phase_peak_bytes={phase: max(step.phase_peak_bytes.get(phase, 0) for step in counted) for phase in phases},
        noise_bytes=max(device_memory.granularity_bytes, _spread(settled, calls_per_step)),
        loose_share=looseness.share,
        peak_reserved_bytes=max(reserved, default=None),
        step_seconds=statistics.median(timed) if timed else None,
        measured_steps=len(alike) // calls_per_step,
        full_steps=calls // calls_per_step,
        samples_run=calls * batch_size,
        error=error_text,
    )


def with_evaluation(trial: Trial, evaluated: Trial) -> Trial:
    """A training trial and the validation that follows it, as one: validation is a phase of it."""
    reserved = [r for r in (trial.peak_reserved_bytes, evaluated.peak_reserved_bytes) if r is not None]
    return replace(
        trial,
        outcome=evaluated.outcome,
        phase_peak_bytes={**trial.phase_peak_bytes, **evaluated.phase_peak_bytes},
        peak_reserved_bytes=max(reserved, default=None),
        error=f"in validation: {evaluated.error}" if evaluated.error else "",
    )


def _attempt(steps: Steps, device_memory: DeviceMemory, batch_size: int, index: int, *, together: bool) -> str:
    """Run one step; the first line of the error when it ran out of memory, else an empty text."""
    try:
        steps.run(batch_size, index)
        device_memory.synchronize()
    except Exception as error:  # out of memory comes in many types; all else is raised again
        if not is_out_of_memory(error):
            raise
        if together:
            error.add_note(f"BatchFinder: in a step of {batch_size} samples that all ranks take together")
            raise
        _let_go(error)
        return _first_line(error)
    return ""


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _spread(steps: list[StepPeaks], calls_per_step: int) -> int:
    """By how much the peak of one phase differed between steps that do the same.

    Under gradient accumulation only every ``calls_per_step``-th does the same.
    """
    spread = 0
    for first in range(min(calls_per_step, len(steps))):
        alike = steps[first::calls_per_step]
        for phase in alike[0].phase_peak_bytes:
            values = [step.phase_peak_bytes[phase] for step in alike if phase in step.phase_peak_bytes]
            spread = max(spread, max(values) - min(values))
    return spread


def _let_go(error: BaseException | None) -> None:
    """Drop the tensors that a failed step's traceback holds (https://github.com/Lightning-AI/pytorch-lightning/issues/7335)."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
