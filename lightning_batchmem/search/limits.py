"""What limits the size in a search: memory, loader workers, data, the user, and the other ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.host import HostMemory, free_shared_bytes
from lightning_batchmem.devices.tensors import bytes_of
from lightning_batchmem.plan.limits import ProjectStep, SearchLimits
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.options import SearchOptions, parse_memory_limit
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Bound, mib
from lightning_batchmem.plan.sizes import micro_batches
from lightning_batchmem.search.program import Program
from lightning_batchmem.search.ranks import Ranks

RAGGED_SHARE = 0.88
"""The share of the room for a rehearsal in which batches of ever new shapes fragment the cache.

It shows some of the orders in which shapes come, and a training has more.

Source: in loops over three networks, 145 of 150 trainings fit at 0.84 of the largest size that a
rehearsal of the same data allows, which is this share of the 0.95 that a search may use: `python -m
benchmarks.ragged_share`. Of 92 trainings of other networks none died: `python -m
benchmarks.ragged`.
"""


@dataclass(frozen=True)
class MemoryRoom:
    """The memory of a device that this rank may use.

    Args:
        device: the device.
        memory_limit: the limit of the user, as in :class:`.BatchFinder`.
        limit_share: the most of what a device provides that may be used, except for the host.
        ranks_on_host: processes that train on this machine.
        later_bytes: bytes that the training takes later, and no step of the search does.
        host_memory: makes the memory of the host, which loader workers fill.
    """

    device: DeviceMemory
    memory_limit: int | float | str | None
    limit_share: float
    ranks_on_host: int = 1
    later_bytes: int = 0
    host_memory: Callable[[], DeviceMemory] = HostMemory

    @property
    def notes(self) -> list[Note]:
        """A note about what is left free; none where nothing is."""
        if not self.later_bytes:
            return []
        text = (
            f"The search left {mib(self.later_bytes)} of the limit free: the training needs them"
            " later, for gradients that ranks exchange or for averaged weights."
        )
        return [Note("limit", text)]

    def provided_bytes(self) -> int:
        """The most that this rank may hold; ranks that share memory divide what is left equally."""
        available_bytes = self.device.available_bytes()
        if self.ranks_on_host == 1 or not self.device.is_host:
            return available_bytes
        held_bytes = self.device.current().allocated_bytes
        return held_bytes + (available_bytes - held_bytes) // self.ranks_on_host

    def free_bytes(self) -> int:
        """Bytes that this rank may take beyond those that it holds; at least 0."""
        return max(0, self.provided_bytes() - self.device.current().allocated_bytes)

    def usable_bytes(self) -> int:
        """The most of a device that a training may hold now, without ``memory_limit``."""
        return int(self.limit_share * self.provided_bytes()) - self.later_bytes

    def free_host_bytes(self) -> int:
        """Bytes of the host that this rank may take beyond those that it holds."""
        host = self.host_memory()
        return (host.available_bytes() - host.current().allocated_bytes) // self.ranks_on_host

    @property
    def warning(self) -> str:
        """A sentence about a ``memory_limit`` that the device cannot provide; empty otherwise."""
        provided_bytes = self.provided_bytes()
        # On a CPU a higher limit is the way to a larger size.
        if (
            self.device.is_host
            or parse_memory_limit(self.memory_limit, provided_bytes) <= provided_bytes
        ):
            return ""
        return (
            f"memory_limit={self.memory_limit!r} is more than the GPU can provide,"
            f" {mib(provided_bytes)}."
        )

    def limit_bytes(self) -> int:
        """The limit of this rank: ``memory_limit``, and on a device at most a share of it."""
        provided_bytes = self.provided_bytes()
        wanted_bytes = parse_memory_limit(self.memory_limit, provided_bytes)
        if self.device.is_host:
            # The size stays far from this limit, so it may be above the free memory.
            return wanted_bytes
        return min(wanted_bytes, int(self.limit_share * provided_bytes))


def search_limits(
    program: Program,
    room: MemoryRoom,
    options: SearchOptions,
    policy: SearchPolicy,
    ranks: Ranks,
    *,
    keeps_step: bool,
) -> SearchLimits:
    """The limits of a search, the same on every rank: the rank with the least of each decides.

    Args:
        program: the training program.
        room: the memory that this rank may use.
        options: the arguments of the user.
        policy: the numbers that steer the search.
        ranks: the processes that search together.
        keeps_step: whether accumulation keeps the samples of an optimizer step of the project.

    Raises:
        ValueError: if the process already holds as much as ``memory_limit``.
    """
    limit_bytes = room.limit_bytes()
    held_bytes = room.device.current().allocated_bytes
    if room.memory_limit is not None and limit_bytes <= held_bytes:
        raise ValueError(
            f"memory_limit must be above the {mib(held_bytes)} that the process already takes, got"
            f" {mib(limit_bytes)}"
        )
    if program.training is None:
        options = replace(options, target_batch_size=None)
    bounds: list[Bound] = [*program.bounds(), *options.bounds]
    project_size = program.project_batch_size
    # The largest sizes whose batches in loader workers fit.
    sizes = range(1, options.largest_size + 1)
    shared_bytes = free_shared_bytes() // room.ranks_on_host
    in_shared = bisect_right(sizes, shared_bytes, key=program.shared_bytes)
    bounds.append((max(1, in_shared), "shared memory"))
    if not room.device.is_host:
        in_host = bisect_right(sizes, room.free_host_bytes(), key=program.worker_bytes)
        bounds.append((max(1, in_host), "CPU memory"))
    # Of equal bounds max_batch_size is named first, and other arguments last.
    bound = min(bounds, key=lambda bound: (bound[0], bound[1] != "max_batch_size"))
    search_bytes = limit_bytes - room.later_bytes
    missing_bytes = 0
    if room.device.is_host and program.training is not None:
        parameters = program.module.parameters()
        without_gradient = [p for p in parameters if p.requires_grad and p.grad is None]
        missing_bytes = held_bytes + bytes_of(without_gradient) - search_bytes
    fragmented_bytes = 0
    if program.is_ragged and not (room.device.is_host or room.device.has_expandable_segments):
        # What the process holds already are mostly weights, which change no shape.
        fragmented_bytes = int((1 - RAGGED_SHARE) * max(0, search_bytes - held_bytes))
    own = (
        search_bytes,
        missing_bytes,
        bound,
        program.avoided_sizes(),
        program.sample_sizes(),
        room.device.has_expandable_segments,
        fragmented_bytes,
    )
    of_ranks = zip(*ranks.exchange(own), strict=True)
    limits, missing_of_ranks, bounds_of_ranks, avoided, sample_sizes, expandable, fragmented = (
        of_ranks
    )
    largest, reason = min(bounds_of_ranks, key=lambda bound: bound[0])
    program.use_sample_sizes(sample_sizes)
    unit = options.multiple_of or 1
    kept_samples = options.target_batch_size
    step_samples = program.step_samples
    may_keep = (
        step_samples is not None
        and project_size is not None
        and project_size <= largest // unit * unit
        # About half of the size is the largest that can keep the step.
        and (options.min_batch_size or 1) <= project_size // 2
    )
    # objective="recipe" keeps it also where the size of the project is not allowed.
    keeps_step = keeps_step or (options.objective == "recipe" and not may_keep)
    if keeps_step and step_samples is not None:
        allowed = micro_batches(step_samples * ranks.size, ranks.size, options.multiple_of)
        smallest = options.first_size(1)
        if max(allowed, default=0) < smallest:
            # The nearest step that the arguments allow.
            step_samples = smallest
        kept_samples = step_samples * ranks.size
        if step_samples < largest:
            largest, reason = step_samples, "recipe"
    return SearchLimits(
        limit_bytes=min(limits),
        min_batch_size=options.min_batch_size or min(policy.first_size, largest),
        max_batch_size=largest,
        max_reason=reason,
        options=options,
        step=ProjectStep(
            project_size,
            program.accumulate_grad_batches,
            kept_samples,
            ranks.size,
            may_keep=may_keep and kept_samples is None,
        ),
        missing_bytes=max(0, *missing_of_ranks),
        fragmented_bytes=max(fragmented),
        is_host=room.device.is_host,
        steps_are_collective=program.steps_are_collective and ranks.ends_together,
        has_expandable_segments=all(expandable),
        avoided_sizes=frozenset().union(*avoided),
    )
