"""Consecutive steps of one kind and size, and the readings that they leave."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

import torch

from lightning_batchmem.devices.base import DeviceMemory, PeakCounter
from lightning_batchmem.devices.peaks import LiveStorages, RequestedBytes, StepPeaks
from lightning_batchmem.devices.tensors import bytes_of, tensors_in
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.search.compiled import compiled_frames
from lightning_batchmem.search.readings import CallReading, TrialReadings
from lightning_batchmem.search.session import Session, Steps

RunStep = Callable[[int, int], None]


class OverLimitError(Exception):
    """A step held more bytes than the steps of its trial may hold."""


class StepMeter:
    """Reads live bytes, held bytes and times of the steps of a session.

    Live bytes are what lines are fitted to. Where the device cannot count them, as on the host, a
    dispatch mode counts them in steps of their own, because counting uses memory itself. Where that
    is not possible either, ``live`` is ``None`` and the held bytes stand in for them.
    """

    def __init__(self, session: Session, device: DeviceMemory, policy: SearchPolicy) -> None:
        self.session = session
        self.device = device
        self.policy = policy
        # This function is called before each full step.
        self.before_step: Callable[[], object] = lambda: None
        self.has_idle_optimizer = False
        # Until a probe has passed, a step has to find the storages that the module holds.
        self.is_first_size = True
        self._evictable_bytes = device.evictable_bytes()
        self._frames_before = compiled_frames()
        self.live: RequestedBytes | LiveStorages | None = self._live_counter()

    @property
    def is_compiled(self) -> bool:
        """Whether a step of this stage was compiled by ``torch.compile``."""
        return compiled_frames() > self._frames_before

    @property
    def warmup_steps(self) -> int:
        return self.policy.graph_warmup_steps if self.is_compiled else self.policy.warmup_steps

    @property
    def step_counter(self) -> PeakCounter:
        """Counts the peaks of steps that are not run to count live bytes."""
        return self.live if isinstance(self.live, RequestedBytes) else self.device

    def live_bytes(self) -> int:
        """Live bytes at this moment; held bytes where live bytes cannot be counted."""
        return (self.live or self.device).current().allocated_bytes

    def held_bytes(self) -> int:
        """Bytes that this process holds at this moment."""
        stats = self.device.current()
        held_bytes = stats.allocated_bytes if stats.reserved_bytes is None else stats.reserved_bytes
        return held_bytes - self._uncounted_bytes()

    def peak_held_bytes(self, peaks: StepPeaks) -> int:
        """Bytes that this process held at the peak of a step."""
        return (peaks.peak_reserved_bytes or peaks.peak_bytes) - self._uncounted_bytes()

    def gradient_bytes(self) -> int:
        gradients = (parameter.grad for parameter in self.session.module.parameters())
        return bytes_of(gradient for gradient in gradients if gradient is not None)

    def optimizer_state_bytes(self) -> int:
        """Bytes of the optimizer states in host memory."""
        states = [optimizer.state for optimizer in self.session.optimizers]
        return bytes_of(tensors_in(states), torch.device("cpu"))

    def checkpoint_bytes(self) -> int | None:
        """Host memory that saving a checkpoint copies; ``None`` where the training saves none."""
        states = self.session.checkpoint_states()
        return None if states is None else bytes_of(tensors_in(states), torch.device("cpu"))

    def track_lasting(self, counter: LiveStorages) -> None:
        """Count optimizer states and gradients, which earlier steps made, without keeping them."""
        counter.track(tensors_in([optimizer.state for optimizer in self.session.optimizers]))
        counter.track(tensors_in([p.grad for p in self.session.module.parameters()]))

    def _uncounted_bytes(self) -> int:
        """Bytes of the search's samples, and of files that were mapped since the start.

        The kernel drops pages of files before it ends a process.
        """
        new_bytes = self.device.evictable_bytes() - self._evictable_bytes
        return self._sample_bytes() + max(0, new_bytes)

    def _sample_bytes(self) -> int:
        """Bytes of the samples that the search keeps in the resident set."""
        if not self.device.held_is_resident_set:
            return 0
        steps = (self.session.training, self.session.evaluation)
        return sum(s.sample_bytes for s in steps if s is not None)

    def _live_counter(self) -> RequestedBytes | LiveStorages | None:
        if self.device.counts_live_bytes:
            return RequestedBytes(self.device)
        if self.session.steps_are_collective or not LiveStorages.is_possible():
            return None
        self.device.release_cached()
        tensors = [*self.session.module.parameters(), *self.session.module.buffers()]
        counter = LiveStorages()
        counter.track(tensors)
        tensor_bytes = counter.current().allocated_bytes
        other_bytes = self.device.current().allocated_bytes - self._sample_bytes() - tensor_bytes
        counter = LiveStorages(max(0, other_bytes))
        counter.track(tensors)
        return counter


class ConsecutiveSteps:
    """Steps of one kind and size that follow each other, between their begin and end."""

    def __init__(
        self, meter: StepMeter, steps: Steps, batch_size: int, readings: TrialReadings
    ) -> None:
        self._meter = meter
        self._steps = steps
        self._batch_size = batch_size
        self._readings = readings
        self._calls = 1

    def __enter__(self) -> ConsecutiveSteps:
        self._calls = self._steps.begin(self._batch_size)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._steps.complete()
        finally:
            self._steps.end()

    def warm_up(self, at_least: int) -> None:
        """Run until every optimizer has stepped, so that its state exists; no peak counts."""
        meter = self._meter
        waiting: set[int] = set()
        if self._steps.first_phase == "forward":
            waiting = {id(optimizer) for optimizer in meter.session.optimizers}
        for step in range(meter.policy.max_warmup_steps):
            if step >= at_least and not waiting:
                break
            self._full_step(self._steps.run, 0, meter.step_counter)
            waiting -= meter.session.phases.stepped
        meter.has_idle_optimizer |= bool(waiting)
        if not meter.device.counts_live_bytes and meter.is_compiled:
            # A compiled module allocates without operators that a dispatch mode could count.
            meter.live = None

    def run(self, count: int) -> None:
        """Run steps whose peaks count."""
        for number in range(count):
            self._add_peaks(self._full_step(self._steps.run, number, self._meter.step_counter))

    def run_others(self) -> None:
        """Run each other batch that a loader has formed itself once; their peaks count."""
        for number in range(self._steps.num_other_batches):
            run_other = self._steps.run_other_lengths
            self._add_peaks(self._full_step(run_other, number, self._meter.step_counter))

    def run_timed(self, *, equally_many: bool) -> None:
        """Run steps whose peaks and times count: fewer slow steps, and more quick ones.

        Args:
            equally_many: whether their number must not depend on their time.
        """
        policy = self._meter.policy
        total_seconds = 0.0
        for number in range(policy.max_timed_steps):
            is_enough = equally_many or total_seconds >= policy.timed_seconds
            if number >= policy.timed_steps and is_enough:
                break
            calls = self._full_step(self._steps.run, number, self._meter.step_counter)
            self._add_peaks(calls)
            self._add_times(calls)
            step_seconds = sum(call.seconds for call in calls)
            total_seconds += step_seconds
            if step_seconds > policy.slow_step_seconds and not equally_many:
                break

    def run_steady(self, count: int) -> list[int]:
        """Run steps, every other one with batches of other lengths; returns the held bytes."""
        readings = self._readings
        first = len(readings.held_bytes)
        for number in range(count):
            if number % 2 == 1:
                run_other = self._steps.run_other_lengths
                self._add_peaks(self._full_step(run_other, number, self._meter.step_counter))
            else:
                calls = self._full_step(self._steps.run, number, self._meter.step_counter)
                self._add_peaks(calls)
                self._add_times(calls)
                readings.steady_held_bytes.append(max(readings.held_bytes[-len(calls) :]))
        return readings.held_bytes[first:]

    def count_live_bytes(self) -> None:
        """Count live bytes with a dispatch mode, unless the device counts them itself."""
        counter = self._meter.live
        if not isinstance(counter, LiveStorages):
            return
        self._meter.track_lasting(counter)
        with counter:
            if self._meter.is_first_size:
                # This step only finds everything else that the module holds.
                self._full_step(self._steps.run, 0, counter)
            counter.largest_heap_block_bytes = 0
            calls = self._full_step(self._steps.run, 0, counter)
            for number in range(self._steps.num_other_batches):
                calls += self._full_step(self._steps.run_other_lengths, number, counter)
        if self._steps is self._readings.primary:
            self._readings.heap_block_bytes = counter.largest_heap_block_bytes
        self._readings.step_peaks += [call.peaks for call in calls]

    def _full_step(self, run: RunStep, number: int, counter: PeakCounter) -> list[CallReading]:
        """Run one full step, and note the bytes that it holds unless live bytes are counted."""
        meter = self._meter
        phases = meter.session.phases
        phases.read_from(counter)
        meter.before_step()
        readings = []
        for call in range(self._calls):
            begin = time.perf_counter()
            phases.start(self._steps.first_phase)
            run(self._batch_size, number * self._calls + call)
            meter.device.synchronize()
            seconds = time.perf_counter() - begin
            peaks = phases.stop()
            readings.append(CallReading(peaks, seconds, bool(phases.stepped)))
            if not isinstance(counter, LiveStorages):
                self._note_held_bytes(peaks)
            self._readings.samples += self._batch_size
        if self._steps is self._readings.primary:
            self._readings.full_steps += 1
        return readings

    def _note_held_bytes(self, peaks: StepPeaks) -> None:
        held_bytes = self._meter.peak_held_bytes(peaks)
        self._readings.held_bytes.append(held_bytes)
        if held_bytes > self._readings.most_held_bytes:
            raise OverLimitError

    def _add_peaks(self, calls: list[CallReading]) -> None:
        if not isinstance(self._meter.live, LiveStorages):
            self._readings.step_peaks += [call.peaks for call in calls]

    def _add_times(self, calls: list[CallReading]) -> None:
        if self._steps is self._readings.primary:
            for call in calls:
                if call.has_stepped:
                    self._readings.stepping_seconds.append(call.seconds)
                else:
                    self._readings.other_seconds.append(call.seconds)
