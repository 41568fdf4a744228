"""Sizes that a search is compared with, found by bisection: whether a size fits is not monotone, so these are
boundaries, not maxima."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.simulated_cuda.device import SimulatedCuda
from tests.simulated_cuda.trace import Trace

NUM_STEPS = 200


def trains(device: SimulatedCuda, size: int, *, quietly: bool = False) -> bool:
    """Whether a new process trains 200 steps at ``size``; ``quietly``: without a retry after the first step."""
    device.fresh()
    try:
        device.load_model()
        device.train_step(size)  # creates the optimizer's state
        retries = device.train_steps(size, NUM_STEPS - 1, stop_at_retry=quietly)
    except torch.OutOfMemoryError:
        return False
    return not (quietly and retries)


def trains_quietly(device: SimulatedCuda, size: int) -> bool:
    """Whether ``size`` and sizes up to 3 % smaller train quietly."""
    sizes = {size, round(0.985 * size), max(round(0.97 * size), 1)}
    return all(trains(device, each, quietly=True) for each in sorted(sizes, reverse=True))


def largest_trained(trace: Trace, capacity_bytes: int, *, expandable: bool = False) -> int:
    """Largest size that trains with the whole capacity; 0 if none does."""
    return _largest(SimulatedCuda(trace, capacity_bytes, expandable=expandable), trains)


def largest_quiet(trace: Trace, limit_bytes: int, *, expandable: bool = False) -> int:
    """Largest size that trains quietly where ``limit_bytes`` are enforced; 0 if none does."""
    return _largest(SimulatedCuda(trace, limit_bytes, expandable=expandable), trains_quietly)


def _largest(device: SimulatedCuda, passes: Callable[[SimulatedCuda, int], bool]) -> int:
    budget_bytes = device.budget_bytes()
    low, high = 0, 1
    while device.trace.peak_bytes(high) <= budget_bytes:
        low, high = high, 2 * high
    low = 0 if not passes(device, max(low // 2, 1)) else max(low // 2, 1)
    while high - low > max(1, low // 500):
        middle = (low + high) // 2
        fits = device.trace.peak_bytes(middle) <= budget_bytes and passes(device, middle)
        low, high = (middle, high) if fits else (low, middle)
    return low
