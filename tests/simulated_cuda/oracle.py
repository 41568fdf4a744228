"""Boundaries that a search is compared with, by bisection: whether a size fits is not monotone."""

from __future__ import annotations

import torch

from tests.simulated_cuda.device import SimulatedCuda
from tests.simulated_cuda.trace import Trace


def trains(trace: Trace, limit_bytes: int, size: int, *, quietly: bool = False, num_steps: int = 200) -> bool:
    """Whether a new process trains; ``quietly``: without an allocator retry after the first step."""
    device = SimulatedCuda(trace, limit_bytes)
    retries = 0
    try:
        for step in range(num_steps):
            device.train_step(size)
            retries = device.num_alloc_retries if step == 0 else retries
            if quietly and device.num_alloc_retries > retries:
                return False
    except torch.OutOfMemoryError:
        return False
    return True


def largest(trace: Trace, limit_bytes: int, *, quietly: bool = False) -> int:
    """The largest size that trains within ``limit_bytes``; ``quietly``: as do 1.5 and 3 % smaller ones."""

    def passes(size: int) -> bool:
        sizes = (max(1, round(share * size)) for share in ((1.0, 0.985, 0.97) if quietly else (1.0,)))
        return all(trains(trace, limit_bytes, each, quietly=quietly) for each in sizes)

    high = 1
    while trains(trace, limit_bytes, high, num_steps=1):
        high *= 2
    low = high // 4 if passes(max(high // 4, 1)) else 0
    while high - low > max(1, low // 500):  # to 0.2 %
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low
