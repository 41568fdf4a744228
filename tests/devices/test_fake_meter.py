"""The double must keep the promises that the tests of the finder and the profiler build on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_batchmem.devices.base import DeviceMemory, MemoryStats


def test_peak_is_the_maximum_of_the_lines(fake_device: Any) -> None:
    fake = fake_device(budget_bytes=1000, base_bytes=100)
    device_memory: DeviceMemory = fake
    for fixed, per_sample in ((0, 50), (300, 5)):
        fake.use(fixed + per_sample * 4)
        fake.free()
    assert device_memory.peak() == MemoryStats(420)
    assert device_memory.current() == MemoryStats(100)
    device_memory.reset_peak()
    assert device_memory.peak() == MemoryStats(100)
    assert device_memory.budget_bytes() == 1000
    assert device_memory.outside_bytes() is None


def test_above_the_budget_it_runs_out_and_holds_what_it_held(fake_device: Any) -> None:
    fake = fake_device(budget_bytes=1000, base_bytes=100)
    fake.use(900)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        fake.use(1)
    assert fake.current_bytes == 1000
    assert fake.counters() == {"num_ooms": 1, "num_alloc_retries": 0}
    fake.free(400)
    assert fake.current() == MemoryStats(600)
    fake.reserved_ratio = 1.5
    assert fake.current() == MemoryStats(600, 900)
