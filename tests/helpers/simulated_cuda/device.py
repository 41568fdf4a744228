"""A CUDA device that exists only as numbers, and the steps of one network on it.

It has the device protocol of the package.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
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

        The order is forward, zero_grad, backward, optimizer step, for each optimizer.
        """
        self.begin_step(size)
        for number, slots in enumerate(self.trace.optimizers):
            self.run_phase("forward", number)
            # This is zero_grad(set_to_none=True).
            self.drop(slots.gradients)
            self.run_phase("backward", number)
            self.run_phase("optimizer_step", number)

    def begin_step(self, size: int) -> None:
        """Set the size of the phases that follow."""
        self._steady = self.trace.states <= self._live.keys()
        self._step = self.trace.events(size, "steady" if self._steady else "first")

    def run_phase(self, phase: str, number: int = 0) -> None:
        """Replay a phase of the optimizer of this number.

        The last optimizer step releases the batch.
        """
        states = self.trace.optimizers[number].states
        num_live = len(states & self._live.keys())
        if phase == "optimizer_step" and 0 < num_live < len(states):
            # An out-of-memory error inside the first step left only a part of the states.
            self._release_step()
            raise KeyError("exp_avg_sq")
        self._replay(self._step[phase, number])

    def evaluation_step(self, size: int) -> None:
        """Replay one validation step without gradients."""
        self._replay(self.trace.events(size, "evaluation")["evaluation", 0])

    def drop(self, slots: Iterable[int]) -> None:
        """Release storages that still exist."""
        for slot in slots:
            if slot in self._live:
                self.free(self._live.pop(slot))

    def layout(self) -> Hashable:
        """What decides, together with the sizes of the steps that follow, how they end."""
        blocks = ((slot, block.address) for slot, block in self._live.items())
        free = [tuple(pool.sorted) for pool in (self.small, self.large)]
        return frozenset(blocks), *free

    def peak(self) -> MemoryStats:
        return MemoryStats(self.allocated_peak, self.reserved_peak, self.requested_peak)

    def current(self) -> MemoryStats:
        return MemoryStats(self.allocated, self.reserved, self.requested)

    def private_bytes(self) -> int:
        return self.allocated

    def evictable_bytes(self) -> int:
        return 0

    def total_bytes(self) -> int:
        return self.capacity_bytes

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
                if not size_bytes:
                    self.free(self._live.pop(slot))
                # After an error in the first step, one of two optimizers may have its states.
                elif slot not in self._live:
                    self._live[slot] = self.malloc(size_bytes)
        except torch.OutOfMemoryError:
            self._release_step()
            raise

    def _release_step(self) -> None:
        """Release the storages of a step as an exception unwinds."""
        remaining = self.trace.gradients | set(range(len(self.trace.persistent_bytes)))
        # Foreach SGD writes its states at the end of the step, so the first step leaves none.
        if self._steady or "SGD" not in self.trace.network.name:
            remaining |= self.trace.states
        self.drop(self._live.keys() - remaining)
