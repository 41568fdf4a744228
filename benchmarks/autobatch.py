"""The published method of Ultralytics' AutoBatch, in our own words.

It runs one forward pass and the backward pass of the summed output (no loss, no targets, no optimizer) at five sizes,
fits a least-squares line to the memory that torch has reserved, and takes the size where the line reaches 60 % of what
was free; a result below 1 or above 1024 is given up for the default of 16. Where a probe ran out of memory, the answer
is a size below it that ran.

The original answers 16 on a CPU without a probe. To say more than that, what the process holds at its peak beyond its
start stands in for the reserved memory here, and the room under the cap for what is free.

Source: https://docs.ultralytics.com/reference/utils/autobatch
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.caps import Cap
from benchmarks.watched import Watched, watched
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.devices.select import device_memory_for

SIZES = (1, 2, 4, 8, 16)
SHARE = 0.6
DEFAULT_SIZE, LARGEST_SIZE = 16, 1024


def autobatch(name: str, cap: Cap) -> tuple[int, dict[str, Any]]:
    """Find a size for a workload.

    Raises:
        TypeError: for a training of more than one network, whose step is not one forward pass.
    """
    module = watched(name)
    if not module.automatic_optimization:
        raise TypeError("the method probes one network with one forward pass, and this training has two networks")
    device = torch.device("cuda" if cap.kind == "device" else "cpu")
    module.to(device).train()
    cap.close(device)
    device_memory = device_memory_for(device)
    assert device_memory is not None
    start_bytes = device_memory.current().allocated_bytes
    held_bytes: list[int] = []
    ran_out = False
    for size in SIZES:
        try:
            with Watched.watch():
                held_bytes.append(_held_bytes(module, size, device, device_memory, start_bytes))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            ran_out = True
            break
    free_bytes = cap.room_bytes - (2 * start_bytes if cap.kind == "device" else 0)  # it takes off both counts of torch
    size = size_by_line(SIZES[: len(held_bytes)], held_bytes, free_bytes)
    return (min(size, SIZES[len(held_bytes) - 1]) if ran_out else size), {"held_bytes": held_bytes}


def size_by_line(sizes: tuple[int, ...], held_bytes: list[int], free_bytes: int) -> int:
    """The size at which the line through what was held reaches the share of what was free."""
    if len(sizes) < 2:
        return DEFAULT_SIZE
    slope, intercept = statistics.linear_regression(sizes, held_bytes)
    if slope <= 0:
        return DEFAULT_SIZE
    size = int((SHARE * free_bytes - intercept) / slope)
    return size if 1 <= size <= LARGEST_SIZE else DEFAULT_SIZE


def _held_bytes(module: Watched, size: int, device: torch.device, device_memory: DeviceMemory, start_bytes: int) -> int:
    samples = [module.sample(torch.Generator().manual_seed(index)) for index in range(size)]
    inputs = module.collate(samples)[0].to(device)
    module.samples_by_size[size] += size
    device_memory.release_cached()
    device_memory.reset_peak()
    module.network(inputs).sum().backward()
    module.zero_grad(set_to_none=True)
    peak = device_memory.peak()
    return peak.allocated_bytes - start_bytes if peak.reserved_bytes is None else peak.reserved_bytes
