"""Consecutive steps of one kind and size, which the meter of their trial reads."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import time
from contextlib import nullcontext

import numpy as np
import torch

from lightning_batchmem.devices.cpu import waited_seconds
from lightning_batchmem.devices.peaks import LiveStorages
from lightning_batchmem.search.meter import TrialMeter
from lightning_batchmem.search.program import Steps
from lightning_batchmem.search.readings import StepReading

GRAPH_WARMUP_STEPS = 3
"""The least warm-up steps of a compiled module: CUDA graphs warm up, record and replay."""

MAX_WARMUP_STEPS = 20
"""Warm-up ends here even if an optimizer has not stepped.

fp16 skips the first steps while it looks for its loss scale.
"""


LARGEST_EVERY = 10
"""The last of this many mixed steps has the largest batch, which meets blocks of the others."""

COUNTED_STEPS = 2
"""Steps in which live bytes are counted. The first finds everything else that the module holds."""


class ConsecutiveSteps:
    """Steps of one kind and size that follow each other, between their begin and end.

    Args:
        meter: reads them.
        steps: their kind.
        batch_size: samples in each batch.
        most_steps: at most this many full steps are run; those that count live bytes always are.
    """

    def __init__(
        self, meter: TrialMeter, steps: Steps, batch_size: int, most_steps: float = math.inf
    ) -> None:
        self._meter = meter
        self._steps = steps
        self._batch_size = batch_size
        self._steps_left = most_steps
        # How often the program runs in each of them.
        self.calls_per_step = 1
        # How often the program has run in these steps.
        self.num_calls = 0
        # How often it has drawn random numbers on the CPU. Those of dropout are of the device.
        self.num_draws = 0

    def __enter__(self) -> ConsecutiveSteps:
        self.calls_per_step = self._steps.begin(self._batch_size)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._steps.complete()
        finally:
            self._steps.end()

    def warm_up(self, steps: int) -> None:
        """Run at least this many steps, until every optimizer has its state; no time counts.

        Their peaks count on a device. Only these steps show what a CUDA graph needs, because a
        replay allocates nothing, and what a library tries before it chooses an algorithm.
        """
        meter = self._meter
        waiting: set[int] = set()
        if self._steps.first_phase == "forward":
            waiting = {id(optimizer) for optimizer in meter.program.optimizers}
        # A steady step follows, and those that count live bytes.
        for number in self._numbers(MAX_WARMUP_STEPS, spared=1 + COUNTED_STEPS):
            at_least = GRAPH_WARMUP_STEPS if meter.is_compiled else steps
            if number >= at_least and not waiting:
                break
            self._step(0, has_peaks=meter.device.reports_requested_bytes)
            waiting -= meter.program.phases.stepped
        meter.end_warm_up(all_have_stepped=not waiting)

    def run(self, count: int) -> list[StepReading]:
        """Run steps whose peaks count."""
        readings = []
        for number in range(count):
            readings.append(self._step(number))
        return readings

    def run_others(self) -> None:
        """Run each other batch that a loader has formed itself once; their peaks count."""
        for number in self._numbers(self._steps.num_other_batches, spared=COUNTED_STEPS):
            self._step(number, other_lengths=True)

    def run_mixed(self, count: int) -> None:
        """Run steps whose peaks count, as a training does: batches of other lengths come first."""
        for number in range(count):
            self._step(number, other_lengths=(number + 1) % LARGEST_EVERY > 0)

    def run_timed(self, count: int, seconds: float) -> None:
        """Run steps whose peaks and times count.

        Args:
            count: the least number of them.
            seconds: the least wall time of all of them; 0 where their number must not depend on it.
        """
        # With the batches, which may take much longer than the steps.
        begin = time.perf_counter()
        for number in itertools.count():
            if number >= count and time.perf_counter() - begin >= seconds:
                break
            self._step(number, has_times=True)

    def run_steady(self, count: int) -> list[StepReading]:
        """Run steps, every other one with batches of other lengths."""
        readings = []
        for number in self._numbers(count):
            is_other = number % 2 == 1
            readings.append(self._step(number, other_lengths=is_other, has_times=not is_other))
        return readings

    def run_more(self, count: int) -> list[StepReading]:
        """Run steady steps besides those that are allowed: few do not show what is random."""
        self._steps_left += count
        return self.run_steady(count)

    def run_equal(self, count: int) -> list[StepReading]:
        """Run steps on one batch; live bytes are counted in them."""
        counter = self._meter.dispatch_counter()
        readings = []
        with counter or nullcontext():
            for _ in self._numbers(count):
                readings.append(self._step(0, counter=counter))
        return readings

    def measure_live_bytes(self) -> list[StepReading]:
        """Count live bytes with a dispatch mode, unless the device counts them itself."""
        counter = self._meter.dispatch_counter()
        if counter is None:
            return []
        with counter:
            readings = [self._step(0, has_peaks=False, counter=counter)]
            readings.append(self._step(0, counter=counter))
            for number in self._numbers(self._steps.num_other_batches):
                self._step(number, other_lengths=True, counter=counter)
        return readings

    def _numbers(self, count: int, spared: int = 0) -> range:
        """The numbers of steps: this many, as far as others are left besides those to spare."""
        return range(int(min(count, self._steps_left - spared)))

    def _step(
        self,
        number: int,
        *,
        other_lengths: bool = False,
        has_peaks: bool = True,
        has_times: bool = False,
        counter: LiveStorages | None = None,
    ) -> StepReading:
        """Run one full step; the meter keeps its reading too."""
        self._steps_left -= 1
        meter = self._meter
        steps = self._steps
        is_primary = steps is meter.program.primary
        is_repeated = meter.repeats(self._batch_size, is_primary=is_primary)
        # Where a dispatch mode counts live bytes, only steps in it have the peaks of the trial.
        is_counted_apart = counter is None and isinstance(meter.live, LiveStorages)
        meter.before_step()
        # What follows an epoch happens once in it, and no step repeats it.
        steps.begin_step(self._batch_size)
        before = meter.device.counters()
        after = before
        end_bytes = None
        calls = []
        try:
            for call in range(self.calls_per_step):
                index = number * self.calls_per_step + call
                meter.begin_call(steps.first_phase, counter)
                # Loader workers make the batches of a training while the device computes.
                steps.make_batch(self._batch_size, index, other_lengths=other_lengths)
                # A loop may make its batch on the device, which works on it while the host goes on.
                meter.device.synchronize()
                # Only there they matter, and on the host they would count as live bytes.
                counts_draws = meter.device.reports_requested_bytes
                states = _random_states() if counts_draws else b""
                begin = self._seconds()
                steps.run()
                self.num_calls += 1
                meter.device.synchronize()
                calls.append(meter.end_call(self._seconds() - begin, counter))
                self.num_draws += counts_draws and _random_states() != states
            after = meter.device.counters()
            if not is_counted_apart:
                end_bytes = meter.end_bytes()
        finally:
            # The readings of the calls before an error are kept.
            reading = StepReading(
                is_primary,
                self._batch_size,
                tuple(calls),
                is_complete=len(calls) == self.calls_per_step,
                has_peaks=has_peaks and not is_counted_apart,
                has_times=has_times and is_primary,
                is_repeated=is_repeated,
                allocator_retries=_increase("num_alloc_retries", before, after),
                caught_errors=_increase("num_ooms", before, after),
                end_bytes=end_bytes,
            )
            meter.keep(reading)
        return reading

    def _seconds(self) -> float:
        """A clock that stops while other processes have the cores, where the device is the CPU.

        Sizes are timed one after the other, and other processes are not equally busy meanwhile.
        """
        if not self._meter.device.is_host:
            return time.perf_counter()
        while True:
            waited = waited_seconds()
            now = time.perf_counter()
            # Both were read in one turn of this process.
            if waited_seconds() == waited:
                return now - waited


def _random_states() -> bytes:
    """The random states on the CPU, which change where a random number is drawn."""
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state().numpy())
    return pickle.dumps(states)


def _increase(name: str, before: dict[str, int], after: dict[str, int]) -> int:
    return after.get(name, 0) - before.get(name, 0)
