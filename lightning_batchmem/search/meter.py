"""The meter of one trial: reads live bytes and held bytes, and keeps what each step used."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves

from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.foreign_values import attributes_of, value_or_none
from lightning_batchmem.devices.optimizers import state_tensors
from lightning_batchmem.devices.peaks import LiveStorages, RequestedBytes
from lightning_batchmem.devices.tensors import bytes_of, tensors_in
from lightning_batchmem.plan.records import Growth
from lightning_batchmem.search.compiled import compiled_frames
from lightning_batchmem.search.program import Program
from lightning_batchmem.search.readings import CallReading, StepReading

# A memory bank has fewer tensors.
_MOST_ITEMS = 10_000


def other_bytes_at_start(program: Program, device: DeviceMemory) -> int:
    """Bytes of the resident set besides the tensors of the module and the samples.

    They count as live bytes of every trial, so that live bytes can be compared with the limit.
    Where the device counts live bytes itself there are none.
    """
    if device.reports_requested_bytes:
        return 0
    device.release_cached()
    module_bytes = _module_counter(program, 0).current().allocated_bytes
    other_bytes = device.current().allocated_bytes - sample_bytes(program, device) - module_bytes
    return max(0, other_bytes)


class TrialMeter:
    """Reads the steps of one trial, and keeps a reading of each.

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
        growth: what equal steps keep, of the kind that keeps most; ``None`` for nothing.
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
        self.growth: Growth | None = None
        self.has_idle_optimizer = False
        self.before_step = before_step
        self._frames_before = compiled_frames()
        # Whether every optimizer has its state.
        self._is_warm = False

    @property
    def is_compiled(self) -> bool:
        """Whether a step of this trial was compiled by ``torch.compile``."""
        return compiled_frames() > self._frames_before

    def begin_call(self, first_phase: str, counter: LiveStorages | None) -> None:
        """Begin to read a call of ``Steps.run``, and the making of its batch.

        Args:
            first_phase: the phase in which it begins.
            counter: the dispatch mode in which it runs; ``None``: the device is read.
        """
        device_counter = self.live if isinstance(self.live, RequestedBytes) else self.device
        self.program.phases.read_from(counter or device_counter)
        self.program.phases.start(first_phase)

    def end_call(self, seconds: float, counter: LiveStorages | None) -> CallReading:
        """Return what a call used, which took these seconds."""
        phases = self.program.phases
        peaks = phases.stop()
        held_bytes = None
        if counter is None:
            held_bytes = peaks.peak_reserved_bytes or peaks.peak_bytes
        return CallReading(peaks, held_bytes, seconds, bool(phases.stepped))

    def repeats(self, batch_size: int, *, is_primary: bool) -> bool:
        """Whether such a step was run before, and every optimizer has its state."""
        return self._is_warm and any(
            (one.is_primary, one.batch_size) == (is_primary, batch_size) for one in self.readings
        )

    def end_bytes(self) -> int | None:
        """Live bytes between two steps; None where they cannot be counted."""
        return None if self.live is None else self._live_bytes()

    def keep_growth(self, growth: Growth) -> None:
        """Keep what equal steps of a kind add, at most."""
        self.growth = max(self.growth or growth, growth, key=lambda one: one.total_bytes)

    def keep(self, reading: StepReading) -> None:
        """Keep the reading of a full step."""
        self.readings.append(reading)

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

    def _live_bytes(self) -> int:
        """Live bytes at this moment; held bytes where live bytes cannot be counted."""
        return (self.live or self.device).current().allocated_bytes


def _module_counter(program: Program, other_bytes: int) -> LiveStorages:
    """A counter that begins with the tensors of the module, and with this many other bytes."""
    counter = LiveStorages(other_bytes, program.device.type)
    counter.track([*program.module.parameters(), *program.module.buffers()])
    # Steps may fill a memory bank that none of them reads.
    attributes = [
        value
        for module in program.module.modules()
        for value in attributes_of(module).values()
        # A longer list, such as one of paths, takes long to look through.
        if type(value) in (list, tuple, dict) and len(value) <= _MOST_ITEMS
    ]
    counter.track(value_or_none("The attributes of a module", tree_leaves, attributes) or ())
    return counter


def sample_bytes(program: Program, device: DeviceMemory) -> int:
    """Bytes of the samples that the search keeps in the resident set."""
    if not device.is_host:
        return 0
    steps = (program.training, program.evaluation)
    return sum(one.sample_bytes for one in steps if one is not None)
