"""Limits of the size in a search: memory, loader workers, data, the user, and the other ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.strategies import processes_on_node, steps_are_collective
from lightning_batchmem.batches.loaders import Bound, LoaderInfo
from lightning_batchmem.batches.probe_batches import ProbeBatches
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.host import HostMemory
from lightning_batchmem.plan.decide import decide
from lightning_batchmem.plan.fit import fit_memory, fit_time
from lightning_batchmem.plan.options import (
    UNBOUNDED_MAX_BATCH_SIZE,
    SearchOptions,
    parse_memory_limit,
)
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import NextSize, SearchLimits, Trial, mib
from lightning_batchmem.search.ranks import Ranks, own_budget_bytes

# A trial of each kind has so many steps, with those of its evaluation.
_STEPS = {"probe": 7, "rehearsal": 14}
# It takes about this time to collect garbage and restore everything before a trial.
_RESTART_SECONDS = 2.0
# The limit is this share of the memory that the device can provide. The rest is for libraries,
# fragmentation and other processes.
_LIMIT_SHARE = 0.95


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes in loader workers by arithmetic.

    They hold the batches that they make ahead, and one that is being fetched. The workers of all
    ``stages`` are alive at the same time.
    """

    stages: Sequence[ProbeBatches]

    def bytes_at(self, batch_size: int) -> int:
        return sum(
            _batches_ahead(info) * size
            for stage in self.stages
            for info, size in stage.batch_bytes(batch_size)
        )

    def largest_in_host_memory(self, processes: int = 1) -> int:
        """The largest batch size whose batches fit into free host memory.

        The ranks on this host, ``processes`` of them, share this memory equally.
        """
        if self.bytes_at(1) == 0:
            return UNBOUNDED_MAX_BATCH_SIZE
        host = HostMemory()
        room = (host.budget_bytes() - host.current().allocated_bytes) // processes
        return max(1, bisect_right(range(1, UNBOUNDED_MAX_BATCH_SIZE + 1), room, key=self.bytes_at))


def search_limits(
    trainer: Trainer,
    device: DeviceMemory,
    ranks: Ranks,
    options: SearchOptions,
    workers: WorkerMemory,
    *,
    bounds: Sequence[Bound],
    target_batch_size: int | None = None,
    averages_bytes: int = 0,
) -> SearchLimits:
    """The limits of a search, the same on every rank."""
    limit_bytes = memory_limit_bytes(trainer, device, options)
    held_bytes = device.current().allocated_bytes
    if options.memory_limit is not None and limit_bytes <= held_bytes:
        raise ValueError(
            f"memory_limit must be above the {mib(held_bytes)} that the process already holds, got"
            f" {mib(limit_bytes)}"
        )
    limit_bytes -= averages_bytes
    largest_allowed: list[Bound] = [
        (options.max_batch_size or UNBOUNDED_MAX_BATCH_SIZE, "max_batch_size"),
        *bounds,
    ]
    if target_batch_size is not None:
        largest_allowed.append((target_batch_size, "target_batch_size"))
    if not device.holds_loader_workers:
        largest_allowed.append(
            (workers.largest_in_host_memory(processes_on_node(trainer)), "host memory")
        )
    own = min(largest_allowed, key=lambda bound: bound[0])
    found = [(stage.longest_bytes, stage.notes) for stage in workers.stages]
    # The rank with the lowest value of a limit decides for all ranks.
    of_all = ranks.exchange((limit_bytes, own, found))
    largest, reason = min((bound for _, bound, _ in of_all), key=lambda bound: bound[0])
    # A rank without validation has fewer stages than the others.
    for number, stage in enumerate(workers.stages):
        stage.agree([each[number] for _, _, each in of_all if number < len(each)])
    return SearchLimits(
        limit_bytes=min(limit for limit, _, _ in of_all),
        min_batch_size=options.min_batch_size or min(SearchPolicy.first_size, largest),
        max_batch_size=largest,
        max_reason=reason,
        multiple_of=options.multiple_of,
        objective=options.objective,
        target_batch_size=target_batch_size,
        ranks=ranks.size,
        out_of_memory_kills=device.overrun_kills,
        steps_are_collective=steps_are_collective(trainer),
    )


def own_limit_bytes(trainer: Trainer, device: DeviceMemory, averages_bytes: int) -> int:
    """Bytes that this rank may hold at this moment; ``averages_bytes`` are taken later."""
    return _share_of(own_budget_bytes(device, trainer), device) - averages_bytes


def memory_limit_bytes(trainer: Trainer, device: DeviceMemory, options: SearchOptions) -> int:
    """Bytes that this process may hold.

    A ``memory_limit`` above the bytes that the device can provide causes a warning.
    """
    budget_bytes = own_budget_bytes(device, trainer)
    wanted_bytes = parse_memory_limit(options.memory_limit, budget_bytes)
    if wanted_bytes > budget_bytes:
        rank_zero_warn(
            f"memory_limit={options.memory_limit!r} is more than the device can provide,"
            f" {mib(budget_bytes)}."
        )
    return min(wanted_bytes, _share_of(budget_bytes, device))


def _share_of(budget_bytes: int, device: DeviceMemory) -> int:
    # On the host, this process also holds the interpreter and libraries.
    held_bytes = device.current().allocated_bytes if device.held_is_resident_set else 0
    return held_bytes + int(_LIMIT_SHARE * (budget_bytes - held_bytes))


def expected_seconds(trials: Sequence[Trial], limits: SearchLimits) -> float:
    """Seconds that the rest of a search takes if every size fits as predicted; 0 if unknown."""
    memory = fit_memory(trials)
    times = fit_time(trials)
    run = list(trials)
    seconds = 0.0
    if memory is None or times is None:
        return 0.0
    while isinstance(step := decide(run, limits), NextSize):
        size = step.batch_size
        predicted_bytes = int(memory.predict_bytes(step.batch_size))
        run.append(Trial(size, "ok", {memory.phase_at(size): predicted_bytes}, step.kind))
        seconds += _STEPS[step.kind] * times.step_seconds(size) + _RESTART_SECONDS
    return seconds


def with_workers(
    trial: Trial, workers: WorkerMemory, device: DeviceMemory, limit_bytes: int
) -> Trial:
    """The trial with the memory of DataLoader workers, which counts on the host."""
    trial = replace(trial, worker_bytes=workers.bytes_at(trial.batch_size))
    if not device.holds_loader_workers:
        return trial
    trial = replace(trial, reserve_bytes=trial.reserve_bytes + trial.worker_bytes)
    is_over = trial.outcome == "ok" and trial.needed_bytes > limit_bytes
    return replace(trial, outcome="over_limit") if is_over else trial


def _batches_ahead(info: LoaderInfo) -> int:
    loader = info.loader
    if not loader.num_workers:
        return 0
    # Pinned memory comes in powers of two.
    # Source: `allocate` in pytorch/aten/src/ATen/core/CachingHostAllocator.h.
    copies = 2 if loader.pin_memory and torch.cuda.is_available() else 1
    return (loader.num_workers * (loader.prefetch_factor or 0) + 1) * copies
