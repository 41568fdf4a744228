"""The meter of one trial: runs its steps, and reads live bytes, held bytes and times."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from lightning_batchmem.devices.base import DeviceMemory, PeakCounter
from lightning_batchmem.devices.optimizers import state_tensors
from lightning_batchmem.devices.peaks import LiveStorages, RequestedBytes
from lightning_batchmem.devices.tensors import bytes_of, tensors_in
from lightning_batchmem.search.compiled import compiled_frames
from lightning_batchmem.search.program import Program, Steps
from lightning_batchmem.search.readings import CallReading, StepReading


def other_bytes_at_start(program: Program, device: DeviceMemory) -> int:
    """Bytes of the resident set besides the tensors of the module and the samples.

    They count as live bytes of every trial, so that live bytes can be compared with the limit.
    Where the device counts live bytes itself there are none.
    """
    if device.reports_requested_bytes:
        return 0
    device.release_cached()
    module_bytes = _module_counter(program, 0).current().allocated_bytes
    other_bytes = device.current().allocated_bytes - _sample_bytes(program, device) - module_bytes
    return max(0, other_bytes)


class TrialMeter:
    """Runs the steps of one trial, and keeps a reading of each.

    It is made after the restart of the program, so that it knows nothing of other trials.

    Live bytes are what lines are fitted to. Where the device cannot count them, as on the host, a
    dispatch mode counts them in steps of their own, because counting uses memory itself. Where this
    is not possible either, the held bytes stand in for them.

    Args:
        program: the program whose steps are run.
        device: the memory that is read.
        other_bytes: live bytes at the start of the search that are not tensors of the module.
        before_step: this function is called before each full step.

    Attributes:
        readings: a reading of each full step.
        live: counts live bytes; ``None`` where the held bytes stand in for them.
        start_bytes: live bytes before the first step, or where :meth:`start_again` was called.
        fixed_bytes: live bytes that last from one step to the next, without gradients.
        has_idle_optimizer: whether an optimizer did not step in a warm-up.
    """

    def __init__(
        self,
        program: Program,
        device: DeviceMemory,
        other_bytes: int,
        before_step: Callable[[], object] = lambda: None,
    ) -> None:
        self.program = program
        self.device = device
        self.readings: list[StepReading] = []
        self.live: RequestedBytes | LiveStorages | None = None
        if device.reports_requested_bytes:
            self.live = RequestedBytes(device)
        elif not program.steps_are_collective and LiveStorages.is_possible():
            self.live = _module_counter(program, other_bytes)
        self.start_bytes = self._live_bytes()
        self.fixed_bytes = 0
        self.has_idle_optimizer = False
        self._before_step = before_step
        self._frames_before = compiled_frames()
        # Whether every optimizer has its state.
        self._is_warm = False

    @property
    def is_compiled(self) -> bool:
        """Whether a step of this trial was compiled by ``torch.compile``."""
        return compiled_frames() > self._frames_before

    def run_step(
        self,
        steps: Steps,
        batch_size: int,
        number: int,
        calls: int,
        *,
        other_lengths: bool = False,
        has_peaks: bool = True,
        has_times: bool = False,
        counter: LiveStorages | None = None,
    ) -> StepReading:
        """Run one full step, and return what it used.

        Args:
            steps: the steps of the program, which have begun.
            batch_size: samples in each batch.
            number: the number of the full step since they have begun.
            calls: calls of ``steps.run`` to a full step.
            other_lengths: whether its batches have samples of other sizes.
            has_peaks: whether its peaks are peaks of the trial.
            has_times: whether its times are times of the trial.
            counter: the dispatch mode in which it runs; ``None``: the device is read.
        """
        is_primary = steps is self.program.primary
        is_repeated = self._is_warm and any(
            (one.is_primary, one.batch_size) == (is_primary, batch_size) for one in self.readings
        )
        self._before_step()
        before = self.device.counters()
        after = before
        readings: list[CallReading] = []
        try:
            for call in range(calls):
                index = number * calls + call
                make_batch = partial(
                    steps.make_batch, batch_size, index, other_lengths=other_lengths
                )
                readings.append(self._run_call(steps, make_batch, counter))
            after = self.device.counters()
        finally:
            # The readings of the calls before an error are kept.
            reading = StepReading(
                is_primary,
                batch_size,
                tuple(readings),
                is_complete=len(readings) == calls,
                has_peaks=has_peaks,
                has_times=has_times and is_primary,
                is_repeated=is_repeated,
                allocator_retries=_increase("num_alloc_retries", before, after),
                caught_errors=_increase("num_ooms", before, after),
            )
            self.readings.append(reading)
        return reading

    def end_warm_up(self, *, all_have_stepped: bool) -> None:
        """Take the next steps for steady ones."""
        self._is_warm = True
        if not all_have_stepped:
            self.has_idle_optimizer = True
        if not self.device.reports_requested_bytes and self.is_compiled:
            # A compiled module allocates without operators that a dispatch mode could count.
            self.live = None

    def start_again(self) -> None:
        """Read the live bytes at the start again: earlier steps left what a training has too."""
        self.start_bytes = self._live_bytes()

    def read_fixed_bytes(self) -> None:
        """Read what lasts from one step to the next."""
        self.fixed_bytes = max(0, self._live_bytes() - self.gradient_bytes())

    def gradient_bytes(self) -> int:
        """Bytes of the gradients at this moment."""
        gradients = (parameter.grad for parameter in self.program.module.parameters())
        return bytes_of(gradient for gradient in gradients if gradient is not None)

    def checkpoint_bytes(self) -> int:
        """Host memory that saving a checkpoint copies; 0 where the training saves none."""
        return bytes_of(tensors_in(self.program.checkpoint_states()), torch.device("cpu"))

    def dispatch_counter(self) -> LiveStorages | None:
        """The dispatch mode that counts live bytes, with what earlier steps made.

        These are optimizer states and gradients. It is None where there is no such mode.
        """
        if not isinstance(self.live, LiveStorages):
            return None
        self.live.track(state_tensors(self.program.optimizers))
        self.live.track(tensors_in([p.grad for p in self.program.module.parameters()]))
        return self.live

    @property
    def _device_counter(self) -> PeakCounter:
        """Counts the peaks of steps that do not run in a dispatch mode."""
        return self.live if isinstance(self.live, RequestedBytes) else self.device

    def _live_bytes(self) -> int:
        """Live bytes at this moment; held bytes where live bytes cannot be counted."""
        return (self.live or self.device).current().allocated_bytes

    def _run_call(
        self, steps: Steps, make_batch: Callable[[], None], counter: LiveStorages | None
    ) -> CallReading:
        phases = self.program.phases
        phases.read_from(counter or self._device_counter)
        phases.start(steps.first_phase)
        # Loader workers make the batches of a training while the device computes.
        make_batch()
        # A loop may make its batch on the device, which works on it while the host goes on.
        self.device.synchronize()
        begin = time.perf_counter()
        steps.run()
        self.device.synchronize()
        seconds = time.perf_counter() - begin
        peaks = phases.stop()
        held_bytes = None
        # In a step whose live bytes are counted, counting takes memory itself.
        if counter is None:
            held_bytes = peaks.peak_reserved_bytes or peaks.peak_bytes
            held_bytes -= _sample_bytes(self.program, self.device)
        return CallReading(peaks, held_bytes, seconds, bool(phases.stepped))


def _increase(name: str, before: dict[str, int], after: dict[str, int]) -> int:
    return after.get(name, 0) - before.get(name, 0)


def _module_counter(program: Program, other_bytes: int) -> LiveStorages:
    """A counter that begins with the tensors of the module, and with this many other bytes."""
    counter = LiveStorages(other_bytes)
    counter.track([*program.module.parameters(), *program.module.buffers()])
    return counter


def _sample_bytes(program: Program, device: DeviceMemory) -> int:
    """Bytes of the samples that the search keeps in the resident set."""
    if not device.is_host:
        return 0
    steps = (program.training, program.evaluation)
    return sum(one.sample_bytes for one in steps if one is not None)
