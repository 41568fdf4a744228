"""Sizes that a search is compared with.

They are found by bisection, and whether a size fits is not monotone: these are boundaries, not proven maxima.
"""

from __future__ import annotations

import torch

from tests.simulated_cuda.device import SimulatedCuda
from tests.simulated_cuda.trace import Trace


def trains(device: SimulatedCuda, size: int, *, quietly: bool = False, num_steps: int = 200) -> bool:
    """Whether a new process trains at ``size``; ``quietly``: without a retry after the first step."""
    device.fresh()
    try:
        device.load_model()
        device.train_step(size)  # creates the optimizer's state
        retries = device.train_steps(size, num_steps - 1, stop_at_retry=quietly)
    except torch.OutOfMemoryError:
        return False
    return not (quietly and retries)


def largest_trained(trace: Trace, capacity_bytes: int, *, expandable: bool = False, num_steps: int = 200) -> int:
    """Largest size that trains with the whole capacity; 0 if none does."""
    return _largest(SimulatedCuda(trace, capacity_bytes, expandable=expandable), (1.0,), num_steps, quietly=False)


def largest_quiet(trace: Trace, limit_bytes: int, *, expandable: bool = False, num_steps: int = 200) -> int:
    """Largest size that, as 1.5 and 3 % smaller ones, trains quietly within ``limit_bytes``; 0 if none does."""
    shares = (1.0, 0.985, 0.97)
    return _largest(SimulatedCuda(trace, limit_bytes, expandable=expandable), shares, num_steps, quietly=True)


def _largest(device: SimulatedCuda, shares: tuple[float, ...], num_steps: int, *, quietly: bool) -> int:
    known: dict[int, bool] = {}

    def passes(size: int) -> bool:
        for each in (max(round(share * size), 1) for share in shares):
            if each not in known:
                enough = device.trace.peak_bytes(each) <= device.limit_bytes
                known[each] = enough and trains(device, each, quietly=quietly, num_steps=num_steps)
            if not known[each]:
                return False
        return True

    high = 1
    while device.trace.peak_bytes(high) <= device.limit_bytes:
        high *= 2
    low = high // 4 if passes(max(high // 4, 1)) else 0
    while high - low > max(1, low // 500):  # to 0.2 %
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low
