"""Peaks of a step and its phases: exact bytes on the host and CUDA, else the device's counters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

# `_get_current_dispatch_mode` is private in torch 2.5 to 2.14.
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from lightning_batchmem.devices.base import DeviceMemory, MemoryStats, PeakCounter
from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.devices.optimizers import StepHooks
from lightning_batchmem.devices.tensors import plain_tensors


# TorchDispatchMode.__init_subclass__ has no type annotations.
class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that operators create, from their first use until they are freed.

    Storages that exist before are counted from the first operator that reads them, so the second of
    two equal steps is complete. What an operator allocates and frees inside itself is not counted.

    Args:
        other_bytes: bytes that are live at the beginning, besides storages.
        device_type: the device of the storages.
    """

    def __init__(self, other_bytes: int = 0, device_type: str = "cpu") -> None:
        # TorchDispatchMode.__init__ has no type annotations.
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._live: dict[int, weakref.ref[Any]] = {}
        self._bytes = other_bytes
        self._peak_bytes = other_bytes

    @staticmethod
    def is_possible() -> bool:
        """Whether no other dispatch mode is active, which might hide operators."""
        return _get_current_dispatch_mode() is None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.track(args)
        self.track(kwargs.values())
        result = func(*args, **kwargs)
        self.track((result,))
        return result

    def track(self, values: Iterable[object]) -> None:
        """Count the storages of these tensors, and of those in lists, from now on."""
        for value in values:
            if isinstance(value, (list, tuple)):
                self.track(value)
            if not isinstance(value, Tensor) or value.device.type != self._device_type:
                continue
            # Most tensors are strided, and every operator of a step comes here.
            parts = (value,) if value.layout is torch.strided else plain_tensors(value)
            for part in parts:
                storage = part.untyped_storage()
                # The address of torch's own object, which is unique while the storage is alive.
                if (key := storage._cdata) not in self._live:
                    self._count(key, storage, storage.nbytes())

    def reset_peak(self) -> None:
        self._peak_bytes = self._bytes

    def peak(self) -> MemoryStats:
        return MemoryStats(self._peak_bytes)

    def current(self) -> MemoryStats:
        return MemoryStats(self._bytes)

    def _count(self, key: int, storage: Any, size_bytes: int) -> None:
        def freed(_: object) -> None:
            del self._live[key]
            self._bytes -= size_bytes

        self._live[key] = weakref.ref(storage, freed)
        self._bytes += size_bytes
        self._peak_bytes = max(self._peak_bytes, self._bytes)


class RequestedBytes:
    """The bytes that were requested from a device's allocator, without its rounding."""

    def __init__(self, device: DeviceMemory) -> None:
        self._device = device

    def reset_peak(self) -> None:
        self._device.reset_peak()

    def peak(self) -> MemoryStats:
        return _requested(self._device.peak())

    def current(self) -> MemoryStats:
        return _requested(self._device.current())


class RisingPeak:
    """The peak of a step where a phase has raised it, else 0 bytes.

    Others may read the peak of the step too, so no phase restarts it.
    """

    def __init__(self, device: DeviceMemory) -> None:
        self._device = device
        self._highest_bytes = 0
        self.peak()
        if device.is_host:
            # Memory that was freed may be used again.
            self._highest_bytes += device.granularity_bytes

    def reset_peak(self) -> None:
        """Restart nothing."""

    def peak(self) -> MemoryStats:
        stats = value_or_none("The memory of a step", self._device.peak)
        if stats is None or stats.allocated_bytes <= self._highest_bytes:
            return MemoryStats(0)
        self._highest_bytes = stats.allocated_bytes
        return stats

    def current(self) -> MemoryStats:
        return self._device.current()


def _requested(stats: MemoryStats) -> MemoryStats:
    if stats.requested_bytes is None:
        return stats
    return stats._replace(allocated_bytes=stats.requested_bytes)


class StepPeaks(NamedTuple):
    phase_peak_bytes: dict[str, int]
    peak_reserved_bytes: int | None = None

    @property
    def peak_bytes(self) -> int:
        """Highest allocated bytes in the step."""
        return max(self.phase_peak_bytes.values())


class PhasePeaks:
    """Measures the peak of each phase of a step: ``start``, any number of ``enter``, ``stop``.

    Lightning's hooks mark the begin of backward and of the optimizer step. It has none for the end
    of an optimizer step, which ``watch`` adds. A phase that is entered twice (manual optimization
    with several optimizers) keeps its higher peak. Every boundary resets the peak of the counter.
    """

    def __init__(self, counter: PeakCounter) -> None:
        self.stepped: set[int] = set()
        # These optimizers call no hooks, so they count as stepping in every step.
        self._unhooked: set[int] = set()
        self._counter = counter
        self._hooks = StepHooks()
        # The phase that runs now; None outside a step.
        self.phase: str | None = None
        self._peaks: dict[str, int] = {}
        self._reserved_bytes: int | None = None

    def read_from(self, counter: PeakCounter) -> None:
        """Use another counter from the next step on."""
        self._counter = counter

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Note which of these optimizers step; ids of those in the current step are in ``stepped``.

        Another forward pass may follow in the same step, as under manual optimization.

        Args:
            optimizers: the optimizers of the next steps, instead of those watched before.
        """
        self.unwatch()
        for optimizer in optimizers:
            if not self._hooks.add(optimizer, partial(self._note_step, id(optimizer))):
                self._unhooked.add(id(optimizer))

    def unwatch(self) -> None:
        """Remove the hooks from the optimizers."""
        self._hooks.remove()
        self._unhooked = set()

    def start(self, phase: str) -> None:
        """Begin a step."""
        self.stepped = set(self._unhooked)
        self._peaks = {}
        self._reserved_bytes = None
        self._begin_phase(phase)

    def enter(self, phase: str) -> None:
        """End the current phase and begin ``phase``; outside a step nothing happens."""
        if self.phase is not None:
            self._end_phase()
            self._begin_phase(phase)

    def stop(self) -> StepPeaks:
        """End the step."""
        self._end_phase()
        self.phase = None
        return StepPeaks(self._peaks, self._reserved_bytes)

    def _note_step(self, optimizer_id: int, *_: Any) -> None:
        self.stepped.add(optimizer_id)
        self.enter("forward")

    def _begin_phase(self, phase: str) -> None:
        self.phase = phase
        self._counter.reset_peak()

    def _end_phase(self) -> None:
        if self.phase is None:
            return
        peak_bytes, reserved_bytes, _ = self._counter.peak()
        if peak_bytes > self._peaks.get(self.phase, -1):
            self._peaks[self.phase] = peak_bytes
        if reserved_bytes is not None:
            self._reserved_bytes = max(self._reserved_bytes or 0, reserved_bytes)
