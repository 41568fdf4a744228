"""Consecutive steps of one kind and size, which the meter of their trial reads."""

from __future__ import annotations

import itertools
import time
from typing import NamedTuple

from lightning_batchmem.devices.base import PeakCounter
from lightning_batchmem.devices.peaks import LiveStorages, StepPeaks
from lightning_batchmem.search.meter import TrialMeter
from lightning_batchmem.search.program import Steps

GRAPH_WARMUP_STEPS = 3
"""The least warm-up steps of a compiled module: CUDA graphs warm up, record and replay."""

MAX_WARMUP_STEPS = 20
"""Warm-up ends here even if an optimizer has not stepped.

fp16 skips the first steps while it looks for its loss scale.
"""


class CallReading(NamedTuple):
    """Peaks and time of one call of :meth:`.Steps.run`, and whether an optimizer stepped."""

    peaks: StepPeaks
    seconds: float
    has_stepped: bool


class ConsecutiveSteps:
    """Steps of one kind and size that follow each other, between their begin and end."""

    def __init__(self, meter: TrialMeter, steps: Steps, batch_size: int) -> None:
        self._meter = meter
        self._steps = steps
        self._batch_size = batch_size
        self._calls = 1

    def __enter__(self) -> ConsecutiveSteps:
        self._calls = self._steps.begin(self._batch_size)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._steps.complete()
        finally:
            self._steps.end()

    def warm_up(self, steps: int) -> None:
        """Run at least so many steps, until every optimizer has its state; no time counts.

        Their peaks count on a device. Only these steps show what a CUDA graph needs, because a
        replay allocates nothing, and what a library tries before it chooses an algorithm.
        """
        meter = self._meter
        waiting: set[int] = set()
        if self._steps.first_phase == "forward":
            waiting = {id(optimizer) for optimizer in meter.program.optimizers}
        for number in range(MAX_WARMUP_STEPS):
            at_least = GRAPH_WARMUP_STEPS if meter.is_compiled else steps
            if number >= at_least and not waiting:
                break
            calls = self._full_step(0, meter.step_counter)
            if meter.device.reports_requested_bytes:
                self._add_peaks(calls)
            waiting -= meter.program.phases.stepped
        meter.has_idle_optimizer |= bool(waiting)
        meter.is_warm = True
        if not meter.device.reports_requested_bytes and meter.is_compiled:
            # A compiled module allocates without operators that a dispatch mode could count.
            meter.live = None

    def run(self, count: int) -> None:
        """Run steps whose peaks count."""
        for number in range(count):
            self._add_peaks(self._full_step(number, self._meter.step_counter))

    def run_others(self) -> None:
        """Run each other batch that a loader has formed itself once; their peaks count."""
        for number in range(self._steps.num_other_batches):
            calls = self._full_step(number, self._meter.step_counter, other_lengths=True)
            self._add_peaks(calls)

    def run_once(self) -> None:
        """Run a step whose peaks and times count."""
        calls = self._full_step(0, self._meter.step_counter)
        self._add_peaks(calls)
        self._add_times(calls)

    def run_timed(self, *, equally_many: bool) -> None:
        """Run steps whose peaks and times count, more of them where they are quick.

        Args:
            equally_many: whether their number must not depend on their time.
        """
        policy = self._meter.policy
        # With the batches, which may take much longer than the steps.
        begin = time.perf_counter()
        for number in itertools.count():
            is_enough = equally_many or time.perf_counter() - begin >= policy.timed_seconds
            if number >= policy.timed_steps and is_enough:
                break
            calls = self._full_step(number, self._meter.step_counter)
            self._add_peaks(calls)
            self._add_times(calls)

    def run_steady(self, count: int) -> list[int]:
        """Run steps, every other one with batches of other lengths; returns the peak of each."""
        meter = self._meter
        peaks_bytes = []
        for number in range(count):
            has_other_lengths = number % 2 == 1
            calls = self._full_step(number, meter.step_counter, other_lengths=has_other_lengths)
            self._add_peaks(calls)
            # The micro batches of a step differ in any case: only the later ones have gradients.
            peaks_bytes.append(max(call.peaks.peak_bytes for call in calls))
            if not has_other_lengths:
                self._add_times(calls)
        return peaks_bytes

    def measure_live_bytes(self) -> None:
        """Count live bytes with a dispatch mode, unless the device counts them itself."""
        meter = self._meter
        counter = meter.live
        if not isinstance(counter, LiveStorages):
            return
        meter.track_lasting(counter)
        with counter:
            # The first step only finds everything else that the module holds.
            self._full_step(0, counter)
            calls = self._full_step(0, counter)
            for number in range(self._steps.num_other_batches):
                calls += self._full_step(number, counter, other_lengths=True)
        meter.step_peaks += [call.peaks for call in calls]

    def _full_step(
        self, number: int, counter: PeakCounter, *, other_lengths: bool = False
    ) -> list[CallReading]:
        """Run one full step, and note the bytes that it holds unless live bytes are counted."""
        meter = self._meter
        steps = self._steps
        phases = meter.program.phases
        phases.read_from(counter)
        meter.before_step()
        counters_before = meter.device.counters()
        readings = []
        for call in range(self._calls):
            index = number * self._calls + call
            phases.start(steps.first_phase)
            # Loader workers make the batches of a training while the device computes.
            steps.make_batch(self._batch_size, index, other_lengths=other_lengths)
            # A loop may make its batch on the device, which works on it while the host goes on.
            meter.device.synchronize()
            begin = time.perf_counter()
            steps.run()
            meter.device.synchronize()
            seconds = time.perf_counter() - begin
            peaks = phases.stop()
            readings.append(CallReading(peaks, seconds, bool(phases.stepped)))
            if not isinstance(counter, LiveStorages):
                meter.note_held_bytes(peaks)
            meter.samples += self._batch_size
        meter.note_retries(steps.first_phase, self._batch_size, counters_before)
        if steps is meter.primary:
            meter.full_steps += 1
        return readings

    def _add_peaks(self, calls: list[CallReading]) -> None:
        if not isinstance(self._meter.live, LiveStorages):
            self._meter.step_peaks += [call.peaks for call in calls]

    def _add_times(self, calls: list[CallReading]) -> None:
        if self._steps is self._meter.primary:
            for call in calls:
                if call.has_stepped:
                    self._meter.stepping_seconds.append(call.seconds)
                else:
                    self._meter.other_seconds.append(call.seconds)
