"""A CUDA device that exists only as numbers, and the steps of one network on it.

It has the device protocol of the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from lightning_batchmem.devices.base import MemoryStats
from tests.helpers.simulated_cuda.allocator import Block, CachingAllocator
from tests.helpers.simulated_cuda.trace import Trace


class SimulatedCuda(CachingAllocator):
    """A new process with the model of ``trace`` on a device with ``capacity_bytes`` of memory."""

    name = "cuda"
    granularity_bytes = 0
    overrun_kills = False
    counts_live_bytes = True
    held_is_resident_set = False
    shared_by_ranks = False
    holds_loader_workers = False

    def __init__(self, trace: Trace, capacity_bytes: int, *, expandable: bool = False) -> None:
        super().__init__(capacity_bytes, expandable=expandable)
        self.trace = trace
        self._live: dict[int, Block] = {}
        self._replay(list(enumerate(trace.persistent_bytes)))

    def train_step(self, size: int) -> None:
        """Replay one training step in Lightning's order.

        The order is forward, zero_grad, backward, optimizer step.
        """
        self.run_phase("forward", size)
        # This is zero_grad(set_to_none=True).
        self.drop(self.trace.gradients)
        self.run_phase("backward")
        self.run_phase("optimizer_step")

    def run_phase(self, phase: str, size: int = 0) -> None:
        """Replay a phase.

        The forward pass sets the size, and the optimizer step releases the batch.
        """
        if phase == "forward":
            self._steady = self.trace.states <= self._live.keys()
            self._step = self.trace.events(size, "steady" if self._steady else "first")
        if phase == "optimizer_step" and not self._steady and self.trace.states & self._live.keys():
            # An out-of-memory error inside the first step left only a part of the states.
            raise KeyError("exp_avg_sq")
        self._replay(self._step[phase])

    def evaluation_step(self, size: int) -> None:
        """Replay one validation step without gradients."""
        self._replay(self.trace.events(size, "evaluation")["evaluation"])

    def drop(self, slots: Iterable[int]) -> None:
        """Release storages that still exist."""
        for slot in slots:
            if slot in self._live:
                self.free(self._live.pop(slot))

    def peak(self) -> MemoryStats:
        return MemoryStats(self.allocated_peak, self.reserved_peak, self.requested_peak)

    def current(self) -> MemoryStats:
        return MemoryStats(self.allocated, self.reserved, self.requested)

    def private_bytes(self) -> int:
        return self.allocated

    def evictable_bytes(self) -> int:
        return 0

    def non_torch_bytes(self) -> None:
        """Nothing else uses the device."""

    def budget_bytes(self) -> int:
        return min(self.capacity_bytes, self.limit_bytes)

    def synchronize(self) -> None: ...

    def counters(self) -> dict[str, int]:
        names = ("num_ooms", "num_alloc_retries", "num_device_free")
        return {name: getattr(self, name) for name in names}

    @contextmanager
    def limit_enforced(self, limit_bytes: int) -> Iterator[bool]:
        before = self.limit_bytes
        if not self.expandable:
            self.limit_bytes = min(before, limit_bytes)
        try:
            yield not self.expandable
        finally:
            self.limit_bytes = before

    def _replay(self, events: list[tuple[int, int]]) -> None:
        try:
            for slot, size_bytes in events:
                if size_bytes:
                    self._live[slot] = self.malloc(size_bytes)
                else:
                    self.free(self._live.pop(slot))
        except torch.OutOfMemoryError:
            # The storages of the step are released as the exception unwinds.
            remaining = self.trace.gradients | set(range(len(self.trace.persistent_bytes)))
            # Foreach SGD writes its states at the end of the step, so the first step leaves none.
            if self._steady or "SGD" not in self.trace.network.name:
                remaining |= self.trace.states
            self.drop(self._live.keys() - remaining)
            raise
