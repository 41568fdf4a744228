"""A CUDA device that exists only as numbers: the package's device protocol, and the steps of one network on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from lightning_batchmem.devices.base import MemoryStats
from tests.simulated_cuda.allocator import Block, CachingAllocator
from tests.simulated_cuda.trace import Trace


class SimulatedCuda(CachingAllocator):
    """A new process with the model of ``trace`` on a device with ``capacity_bytes`` of memory."""

    name = "cuda"

    def __init__(self, trace: Trace, capacity_bytes: int, *, expandable: bool = False) -> None:
        super().__init__(capacity_bytes, expandable=expandable)
        self.trace = trace
        self._live: dict[int, Block] = {}
        self._replay(list(enumerate(trace.persistent_bytes)))

    def train_step(self, size: int) -> None:
        """Replay one training step in Lightning's order: forward, zero_grad, backward, optimizer step."""
        self.run_phase("forward", size)
        self.drop(self.trace.gradients)  # zero_grad(set_to_none=True)
        self.run_phase("backward")
        self.run_phase("optimizer_step")

    def run_phase(self, phase: str, size: int = 0) -> None:
        """Replay a phase; the forward pass sets the size, and the optimizer step releases the batch."""
        if phase == "forward":
            self._steady = self.trace.states <= self._live.keys()
            self._step = self.trace.events(size, "steady" if self._steady else "first")
        if phase == "optimizer_step" and not self._steady and self.trace.states & self._live.keys():
            raise KeyError("exp_avg_sq")  # after an out-of-memory error inside the first step
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

    def budget_bytes(self) -> int:
        return min(self.capacity_bytes, self.limit_bytes)

    def synchronize(self) -> None: ...

    def counters(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("num_ooms", "num_alloc_retries", "num_device_free")}

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
        except torch.OutOfMemoryError:  # what the step holds is released as the exception unwinds
            kept = self.trace.gradients | set(range(len(self.trace.persistent_bytes)))
            if self._steady or "SGD" not in self.trace.network.name:  # foreach SGD writes its buffers at the end
                kept |= self.trace.states
            self.drop(self._live.keys() - kept)
            raise
