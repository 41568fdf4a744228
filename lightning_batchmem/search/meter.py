"""The meter of one trial: reads live bytes, held bytes and times of its steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_batchmem.devices.base import DeviceMemory, PeakCounter
from lightning_batchmem.devices.optimizers import state_tensors
from lightning_batchmem.devices.peaks import LiveStorages, RequestedBytes, StepPeaks
from lightning_batchmem.devices.tensors import bytes_of, tensors_in
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.search.compiled import compiled_frames
from lightning_batchmem.search.program import Program, Steps


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
    """Reads live bytes, held bytes and times of the steps of one trial.

    It is made after the restart of the program, so that it knows nothing of other trials.

    Live bytes are what lines are fitted to. Where the device cannot count them, as on the host, a
    dispatch mode counts them in steps of their own, because counting uses memory itself. Where that
    is not possible either, ``live`` is ``None`` and the held bytes stand in for them.

    Args:
        program: the program whose steps are run.
        device: the memory that is read.
        policy: the numbers that steer the search.
        other_bytes: live bytes at the start of the search that are not tensors of the module.
        before_step: this function is called before each full step.
    """

    def __init__(
        self,
        program: Program,
        device: DeviceMemory,
        policy: SearchPolicy,
        other_bytes: int,
        before_step: Callable[[], object] = lambda: None,
    ) -> None:
        primary = program.training or program.evaluation
        if primary is None:
            raise ValueError("program must have steps of training or of an evaluation, got neither")
        # Times and full steps are those of the primary steps.
        self.primary: Steps = primary
        self.program = program
        self.device = device
        self.policy = policy
        self.before_step = before_step
        self._other_bytes = other_bytes
        self._frames_before = compiled_frames()
        self.live = self._live_counter()
        self.start_bytes = self.live_bytes()
        # Whether an allocation above the limit fails.
        self.is_limit_enforced = False
        # Live bytes of each call whose peaks count.
        self.step_peaks: list[StepPeaks] = []
        # Held bytes of each call, warm-up included.
        self.held_bytes_of_calls: list[int] = []
        # Seconds of each timed call in which an optimizer stepped, and of the other timed calls.
        self.stepping_seconds: list[float] = []
        self.other_seconds: list[float] = []
        self.full_steps = 0
        self.samples = 0
        self.has_idle_optimizer = False
        # Live bytes that last from one step to the next, without gradients.
        self.fixed_bytes = 0
        # Whether every optimizer has its state.
        self.is_warm = False
        # Retries of the allocator in warm steps of a kind and size that came before.
        self.allocator_retries = 0
        # In the same steps, failed allocations that the step itself caught.
        self.caught_errors = 0
        self._kinds_and_sizes: set[tuple[str, int]] = set()

    @property
    def is_compiled(self) -> bool:
        """Whether a step of this trial was compiled by ``torch.compile``."""
        return compiled_frames() > self._frames_before

    @property
    def seconds(self) -> list[float]:
        """Seconds of each timed call."""
        return self.stepping_seconds + self.other_seconds

    @property
    def phase_peak_bytes(self) -> dict[str, int]:
        """The highest live bytes of each phase."""
        highest: dict[str, int] = {}
        for step in self.step_peaks:
            for phase, peak_bytes in step.phase_peak_bytes.items():
                highest[phase] = max(highest.get(phase, 0), peak_bytes)
        return highest

    @property
    def step_counter(self) -> PeakCounter:
        """Counts the peaks of steps that are not run to count live bytes."""
        return self.live if isinstance(self.live, RequestedBytes) else self.device

    def optimizer_step_seconds(self, accumulate_grad_batches: int) -> float | None:
        """The shortest time of a full step of so many calls; None if no call was timed."""
        if not self.seconds:
            return None
        shortest = min(self.other_seconds or self.stepping_seconds)
        optimizer_seconds = 0.0
        if self.stepping_seconds:
            # An optimizer steps in the last of the calls only.
            optimizer_seconds = max(0.0, min(self.stepping_seconds) - shortest)
        return accumulate_grad_batches * shortest + optimizer_seconds

    def live_bytes(self) -> int:
        """Live bytes at this moment; held bytes where live bytes cannot be counted."""
        return (self.live or self.device).current().allocated_bytes

    def gradient_bytes(self) -> int:
        gradients = (parameter.grad for parameter in self.program.module.parameters())
        return bytes_of(gradient for gradient in gradients if gradient is not None)

    def checkpoint_bytes(self) -> int:
        """Host memory that saving a checkpoint copies; 0 where the training saves none."""
        return bytes_of(tensors_in(self.program.checkpoint_states()), torch.device("cpu"))

    def note_held_bytes(self, peaks: StepPeaks) -> None:
        """Note the bytes that this process held at the peak of a step."""
        held_bytes = peaks.peak_reserved_bytes or peaks.peak_bytes
        self.held_bytes_of_calls.append(held_bytes - _sample_bytes(self.program, self.device))

    def note_retries(self, first_phase: str, batch_size: int, before: dict[str, int]) -> None:
        """Count the retries of a step, unless it is the first of its kind and size.

        At the first step of another size a training may retry once an epoch, which costs next to
        nothing. A retry in steps that repeat comes again, and costs a synchronization each time.
        cuDNN catches some errors itself and takes a slower algorithm, which it then keeps.

        Args:
            first_phase: the kind of the step.
            batch_size: samples in its batches.
            before: the counters of the device before the step.
        """
        kind_and_size = (first_phase, batch_size)
        if self.is_warm and kind_and_size in self._kinds_and_sizes:
            after = self.device.counters()
            self.allocator_retries += _increase("num_alloc_retries", before, after)
            self.caught_errors += _increase("num_ooms", before, after)
        self._kinds_and_sizes.add(kind_and_size)

    def track_lasting(self, counter: LiveStorages) -> None:
        """Count optimizer states and gradients, which earlier steps made, without keeping them."""
        counter.track(state_tensors(self.program.optimizers))
        counter.track(tensors_in([p.grad for p in self.program.module.parameters()]))

    def _live_counter(self) -> RequestedBytes | LiveStorages | None:
        if self.device.reports_requested_bytes:
            return RequestedBytes(self.device)
        if self.program.steps_are_collective or not LiveStorages.is_possible():
            return None
        return _module_counter(self.program, self._other_bytes)


def _increase(name: str, before: dict[str, int], after: dict[str, int]) -> int:
    return after.get(name, 0) - before.get(name, 0)


def _module_counter(program: Program, other_bytes: int) -> LiveStorages:
    """A counter that begins with the tensors of the module, and with so many other bytes."""
    counter = LiveStorages(other_bytes)
    counter.track([*program.module.parameters(), *program.module.buffers()])
    return counter


def _sample_bytes(program: Program, device: DeviceMemory) -> int:
    """Bytes of the samples that the search keeps in the resident set."""
    if not device.is_host:
        return 0
    steps = (program.training, program.evaluation)
    return sum(one.sample_bytes for one in steps if one is not None)
