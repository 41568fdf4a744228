"""A CUDA device that exists only as numbers: the package's device protocol, and the steps of one network on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from tests.simulated_cuda.allocator import MIB, Block, CachingAllocator
from tests.simulated_cuda.trace import TRAINING_PHASES, Trace


class SimulatedStats(NamedTuple):
    """The fields of the package's ``MemoryStats``."""

    allocated_bytes: int
    reserved_bytes: int
    requested_bytes: int


class SimulatedCuda:
    """One process that trains ``trace``'s network on a device with ``capacity_bytes`` of memory.

    Args:
        trace: the storages of the network's steps.
        capacity_bytes: total memory of the device (``total_bytes`` of ``cudaMemGetInfo``).
        limit_bytes: per-process memory fraction times the total; the total without it.
        expandable: ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
        used_by_others_bytes: memory of CUDA contexts and of other processes.
    """

    name = "cuda"
    granularity_bytes = resolution_bytes = 2 * MIB
    has_peak, repeatability = True, 0.0  # of protocol 0.1

    def __init__(
        self,
        trace: Trace,
        capacity_bytes: int,
        *,
        limit_bytes: int | None = None,
        expandable: bool = False,
        used_by_others_bytes: int = 0,
    ) -> None:
        self.trace, self.capacity_bytes, self.expandable = trace, capacity_bytes, expandable
        self.used_by_others_bytes = used_by_others_bytes
        self.limit_bytes = capacity_bytes if limit_bytes is None else limit_bytes
        self.num_steps = 0  # of training, in all processes
        self.fresh()

    def fresh(self) -> None:
        """Start a new process: nothing is allocated or cached, the counters are 0, the model is not loaded."""
        capacity_bytes = self.capacity_bytes - self.used_by_others_bytes
        self.allocator = CachingAllocator(capacity_bytes, limit_bytes=self.limit_bytes, expandable=self.expandable)
        self._live: dict[int, Block] = {}

    # Steps of the network.

    def load_model(self) -> None:
        """Move parameters and buffers to the device."""
        self._replay(list(enumerate(self.trace.persistent_bytes)))

    def train_step(self, size: int) -> None:
        """Replay one training step in Lightning's order: forward, zero_grad, backward, optimizer step.

        Raises:
            torch.OutOfMemoryError: after the storages of the step were released, as when the exception unwinds.
            KeyError: after an out-of-memory error that left the state of Adam incomplete.
        """
        for phase in TRAINING_PHASES:
            self.run_phase(phase, size)

    def run_phase(self, phase: str, size: int) -> None:
        """Replay one of ``TRAINING_PHASES``, in order; the batch is released at the end of the optimizer step."""
        if phase == "forward":
            self.num_steps += 1
            self._steady = self.has_optimizer_state()
        if phase == "backward":
            self.drop_gradients()  # zero_grad(set_to_none=True)
        if phase == "optimizer_step" and not self._steady and any(slot in self._live for slot in self.trace.states):
            raise KeyError("exp_avg_sq")
        self._replay(self.trace.events(size, "steady" if self._steady else "first")[phase])

    def train_steps(self, size: int, count: int, *, stop_at_retry: bool = False) -> int:
        """Replay ``count`` training steps, on demand until one has a retry; return the allocator's retries in them."""
        before = self.allocator.num_alloc_retries
        for _ in range(count):
            self.train_step(size)
            if stop_at_retry and self.allocator.num_alloc_retries > before:
                break
        return self.allocator.num_alloc_retries - before

    def evaluation_step(self, size: int) -> None:
        """Replay one validation step without gradients."""
        self._replay(self.trace.events(size, "evaluation")["evaluation"])

    def has_optimizer_state(self) -> bool:
        return all(slot in self._live for slot in self.trace.states)

    def drop_optimizer_state(self) -> None:
        """Release the optimizer's state, as when the optimizer is replaced."""
        self._drop(self.trace.states)

    def drop_gradients(self) -> None:
        self._drop(self.trace.gradients)

    # The package's protocol.

    def reset_peak(self) -> None:
        self.allocator.reset_peak()

    def peak(self) -> SimulatedStats:
        each = self.allocator
        return SimulatedStats(each.allocated_peak, each.reserved_peak, each.requested_peak)

    def current(self) -> SimulatedStats:
        return SimulatedStats(self.allocator.allocated, self.allocator.reserved, self.allocator.requested)

    def private_bytes(self) -> int:
        return self.allocator.allocated

    own_bytes = private_bytes

    def in_use_bytes(self) -> None:
        return

    def budget_bytes(self) -> int:
        """Free memory of the device and what this process has reserved, within the memory fraction."""
        return min(self.allocator.capacity_bytes, self.allocator.limit_bytes)

    def non_torch_bytes(self) -> int:
        return self.used_by_others_bytes

    outside_bytes = non_torch_bytes

    def release_cached(self) -> None:
        self.allocator.empty_cache()

    def synchronize(self) -> None:
        return

    def counters(self) -> dict[str, int]:
        return {name: getattr(self.allocator, name) for name in ("num_ooms", "num_alloc_retries", "num_device_free")}

    @contextmanager
    def limit_enforced(self, limit_bytes: int) -> Iterator[bool]:
        """Set the memory fraction and restore it. With expandable segments set nothing, and yield ``False``."""
        before = self.allocator.limit_bytes
        if not self.expandable:
            self.allocator.limit_bytes = min(before, limit_bytes)
        try:
            yield not self.expandable
        finally:
            self.allocator.limit_bytes = before

    def _replay(self, events: list[tuple[int, int]]) -> None:
        live, malloc, free = self._live, self.allocator.malloc, self.allocator.free
        try:
            for slot, size_bytes in events:
                if size_bytes:
                    live[slot] = malloc(size_bytes)
                else:
                    free(live.pop(slot))
        except torch.OutOfMemoryError:
            states = self.trace.states
            # foreach SGD writes its buffers at the end of the step, Adam before it starts.
            kept = states.stop if "SGD" not in self.trace.network.name or self._steady else states.start
            self._drop([slot for slot in live if slot >= kept])
            raise

    def _drop(self, slots: range | list[int]) -> None:
        for slot in slots:
            if slot in self._live:
                self.allocator.free(self._live.pop(slot))
