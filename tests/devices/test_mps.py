from __future__ import annotations

import pytest
import torch

from lightning_batchmem.devices.base import MemoryStats
from lightning_batchmem.devices.select import device_memory_for, utilization_for


def test_mps_has_current_values_and_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 3)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 5)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 100)
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: calls.append("synchronize"))
    device_memory = device_memory_for(torch.device("mps"))
    assert (device_memory.name, device_memory.has_peak) == ("mps", False)
    device_memory.reset_peak()
    assert device_memory.peak() == device_memory.current() == MemoryStats(3, 5)
    assert device_memory.budget_bytes() == 100
    assert device_memory.outside_bytes() is None
    assert calls == []
    device_memory.release_cached()
    device_memory.synchronize()
    assert calls == ["empty_cache", "synchronize"]
    assert device_memory.counters() == {}


def test_mps_utilization_is_unknown() -> None:
    assert utilization_for(torch.device("mps")) is None


def test_other_devices_have_no_meter() -> None:
    with pytest.raises(ValueError, match="device must be a cuda, cpu or mps device, got meta"):
        device_memory_for(torch.device("meta"))
