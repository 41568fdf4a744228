"""Steps of a search: run them, and record what they use."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_batchmem.devices.base import DeviceMemory, PeakCounter
from lightning_batchmem.devices.peaks import LiveStorages, PhasePeaks, RequestedBytes, StepPeaks
from lightning_batchmem.devices.tensors import bytes_of, tensors_in
from lightning_batchmem.search.compiled import compiled_frames
from lightning_batchmem.search.steps import Steps

# The warm-up has at most so many steps until every optimizer has stepped. Under fp16 the first
# steps are skipped while the loss scale is found.
_MAX_WARMUP_STEPS = 20


class PhaseCallback(Callback):
    """Mark where the phases of a step begin; the only callback that steps of a search reach."""

    def __init__(self, device: DeviceMemory) -> None:
        self.peaks = PhasePeaks(device)
        self.stepped: set[int] = set()

    def watch(self, optimizers: Iterable[Optimizer]) -> list[RemovableHandle]:
        """Mark the end of each optimizer's step, which Lightning has no hook for."""
        self.stepped.clear()

        def after_step(optimizer: Optimizer, *_: Any) -> None:
            self.stepped.add(id(optimizer))
            # A second forward pass follows under manual optimization.
            self.peaks.enter("forward")

        return [optimizer.register_step_post_hook(after_step) for optimizer in optimizers]

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        self.peaks.enter("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.peaks.enter("optimizer_step")


@dataclass
class StepRecords:
    """Memory and time that the steps of one trial used."""

    # Only the times and the full steps of these steps count.
    main: Steps
    # These are the peaks of live bytes of each counted step.
    exact: list[StepPeaks] = field(default_factory=list)
    # Each step held so many bytes at its peak.
    held_bytes: list[int] = field(default_factory=list)
    # Each timed call took so long.
    seconds: list[float] = field(default_factory=list)
    calls: int = 0
    full_steps: int = 0
    samples: int = 0
    fixed_bytes: int = 0
    reserve_bytes: int = 0
    error: str = ""
    # A step that holds more bytes ends the series.
    most_held_bytes: float = math.inf

    def phase_peaks(self) -> dict[str, int]:
        phases = dict.fromkeys(phase for step in self.exact for phase in step.phase_peak_bytes)
        return {
            phase: max(step.phase_peak_bytes.get(phase, 0) for step in self.exact)
            for phase in phases
        }


class OverLimitError(Exception):
    """A step held more than its series may hold."""


class StepRunner:
    def __init__(
        self,
        trainer: Trainer,
        device: DeviceMemory,
        callback: PhaseCallback,
        *,
        samples_bytes: int = 0,
        counts_live: bool = True,
    ) -> None:
        self.trainer = trainer
        self.device = device
        self.callback = callback
        self.is_host = device.held_is_resident_set
        self._samples_bytes = samples_bytes if self.is_host else 0
        self._file_bytes = device.evictable_bytes()
        self.live = self._live_counter(counts_live)
        self._frames_before = compiled_frames()
        # This is true if an optimizer did not step while others warmed up.
        self.has_idle_optimizer = False

    @property
    def is_compiled(self) -> bool:
        return compiled_frames() > self._frames_before

    def current_bytes(self) -> int:
        """Live bytes at this moment; the resident set where they cannot be counted."""
        return (self.live or self.device).current().allocated_bytes

    def series(
        self,
        steps: Steps,
        batch_size: int,
        record: StepRecords,
        body: Callable[[Steps, int, StepRecords], Any],
    ) -> Any:
        """Run steps of one kind that follow each other."""
        record.calls = steps.begin(batch_size)
        try:
            return body(steps, batch_size, record)
        finally:
            steps.end()

    def warm_up(self, steps: Steps, batch_size: int, record: StepRecords, *, at_least: int) -> None:
        """Run until every optimizer has stepped, so that its state exists."""
        optimizers: set[int] = set()
        if steps.first_phase == "forward":
            optimizers = {id(optimizer) for optimizer in self.trainer.optimizers}
        for step in range(_MAX_WARMUP_STEPS):
            if step >= at_least and self.callback.stepped.issuperset(optimizers):
                break
            self.run(steps, batch_size, record, 1, counted=False)
        else:
            self.has_idle_optimizer = not self.callback.stepped.issuperset(optimizers)
        if self.is_host and self.is_compiled:
            # A compiled module allocates without operators that could be counted.
            self.live = None

    def run(
        self,
        steps: Steps,
        batch_size: int,
        record: StepRecords,
        count: int,
        *,
        live: bool = False,
        counted: bool = True,
        timed: bool = False,
        varied: bool = False,
    ) -> None:
        """Run full steps.

        ``live`` counts storages on the host, ``varied`` takes other lengths in every other step.
        """
        counter: PeakCounter = self.device
        if self.live is not None and (live or not self.is_host):
            counter = self.live
        elif self.live is not None:
            # The resident set is read in this case, and it does not consist of live bytes.
            counted = False
        with counter if isinstance(counter, LiveStorages) else nullcontext():
            for step in range(count):
                peaks = self.callback.peaks
                peaks.read_from(counter)
                is_varied = varied and step % 2 == 1
                for call in range(record.calls):
                    begin = time.perf_counter()
                    peaks.start(steps.first_phase)
                    steps.run(batch_size, step * record.calls + call, varied=is_varied)
                    self.device.synchronize()
                    seconds = time.perf_counter() - begin
                    found = peaks.stop()
                    record.exact += [found] if counted else []
                    record.seconds += [seconds] if timed and steps is record.main else []
                    if not live:
                        held_bytes = found.peak_bytes
                        if not self.is_host:
                            held_bytes = found.peak_reserved_bytes or found.peak_bytes
                        record.held_bytes.append(held_bytes - self._not_counted_bytes())
                        if record.held_bytes[-1] > record.most_held_bytes:
                            raise OverLimitError
                    record.samples += batch_size
                record.full_steps += steps is record.main

    def track_lasting(self) -> None:
        """Count optimizer states and gradients of earlier steps, without keeping them alive."""
        if isinstance(self.live, LiveStorages):
            self.live.track(tensors_in([optimizer.state for optimizer in self.trainer.optimizers]))
            parameters = self.trainer.lightning_module.parameters()
            self.live.track(tensors_in([parameter.grad for parameter in parameters]))

    def held_bytes(self) -> int:
        """Bytes that this process has taken from the device at this moment."""
        stats = self.device.current()
        held_bytes = stats.allocated_bytes if stats.reserved_bytes is None else stats.reserved_bytes
        return held_bytes - self._not_counted_bytes()

    def _not_counted_bytes(self) -> int:
        """Bytes of the search's samples, and of files mapped since the start.

        The kernel drops the pages of such files first.
        """
        new_bytes = self.device.evictable_bytes() - self._file_bytes
        return self._samples_bytes + max(0, new_bytes)

    def state_bytes(self, callbacks: Iterable[Callback]) -> int:
        """Bytes of weights, optimizer and callback state.

        Saving a checkpoint copies them in host memory.
        """
        states = [
            *(optimizer.state for optimizer in self.trainer.optimizers),
            *(one.state_dict() for one in callbacks),
        ]
        tensors = tensors_in([self.trainer.lightning_module.state_dict(), *states])
        return bytes_of(tensors, torch.device("cpu"))

    def gradient_bytes(self) -> int:
        gradients = (parameter.grad for parameter in self.trainer.lightning_module.parameters())
        return bytes_of(gradient for gradient in gradients if gradient is not None)

    def _live_counter(self, counts_live: bool) -> LiveStorages | RequestedBytes | None:
        if not self.is_host:
            return RequestedBytes(self.device)
        if not counts_live or not LiveStorages.is_possible():
            return None
        self.device.release_cached()
        module = self.trainer.lightning_module
        tensors = [*module.parameters(), *module.buffers()]
        counter = LiveStorages()
        counter.track(tensors)
        tensor_bytes = counter.current().allocated_bytes
        other_bytes = self.device.current().allocated_bytes - self._samples_bytes - tensor_bytes
        counter = LiveStorages(max(0, other_bytes))
        counter.track(tensors)
        return counter
