"""The fake device that the tests of both callbacks use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_batchmem.devices.base import DeviceMemory, MemoryStats


def test_the_peak_is_the_highest_use_since_the_reset(fake_device: Any) -> None:
    fake = fake_device(budget_bytes=1000, base_bytes=100)
    device_memory: DeviceMemory = fake
    for used_bytes in (200, 320):
        fake.use(used_bytes)
        fake.free()
    assert (device_memory.peak(), device_memory.current()) == (MemoryStats(420), MemoryStats(100))
    device_memory.reset_peak()
    assert device_memory.peak() == MemoryStats(100)
    fake.reserved_ratio = 1.5
    assert device_memory.current() == MemoryStats(100, 150)


def test_use_above_the_budget_or_the_enforced_limit_fails_and_changes_nothing(fake_device: Any) -> None:
    fake = fake_device(budget_bytes=1000, base_bytes=100)
    fake.use(900)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        fake.use(1)
    assert fake.current_bytes == 1000
    assert fake.counters() == {"num_ooms": 1, "num_alloc_retries": 0}
    fake.free()
    fake.enforces_limits = True
    with fake.limit_enforced(500) as is_enforced:
        assert is_enforced
        with pytest.raises(torch.cuda.OutOfMemoryError):
            fake.use(600)
    fake.use(600)
