"""Real training steps at one batch size, measured."""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_batchmem._lightning.step import begin_epoch, drop_batch, run_step
from lightning_batchmem.data import Samples
from lightning_batchmem.meters import Meter
from lightning_batchmem.meters.out_of_memory import is_out_of_memory
from lightning_batchmem.phases import PhaseMarks, StepPeaks
from lightning_batchmem.records import Trial


class StepWatcher(Callback):
    """Hands the hooks inside a probing step to the phase marks; the only callback that a probing step reaches.

    Args:
        marks: of the meter in use.
    """

    def __init__(self, marks: PhaseMarks) -> None:
        self._marks = marks

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Forward has ended."""
        self._marks.enter("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Backward has ended; unscaling, clipping and the optimizer follow."""
        self._marks.enter("optimizer_step")


def measure(
    trainer: Trainer,
    samples: Samples,
    meter: Meter,
    marks: PhaseMarks,
    batch_size: int,
    *,
    epoch_samples: int | None,
    warmup_steps: int,
    measured_steps: int,
) -> Trial:
    """Run real training steps at ``batch_size`` and say what they held and how long they took.

    Args:
        trainer: in a search.
        samples: what batches are made of.
        meter: the device that is asked.
        marks: of that meter, fed by a :class:`StepWatcher` in the trainer.
        batch_size: samples in each step.
        epoch_samples: samples in an epoch, for the number of batches that the module sees; ``None`` when unknown.
        warmup_steps: optimizer steps that are run first and not counted (lazy initialisation, autotuning, optimizer
            state).
        measured_steps: optimizer steps that are counted.

    Returns:
        The trial; running out of memory is an outcome of it.

    Raises:
        Exception: whatever else the user's code raises, with its own traceback.
    """
    meter.release_cached()
    micro_batches = begin_epoch(trainer, batches_in_epoch(epoch_samples, batch_size))
    peaks: list[StepPeaks] = []
    seconds: list[float] = []
    error_text = ""
    for index in range((warmup_steps + measured_steps) * micro_batches):
        begin = time.perf_counter()
        marks.start()
        error_text = _attempt(trainer, samples, meter, batch_size)
        end = time.perf_counter()
        step = marks.stop()
        if error_text:
            peaks.append(step)
            free_after_failure(trainer, meter)
            break
        if index >= warmup_steps * micro_batches:
            peaks.append(step)
            seconds.append(end - begin)
    phases = list(dict.fromkeys(phase for step in peaks for phase in step.phase_peak_bytes))
    reserved = [step.peak_reserved_bytes for step in peaks if step.peak_reserved_bytes is not None]
    return Trial(
        batch_size=batch_size,
        outcome="out_of_memory" if error_text else "ok",
        phase_peak_bytes={phase: max(step.phase_peak_bytes.get(phase, 0) for step in peaks) for phase in phases},
        noise_bytes=max(meter.resolution_bytes, _spread(peaks[: len(seconds)], micro_batches)),
        peak_reserved_bytes=max(reserved, default=None),
        step_seconds=statistics.median(seconds) if seconds else None,
        measured_steps=len(seconds) // micro_batches,
        error=error_text,
    )


def batches_in_epoch(epoch_samples: int | None, batch_size: int) -> float:
    """Batches of ``batch_size`` in an epoch, the last short one too; ``inf`` for a stream without a length."""
    return math.inf if epoch_samples is None else math.ceil(epoch_samples / batch_size)


def _attempt(trainer: Trainer, samples: Samples, meter: Meter, batch_size: int) -> str:
    """Run one step; the first line of the error when it ran out of memory, else an empty text."""
    try:
        run_step(trainer, lambda: samples.batch(batch_size))
        meter.synchronize()
    except Exception as error:  # out of memory comes in many types; all else is raised again
        if not is_out_of_memory(error):
            raise
        _let_go(error)
        return _first_line(error)
    return ""


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _spread(steps: list[StepPeaks], micro_batches: int) -> int:
    """By how much the peak of one phase differed between steps that do the same.

    Under gradient accumulation only every ``micro_batches``-th does the same.
    """
    spread = 0
    for first in range(min(micro_batches, len(steps))):
        alike = steps[first::micro_batches]
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


def free_after_failure(trainer: Trainer, meter: Meter) -> None:
    """Give back what a step that was cut short still holds: gradients, results, cached blocks."""
    for parameter in trainer.lightning_module.parameters():
        parameter.grad = None
    drop_batch(trainer)
    gc.collect()
    meter.release_cached()
