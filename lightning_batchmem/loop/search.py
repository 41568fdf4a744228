"""The search of a training loop: a loop comes in, and its plan goes out."""

from __future__ import annotations

import warnings
from pathlib import Path

from lightning_batchmem.devices import device_memory_for, device_name
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.foreign_values import begin_run
from lightning_batchmem.loop.program import LoopProgram
from lightning_batchmem.loop.training_loop import TrainingLoop
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.printing import print_or_warn
from lightning_batchmem.search.compiled import each_size_static
from lightning_batchmem.search.earlier_plan import parameters_text, write_missing_plan
from lightning_batchmem.search.limits import MemoryRoom
from lightning_batchmem.search.progress import SearchProgress
from lightning_batchmem.search.search import BatchSizeSearch


def plan_of_loop(
    loop: TrainingLoop,
    options: SearchOptions,
    given_plan: Plan | str | Path | None,
    *,
    verbose: bool,
) -> Plan:
    """Search on all ranks, restore everything, and print the plan on the first rank.

    Raises:
        NothingFitsError: if no size fits.
        ValueError: if the device has no peak counter.
    """
    begin_run()
    ranks = loop.ranks
    # A step of the user may fail on one rank alone.
    with ranks.fail_together():
        device_memory = device_memory_for(loop.device)
        if device_memory is None:
            raise ValueError(
                f"find_batch_size_of_loop cannot search, because {loop.device.type} or its"
                " allocator counts no peak memory. Set the batch size by hand."
            )
        plan = _searched(loop, device_memory, options, given_plan)
    if ranks.rank == 0:
        print_or_warn(str(plan) if verbose else plan.short_text())
        write_missing_plan(given_plan, plan)
    return plan


def _searched(
    loop: TrainingLoop,
    device_memory: DeviceMemory,
    options: SearchOptions,
    given_plan: Plan | str | Path | None,
) -> Plan:
    ranks = loop.ranks
    policy = SearchPolicy()
    room = MemoryRoom(device_memory, options.memory_limit, policy.limit_share, ranks.on_this_host())
    if room.warning and ranks.rank == 0:
        warnings.warn(room.warning, stacklevel=2)
    program = LoopProgram(loop, device_memory, options.multiple_of or 1)
    with (
        SearchProgress(enabled=ranks.rank == 0) as progress,
        program.entered(),
        each_size_static(),
    ):
        search = BatchSizeSearch(
            program,
            room,
            options,
            policy,
            ranks,
            progress,
            device=device_name(loop.device),
            parameters=parameters_text(program.module),
        )
        return search.run(given_plan)
